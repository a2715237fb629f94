"""Systems beside each other: ensembles, comparisons, and where one errs."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from bertvision.commands.options import (
    Json,
    Workspace,
    find_workspace,
    parse_choice,
    parse_tag,
    show,
)

Split = Annotated[str, typer.Option(help="Split that was scored.")]


def ensemble(
    heads: Annotated[list[str], typer.Argument(help="Trained heads.")],
    with_bert: Annotated[
        bool, typer.Option("--with-bert", help="BERT at the same snapshot is a member.")
    ] = False,
    combine: Annotated[str, typer.Option(help="Of the members' softmaxes: max or mean.")] = "max",
    trained_on: Annotated[
        str | None, typer.Option(help="Snapshot the heads were trained on.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshot they were scored on; by default the same.")
    ] = None,
    split: Split = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Combine heads, with each other and with BERT, from their stored logits."""
    from bertvision.commands.lab_tables import ensemble_table
    from bertvision.pipelines.results.ensemble import ensemble as run
    from bertvision.pipelines.results.softmax import Combine

    space = find_workspace(workspace)
    source = parse_tag(trained_on) if trained_on else space.trained_on(heads)
    result = run(
        space,
        heads,
        with_bert=with_bert,
        trained_on=source,
        tag=parse_tag(checkpoint) if checkpoint else source,
        combine=parse_choice(combine, get_args(Combine), "--combine"),
        split=split,
    )
    show(result, as_json, ensemble_table)


def compare(
    first: Annotated[
        str, typer.Argument(help="NAME[:TRAINED_ON[:CHECKPOINT]]: bert:1e, adapter:0.3e:1e, …")
    ],
    second: Annotated[str, typer.Argument(help="Likewise.")],
    metric: Annotated[
        str | None,
        typer.Option(
            help="f1, exact, accuracy, macro_f1, matthews, pearson, spearman; default: the task's."
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="What is drawn: context (with all its questions) or question; of sentences, items."
        ),
    ] = "context",
    resamples: Annotated[int, typer.Option(min=1, help="How often to draw.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    split: Split = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Say whether two systems differ by more than noise: a paired bootstrap."""
    from bertvision.commands.lab_tables import compare_table
    from bertvision.pipelines.results.answers import Metric
    from bertvision.pipelines.results.compare import By
    from bertvision.pipelines.results.compare import compare as run

    result = run(
        find_workspace(workspace),
        first,
        second,
        metric=parse_choice(metric, get_args(Metric), "--metric") if metric else None,
        split=split,
        by=parse_choice(by, get_args(By), "--by"),
        resamples=resamples,
        seed=seed,
    )
    show(result, as_json, compare_table)


def errors(
    run: Annotated[str, typer.Argument(help="As for `bertvision compare`: NAME[:SNAPSHOT].")],
    trained_on: Annotated[
        str | None, typer.Option(help="Snapshot the head was trained on.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Snapshot it was scored on.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Shown of each kind.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of examples.")] = 0,
    split: Split = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Show where a system errs: groups of questions, beside BERT, and examples."""
    from bertvision.commands.lab_tables import errors_table
    from bertvision.pipelines.results.error_analysis import errors as analyse

    result = analyse(
        find_workspace(workspace),
        run,
        trained_on=parse_tag(trained_on) if trained_on else None,
        checkpoint=parse_tag(checkpoint) if checkpoint else None,
        split=split,
        examples=examples,
        seed=seed,
    )
    show(result, as_json, errors_table)
