"""Attention heads of an encoder."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Csv, Json, Plot, Workspace, runs_verb

_Snapshot = Annotated[str, typer.Argument(help="Snapshot to analyse.")]
_Precision = Annotated[
    str,
    typer.Option(help="Arithmetic: 32, bf16, or auto, which is bf16 where it is native."),
]


@runs_verb
def attention(
    checkpoint: _Snapshot,
    split: Annotated[str, typer.Option(help="Split to analyse.")] = "dev",
    task: Annotated[
        str | None, typer.Option(help="A data set that was added before, not the workspace's own.")
    ] = None,
    windows: Annotated[
        int, typer.Option(min=0, help="Seeded sample of at most so many windows; 0 takes all.")
    ] = 200,
    precision: _Precision = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Measure what each attention head looks at: entropy, [SEP], neighbours; runs the encoder."""


@runs_verb
def prune(
    checkpoint: _Snapshot,
    split: Annotated[str, typer.Option(help="Split to score on.")] = "dev",
    items: Annotated[
        int,
        typer.Option(min=2, help="Seeded sample: half orders the heads, half is scored."),
    ] = 100,
    orders: Annotated[
        int, typer.Option(min=2, help="Random orders beside that of importance.")
    ] = 3,
    precision: _Precision = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the sample and of the orders.")] = 0,
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Mask attention heads, one by one and then ever more, and see what the encoder loses.

    Runs for each attention head the layers from its own up, and the encoder 38 times for the
    curve, over half of the items each.
    """


@runs_verb
def relations(
    checkpoint: _Snapshot,
    data: Annotated[
        str | None,
        typer.Option(help="A treebank in CoNLL-U, to be said once: a file or a folder."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the treebank.")] = "dev",
    sentences: Annotated[
        int, typer.Option(min=0, help="Seeded sample of at most so many; 0 takes all.")
    ] = 1_000,
    precision: _Precision = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the sample and of intervals.")] = 0,
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Find the attention heads that follow a dependency relation; runs the encoder.

    For each relation the best head is chosen on half of the sentences and scored on the others,
    beside the best fixed offset. --data is needed the first time.
    """
