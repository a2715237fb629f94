"""How long answers take, and what an encoder answers in 8 bits."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Json, Precision, Workspace, runs_verb


@runs_verb
def latency(
    heads: Annotated[
        list[str] | None,
        typer.Argument(help="Names of trained heads; by default all, one of each kind."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Snapshot of the encoder; by default the one heads were trained on."),
    ] = None,
    trained_on: Annotated[
        str | None, typer.Option(help="Snapshot the heads were trained on; by default the same.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of dev, evenly spread.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of a forward pass.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds, in each of which every system answers all windows.")
    ] = 5,
    precision: Precision = "auto",
    quantised: Annotated[
        bool,
        typer.Option("--quantised", help="Also the encoder with 8-bit linear layers, on a CPU."),
    ] = False,
    beside: Annotated[
        str | None,
        typer.Option(help="Encoders of other workspaces, such as students: ../mrpc-4:1e."),
    ] = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Measure how long an answer takes: the encoder with a head beside BERT itself.

    A head that takes none of the upper hidden states needs only the layers below them.
    """


@runs_verb
def quantise(
    checkpoint: Annotated[
        str | None, typer.Option(help="The snapshot; by default the only one there is.")
    ] = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Score a snapshot on dev with its linear layers in 8 bits, on a CPU.

    It then stands among the results as bert-int8; `bertvision latency --quantised` measures it.
    """
