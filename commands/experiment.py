"""An experiment as a whole: what it holds, the quickstart, the report, scoring a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Json, Store, Workspace, runs_verb


@runs_verb
def status(workspace: Workspace = None, store: Store = None, as_json: Json = False) -> None:
    """Show what the workspace holds, and what can be run next."""


@runs_verb
def score(
    predictions: Annotated[Path, typer.Argument(help='JSON file: {"question id": "answer"}.')],
    data: Annotated[Path, typer.Argument(help="SQuAD file.")],
    na_prob: Annotated[
        Path | None, typer.Option(help='JSON file: {"question id": probability of no answer}.')
    ] = None,
    na_prob_thresh: Annotated[
        float, typer.Option(help="Predict no answer above this probability.")
    ] = 1.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip malformed questions and count them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Score a predictions file with the official SQuAD 2.0 metric."""


@runs_verb
def quickstart(
    workspace: Annotated[Path, typer.Option("--workspace", "-w", help="Folder to make.")] = Path(
        "quickstart"
    ),
    as_json: Json = False,
) -> None:
    """Run the whole main job on a small built-in example, without network, in minutes."""


@runs_verb
def report(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders that repeat made, which get a section as spread compares them; where "
            "you stand in no workspace, a page of their own."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; by default report/ in the workspace."),
    ] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Write every result as one HTML file that needs no network, and tables and figures as files.

    An older report at the same place is replaced; a folder with anything else is left alone.
    """
