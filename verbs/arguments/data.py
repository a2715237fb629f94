"""The workspace and the data set that a verb is to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertvision.errors import InputError
from bertvision.pipelines.tasks.registry import TASKS, find_task, is_task, name_task, path_name
from bertvision.pipelines.workspace.dataset_record import is_added, read_dataset_record
from bertvision.pipelines.workspace.workspace import Workspace


def check_data(
    workspace: Path | None, model: str | None, task: str | None, data: str | None
) -> Workspace | None:
    """Check what can be checked without reading data: the workspace, and the task's name.

    Args:
        workspace: folder of the workspace.
        model: encoder of a new one.
        task: what the data are; also the name of a data set that was added before.
        data: where they are.

    Returns:
        The workspace, where there is one.

    Raises:
        WorkspaceError: there is none, and no model to make one with.
        InputError: there is no such task.
        UnknownNameError: the data set was not added, and it is not said where it is.
    """
    space = Workspace.find(workspace) if model is None else None
    if task is None or (not is_task(task) and space and is_added(space.root, task)):
        return space
    name_task(task)
    if space and not (data or task == space.config.task.name or find_task(task).hub):
        read_dataset_record(space.root, path_name(task))  # which says that it was not added
    return space


def open_data(
    workspace: Path | None,
    model: str | None,
    task: str | None,
    data: str | None,
    **settings: Any,
) -> tuple[Workspace, str | None]:
    """The workspace and the data set that a verb is to look at.

    Args:
        workspace: folder of the workspace.
        model: a workspace for the hidden states of this encoder alone is made where there is none.
        task: None is the workspace's own data.
        data: where the data are; a data set that was added before needs none, nor does one that
            is on the hub.
        **settings: fields of `TaskConfig`, where they are not None: columns, ``max_length``,
            ``skip_bad``.

    Returns:
        The workspace, and the name of the data set (None: its own).
    """
    check_data(workspace, model, task, data)
    from bertvision.pipelines.workspace.creation import planned_workspace
    from bertvision.pipelines.workspace.dataset import add_dataset, check_own

    space = planned_workspace(workspace, model)
    if data is None and task is not None and is_added(space.root, path_name(task)):
        return space, path_name(task)
    if data is None and task in (None, space.config.task.name):
        return space.ensure_written(), None
    if task is None:
        raise InputError(f"--data {data}: say what it is with --task, such as --task cola")
    source = data or find_task(name_task(task)).hub
    named = None if data is None else Path(data).name.split(".")[0]
    # a file of one's own may have any name; but `probe cola sst2 --data cola.tsv` would take the
    # sentences of one data set for another's
    if named in TASKS and named != task and task != "csv" and Path(str(data)).is_file():
        raise InputError(
            f"--data {data}: by its name this file holds {named}, but it would be read as {task}. "
            f"Give the file of {task}; for several data sets at once, the folder that holds a "
            "file of each; or give the file another name"
        )
    if source is None:
        return space, space.dataset(task).name  # which says that it was not added
    if task == space.config.task.name and task != "csv":
        check_own(space.dataset(), source)
        return space, None
    added = add_dataset(space.root, task, source, **settings)
    return space.ensure_written(), added.name
