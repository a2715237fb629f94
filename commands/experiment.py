"""An experiment as a whole: what it holds, the quickstart, and scoring a predictions file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Json, Store, Workspace, find_workspace, show


def status(workspace: Workspace = None, store: Store = None, as_json: Json = False) -> None:
    """What the workspace holds, and what can be run next."""
    from bertvision.commands.tables import status_table
    from bertvision.pipelines.workspace.status import status as run

    show(run(find_workspace(workspace, store)), as_json, status_table)


def score(
    predictions: Annotated[Path, typer.Argument(help='{"question id": "answer"}')],
    data: Annotated[Path, typer.Argument(help="SQuAD file.")],
    na_prob: Annotated[
        Path | None, typer.Option(help='{"question id": probability of no answer}')
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
    from bertvision.commands.tables import mapping_table
    from bertvision.pipelines.tasks.squad.metrics import score_files

    result = score_files(
        predictions, data, na_prob, na_prob_thresh=na_prob_thresh, skip_bad=skip_bad
    )
    show(result, as_json, mapping_table)


def quickstart(
    workspace: Annotated[Path, typer.Option("--workspace", "-w", help="Folder to make.")] = Path(
        "quickstart"
    ),
    as_json: Json = False,
) -> None:
    """Run the whole main job on a small built-in example, without network, in minutes."""
    from bertvision.commands.tables import quickstart_table
    from bertvision.pipelines.quickstart import quickstart as run

    show(run(workspace), as_json, quickstart_table)
