"""What came out, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Csv, Json, Workspace, runs_verb


@runs_verb
def table(
    name: Annotated[
        str | None, typer.Argument(help="Table of the report; by default the names of all.")
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--with", help="Another workspace, whose rows stand beside; may be repeated."),
    ] = None,
    csv: Csv = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Print a table of the report: scores, snapshots against each other, parts of the data, probes.

    Rows of several workspaces say which data they are of, by its digest.
    """
