"""Systems beside each other: ensembles and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import (
    Json,
    Scored,
    Workspace,
    runs_verb,
)


@runs_verb
def ensemble(
    heads: Annotated[list[str], typer.Argument(help="Names of trained heads.")],
    with_bert: Annotated[
        bool, typer.Option("--with-bert", help="Make BERT at the same snapshot a member too.")
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
    split: Scored = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Combine heads, with each other and with BERT, from their stored logits."""


@runs_verb
def compare(
    first: Annotated[
        str,
        typer.Argument(
            help="System as NAME[:TRAINED_ON[:CHECKPOINT]]: bert:1e, learned-pooling:0.3e:1e, …"
        ),
    ],
    second: Annotated[str, typer.Argument(help="The other system, likewise.")],
    metric: Annotated[
        str | None,
        typer.Option(
            help="f1, exact, accuracy, macro_f1, matthews, pearson or spearman; by default that of "
            "the task."
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="What is drawn: context (with all its questions) or question; of sentences, items."
        ),
    ] = "context",
    resamples: Annotated[int, typer.Option(min=1, help="How often the bootstrap draws.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    seeds: Annotated[
        str,
        typer.Option(help="one, as named, or all that were trained, which are then drawn too."),
    ] = "one",
    beside: Annotated[
        Path | None,
        typer.Option("--with", help="Workspace of the second system, with the same data."),
    ] = None,
    split: Scored = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Say whether two systems differ by more than noise, by a paired bootstrap."""
