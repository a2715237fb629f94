"""``bertvision sweep``: every head on every snapshot, in as few passes as possible."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import (
    DryRun,
    HeadDevices,
    Json,
    Store,
    Workspace,
    runs_verb,
)
from bertvision.pipelines.workspace.job_options import TrainOptions


@runs_verb
def sweep(
    heads: Annotated[
        list[str] | None,
        typer.Argument(help="Names from `bertvision heads`; by default all but the costly ones."),
    ] = None,
    *,
    trained_on: Annotated[
        str | None, typer.Option(help="Snapshots to train on, such as 0.3e,1e; by default all.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshots to evaluate on; by default all.")
    ] = None,
    fractions: Annotated[
        str, typer.Option(help="Parts of the training examples, such as 0,0.1,0.3,1.")
    ] = "1",
    seeds: Annotated[
        int, typer.Option(min=1, help="How many times each is trained, with seeds from 0.")
    ] = 1,
    options: TrainOptions,
    split: Annotated[str, typer.Option(help="Split to score.")] = "dev",
    devices: HeadDevices = 1,
    workspace: Workspace = None,
    store: Store = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train heads at several snapshots, parts of the data and seeds, and evaluate them all.

    What is there already is not done again: a stopped sweep is continued by the same command.
    """
