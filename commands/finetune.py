"""``bertvision finetune``: BERT's snapshots, and their scores."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Json, Workspace, runs_verb
from bertvision.pipelines.workspace.job_options import FinetuneOptions


@runs_verb
def finetune(
    *,
    options: FinetuneOptions,
    save_at: Annotated[
        str | None,
        typer.Option(
            help="Fractions of an epoch to snapshot at, such as 0,0.1,0.3,1 (default 1); 2+3 is "
            "the mean of two."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the workspace's run; needs no options.")
    ] = False,
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes that train together, a GPU for each where there are GPUs; they share "
            "every batch (docs/scaling.md).",
        ),
    ] = 1,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Fine-tune BERT with snapshots at fractions of an epoch, and score each on dev.

    Makes a workspace, or continues the one that was made with the same options: an interrupted run
    goes on where it was, to the same snapshots bit for bit.
    """
