"""``bertvision exits``: what leaving the encoder early saves, and costs."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Csv, Json, Plot, Store, Workspace, runs_verb


@runs_verb
def exits(
    checkpoint: Annotated[
        str, typer.Argument(help="Snapshot that was fine-tuned with --variant exits:LAYERS.")
    ],
    split: Annotated[str, typer.Option(help="Split that is scored: dev or tune.")] = "dev",
    criterion: Annotated[
        str | None,
        typer.Option(
            help="What decides where a window leaves: entropy,probability,patience (default all)."
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Scores that differ by less agree (default a tenth of their standard deviation).",
        ),
    ] = None,
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Measure the score against the layers used, where sure windows leave the encoder early.

    Reads stored hidden states through the output layers of the snapshot, at every threshold in one
    pass; the encoder is not run.
    """
