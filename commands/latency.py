"""How long answers take."""

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
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Measure how long an answer takes: the encoder with a head beside BERT itself.

    A head that takes none of the upper hidden states needs only the layers below them.
    """
