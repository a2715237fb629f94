"""``bertvision errors``: where a system errs."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Json, Scored, Workspace, runs_verb


@runs_verb
def errors(
    system: Annotated[
        str, typer.Argument(help="System as for `bertvision compare`: NAME[:SNAPSHOT].")
    ],
    trained_on: Annotated[
        str | None, typer.Option(help="Snapshot the head was trained on.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Snapshot it was scored on.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Examples shown of each kind.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of examples.")] = 0,
    split: Scored = "dev",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Show where a system errs: groups of questions, beside BERT, and examples."""
