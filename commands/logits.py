"""``bertvision logits``: what a snapshot says, kept for students."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Json, Workspace, runs_verb


@runs_verb
def logits(
    checkpoint: Annotated[
        str | None, typer.Option(help="The snapshot; by default the only one there is.")
    ] = None,
    split: Annotated[str, typer.Option(help="Splits, such as train,tune.")] = "train",
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Keep a snapshot's logits on the windows it was trained on, for students to learn from.

    `bertvision train HEAD --distil TAG` reads them. What is kept is not computed again; a killed
    run is finished by the same command.
    """
