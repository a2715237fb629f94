"""Arguments that all analyses of stored activations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bertvision.errors import InputError
from bertvision.jobs.checks import check_stored, find_workspace
from bertvision.jobs.reading import StrPath, path_of
from bertvision.pipelines.plotting import check_suffix
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.result import AnalysisResult

R = TypeVar("R", bound="AnalysisResult")


def find_beside(
    beside: StrPath | None, workspace: StrPath | None, tag: str, splits: Sequence[str]
) -> Workspace | None:
    """The workspace that is named by ``--with``, where there is one, with what is read of it.

    Args:
        beside: its folder.
        workspace: folder of the one beside it.
        tag: snapshot that is read of it.
        splits: that are read of this.

    Raises:
        WorkspaceError: there is none.
        InputError: it is the same workspace.
        UnknownNameError: there is no such snapshot or split.
    """
    if beside is None:
        return None
    other = find_workspace(beside)
    if other.root == find_workspace(workspace).root:
        raise InputError(f"--with {other.root}: this is the same workspace; leave --with out")
    for split in splits:
        check_stored(other, tag, split)
    return other


def analysed(
    run: Callable[[Workspace, Path | None], R],
    tags: Sequence[str],
    splits: Sequence[str],
    *,
    scheduler: str,
    plot: StrPath | None,
    workspace: StrPath | None,
    store: StrPath | None,
) -> R:
    """Run an analysis after all checks that need nothing heavy.

    Args:
        run: imports what it needs, and analyses: called with the workspace and the figure's file.
        tags: snapshots that it reads.
        splits: that it reads of each.
        scheduler: where it computes.
        plot: SVG file to write.
        workspace: folder of the experiment.
        store: activation store.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: an option is wrong.
    """
    from bertvision.pipelines.scheduler import check_scheduler

    figure = path_of(plot)
    if figure is not None:
        check_suffix(figure)
    check_scheduler(scheduler)
    space = find_workspace(workspace, store)
    for tag in tags:
        for split in splits:
            check_stored(space, tag, split)
    return run(space, figure)
