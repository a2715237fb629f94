"""Many seeds: ``bertvision repeat`` and ``bertvision spread``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Csv, Json, runs_verb
from bertvision.pipelines.workspace.job_options import FinetuneOptions


@runs_verb
def repeat(
    *,
    options: FinetuneOptions,
    save_at: Annotated[
        str | None,
        typer.Option(
            help="Fractions of an epoch to snapshot at, such as 0,0.1,0.3,1 (default 1); 2+3 is "
            "the mean of two."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="How many seeds; --seed is the first of them.")
    ] = 5,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            "-w",
            help="Folder of the workspaces, seed-0, seed-1, …; by default the one you stand in.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fine-tune BERT with several seeds, each in a workspace of its own, and say how they differ.

    An interrupted command is continued by the same command; what is there is not done again. Seeds
    can be added later: new ones get the settings of those that are there.
    """


@runs_verb
def spread(
    folders: Annotated[
        list[str],
        typer.Argument(
            help="Folders that repeat made, one for each method; FOLDER@NAME:SNAPSHOT scores "
            "another system than BERT's last snapshot."
        ),
    ],
    csv: Csv = None,
    plot: Annotated[
        Path | None, typer.Option(help="SVG file to write: a row of points for each method.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare methods by the runs of their seeds: mean, spread, failed runs, costs, difference."""
