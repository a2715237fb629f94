"""Systems beside each other: ensembles, comparisons, and where one errs."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from bertvision.commands.options import (
    Json,
    Workspace,
    find_workspace,
    parse_choice,
    parse_tag,
    show,
)
from bertvision.commands.tables import Row, metric_cells
from bertvision.pipelines.text import format_table

Split = Annotated[str, typer.Option(help="Split that was scored.")]


def ensemble(
    heads: Annotated[list[str], typer.Argument(help="Trained heads.")],
    with_bert: Annotated[
        bool, typer.Option("--with-bert", help="BERT at the same snapshot is a member.")
    ] = False,
    combine: Annotated[
        str, typer.Option(help="How the softmaxes are combined: max or mean.")
    ] = "max",
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
    from bertvision.pipelines.results.ensemble import ensemble as run
    from bertvision.pipelines.results.softmax import Combine
    from bertvision.pipelines.workspace.heads import trained_on as on

    space = find_workspace(workspace)
    source = parse_tag(trained_on) if trained_on else on(space, heads)
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    split: Split = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Say whether two systems differ by more than noise: a paired bootstrap."""
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of examples.")] = 0,
    split: Split = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Show where a system errs: groups of questions, beside BERT, and examples."""
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


def ensemble_table(result: Row) -> str:
    """The members and their combination, with the metrics that all have."""
    from bertvision.pipelines.tasks.scores import METRICS, headline
    from bertvision.pipelines.workspace.reproduce import ensemble_name

    systems = ["BERT" if run == "bert" else run for run in result["members"]]
    systems.append(ensemble_name(result["members"], result["combine"]))
    metrics = [headline(part["rules"]) for part in (*result["parts"], result)]
    shown = [name for name in METRICS if all(name in m for m in metrics)]
    return format_table(
        ["system", *(METRICS[name] for name in shown)],
        [[system, *metric_cells(m, shown)] for system, m in zip(systems, metrics, strict=True)],
    )


def compare_table(result: Row) -> str:
    """Both scores, the difference with its interval and p, and what it says."""
    from bertvision.pipelines.results.bootstrap import format_p
    from bertvision.pipelines.tasks.scores import METRICS

    table = format_table(
        ["system", METRICS[result["metric"]]],
        [
            [result["first"], f"{result['first_score']:.2f}"],
            [result["second"], f"{result['second_score']:.2f}"],
            ["difference", f"{result['difference']:+.2f}"],
        ],
    )
    interval = f"{result['low']:+.2f} to {result['high']:+.2f}"
    p = format_p(result["p"], result["resamples"])
    return f"{table}\n\n95 % interval  {interval}\np              {p}\n\n{result['sentence']}"


def errors_table(result: Row) -> str:
    """Groups with their scores, the second answer, agreement with BERT, and the examples."""
    from bertvision.pipelines.results.error_analysis import CELLS

    parts = [
        _groups(grouping, rows, result["metrics"]) for grouping, rows in result["groups"].items()
    ]
    if (second := result["second"]) and second["first_wrong"]:
        parts.append(
            f"where the first answer is wrong ({second['first_wrong']:,} questions), the second is "
            f"right in {second['percent']:.1f} %: {second['second_right_HasAns']:,} HasAns, "
            f"{second['second_right_NoAns']:,} NoAns"
        )
    if confused := result["confusions"]:
        rows = [
            [c["gold"], c["answer"], f"{c['n']:,}", f"{c['n'] / c['of']:.1%}"] for c in confused
        ]
        parts.append(format_table(["gold", "taken for", "n", "part of the class"], rows))
    if cells := result["agreement"]:
        rows = [[c, f"{cells[c]:,}", f"{cells[c] / result['questions']:.1%}"] for c in CELLS]
        table = format_table(["right, beside BERT", "n", "part"], rows)
        parts.append(f"{table}\nMcNemar's exact test: p = {cells['p']:.2g}")
    parts += [_example(example) for example in result["examples"]]
    return "\n\n".join(parts)


def _groups(grouping: str, rows: list[dict[str, Any]], metrics: list[str]) -> str:
    from bertvision.pipelines.tasks.scores import METRICS

    sides = {"": "", "bert_": "BERT "} if f"bert_{metrics[0]}" in rows[0] else {"": ""}
    keys = {f"{key}{m}": f"{side}{METRICS[m]}" for key, side in sides.items() for m in metrics}
    return format_table(
        [grouping, "n", *keys.values()],
        [[row["group"], f"{row['n']:,}", *(f"{row[key]:.1f}" for key in keys)] for row in rows],
    )


def _example(example: Row) -> str:
    answers = {"gold": example["gold"], "answer": example["answer"]}
    answers |= {key: example[key] for key in ("second", "bert") if example.get(key) is not None}
    lines = [f"{example['cell']}: {example['question']} ({example['id']})"]
    lines += [example["context"]] if example["context"] else []
    lines += [f"{name:<8}{_answer(value)}" for name, value in answers.items()]
    return "\n  ".join([*lines, f"{'score':<8}{example['score']:.0f}"])


def _answer(value: str | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "answerable" if value else "not answerable"
    return " | ".join(value) or "(no answer)" if isinstance(value, list) else value or "(no answer)"
