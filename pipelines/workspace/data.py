"""The workspace and the data set that a job is to look at."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import BertvisionError, InputError
from bertvision.pipelines.encoders.checkpoint_path import check_path
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.tasks.registry import (
    NAMED_BY_FILE,
    TASKS,
    find_task,
    is_task,
    name_task,
    path_name,
)
from bertvision.pipelines.tasks.sentences.rows import FORMS, Columns, check_columns
from bertvision.pipelines.workspace.records import (
    dataset_name,
    is_added,
    read_dataset_record,
    record_path,
)
from bertvision.pipelines.workspace.workspace import FILE, RESULTS, Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.dataset import Dataset

_WITH_COLUMNS = (*NAMED_BY_FILE, "wikiqa", "phrases", "tagging")  # files with named fields


def check_data(
    workspace: Path | None,
    model: str | None,
    task: str | None,
    data: str | None,
    columns: Columns | None = None,
) -> Workspace | None:
    """Check what nothing heavy is needed for: the workspace, the task's name, and where data are.

    Args:
        workspace: folder of the workspace.
        model: encoder of a new one.
        task: Task of the data; also the name of a data set that was added before.
        data: Their place.
        columns: Columns that are read of a file of one's own; None is not to look into it.

    Returns:
        The workspace, where there is one.

    Raises:
        WorkspaceError: there is none, and no model to make one with.
        InputError: there is no such task or model, or the data are not what it is read from.
        UnknownNameError: the data set was not added, and it is not said where it is.
    """
    space = Workspace.find(workspace) if model is None else None
    if model is not None:
        check_path(model)
    check_source("--data", data)
    if task is None or (not is_task(task) and space and is_added(space.root, task)):
        return space
    name_task(task)
    if space and not (data or task == space.config.task.name or find_task(task).hub):
        read_dataset_record(space.root, path_name(task))  # which says that it was not added
    if data is not None:
        place = Path(data).expanduser()
        dataset_name(task, str(place.resolve()))  # which refuses what can be none
        if place.is_file():
            _check_file(task, data, columns)
    return space


def check_source(option: str, source: str | None) -> None:
    """Refuse a path where nothing is; what may be a name of the hub is not looked for.

    Args:
        option: Option that the message names.
        source: path or name.

    Raises:
        InputError: there is no such file or folder.
    """
    if source is None or Path(source).expanduser().exists():
        return
    ends = (*FORMS, ".json", ".txt", ".parquet", ".gz")
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(ends):
        raise InputError(f"{option} {source}: there is no such file or folder")


def _check_file(task: str, data: str, columns: Columns | None) -> None:
    path = Path(data).expanduser()
    named = path.name.split(".")[0]
    # a file of one's own may have any name; but `probe cola sst2 --data cola.tsv` would take the
    # sentences of one data set for another's
    if named in TASKS and named != task and task not in NAMED_BY_FILE:
        raise InputError(
            f"--data {data}: by its name this file holds {named}, but it would be read as {task}. "
            f"Give the file of {task}; for several data sets at once, the folder that holds a "
            "file of each; or give the file another name"
        )
    if task == "csv" and columns is not None:
        check_columns(path, columns)
    has_columns = path.name.removesuffix(".gz").endswith((".csv", ".jsonl"))
    if has_columns and task in TASKS and task not in _WITH_COLUMNS:
        raise InputError(
            f"--data {data}: {task} is read in a form of its own, and by its name this is a file "
            "with named columns, of which the task csv is read, with --text and --label"
        )


def open_data(
    workspace: Path | None,
    model: str | None,
    task: str | None,
    data: str | None,
    **settings: Any,
) -> tuple[Workspace, str | None]:
    """As `planned_data`, and what is new is written down.

    Args:
        workspace: as there, likewise ``model``, ``task``, ``data`` and ``settings``.
        model: encoder of a new workspace.
        task: Task of the data.
        data: Their place.
        **settings: fields of `TaskConfig`.

    Returns:
        The workspace, and the name of the data set (None: its own).
    """
    space, dataset = planned_data(workspace, model, task, data, **settings)
    dataset.keep()
    return space.ensure_written(), dataset.name


@contextmanager
def adding_data(
    workspace: Path | None,
    model: str | None,
    task: str | None,
    data: str | None,
    *,
    store: str | None = None,
    **settings: Any,
) -> Iterator[tuple[Workspace, str | None]]:
    """As `open_data`, around the job that the data are for.

    If the job is refused before anything is stored of data that are new, they are as if they had
    not been named, so that they can be named with other settings; likewise a workspace that was
    made for them.

    Args:
        workspace: as there, likewise ``model``, ``task``, ``data`` and ``settings``.
        model: encoder of a new workspace.
        task: Task of the data.
        data: Their place.
        store: place of the activations, where it is not the workspace's.
        **settings: fields of `TaskConfig`.

    Yields:
        The workspace, and the name of the data set (None: its own).
    """
    space, dataset = planned_data(workspace, model, task, data, **settings)
    before = {path.name for path in space.root.iterdir()} if space.root.is_dir() else None
    is_new = dataset.keep()
    try:
        yield space.ensure_written(), dataset.name
    except BertvisionError:
        if is_new and not _is_stored(space.at(store), str(dataset.name)):
            record_path(space.root, str(dataset.name)).unlink(missing_ok=True)
            if before is None or FILE not in before:
                _unmake(space.root, before)
        raise


def _unmake(root: Path, before: Collection[str] | None) -> None:
    """Remove a new workspace with nothing but settings and snapshots made of the given model.

    Args:
        root: Folder of the workspace.
        before: Names that were in it before; None where there was no folder. They stay.
    """
    with suppress(OSError):  # another process uses it, or a file is not ours
        folder = record_path(root, "a").parent
        if folder.is_dir() and folder.name not in (before or ()):
            folder.rmdir()
        if any((root / room).exists() for room in ("activations", *RESULTS)):
            return
        snapshots = root / "snapshots"
        if snapshots.is_dir():
            names = {path.name for path in snapshots.iterdir() if not path.name.startswith(".")}
            if names - {"0e", "untrained"} or snapshots.name in (before or ()):
                return
            shutil.rmtree(snapshots)
        (root / FILE).unlink()
        if before is None:
            root.rmdir()


def _is_stored(space: Workspace, dataset: str) -> bool:
    """Whether any of a data set is stored, or may be in a store that cannot be looked into."""
    try:
        stored_names = [name for names in space.stored().values() for name in names]
        return any(StoredName.parse(name).dataset == dataset for name in stored_names)
    except BertvisionError:
        return True


def planned_data(
    workspace: Path | None,
    model: str | None,
    task: str | None,
    data: str | None,
    *,
    weights: bool = True,
    **settings: Any,
) -> tuple[Workspace, Dataset]:
    """The workspace and the data set that a job is to look at; nothing is written.

    Args:
        workspace: folder of the workspace.
        model: a workspace for the hidden states of this encoder alone is planned where there is
            none.
        task: None is the workspace's own data.
        data: Place of the data; a data set that was added before needs none, nor does one that
            is on the hub.
        weights: As in `planned_workspace`.
        **settings: fields of `TaskConfig`, where they are not None: columns, ``max_length``,
            ``skip_bad``.

    Raises:
        WorkspaceError: there is no workspace.
        InputError: there is no such model or task, the data cannot be read, or items fit no window
            and are not to be skipped.
        UnknownNameError: the data set was not added, and it is not said where it is.
    """
    check_data(workspace, model, task, data)
    from bertvision.pipelines.workspace.creation import planned_workspace
    from bertvision.pipelines.workspace.dataset import is_own, planned_dataset
    from bertvision.pipelines.workspace.snapshots import workspace_tokenizer

    space = planned_workspace(workspace, model, weights=weights)
    if data is None and task is not None and is_added(space.root, path_name(task)):
        return space, space.dataset(path_name(task))
    if data is None and task in (None, space.config.task.name):
        return space, space.dataset()
    if task is None:
        raise InputError(f"--data {data}: say what it is with --task, such as --task cola")
    source = data or find_task(name_task(task)).hub
    if source is None:
        return space, space.dataset(task)  # which says that it was not added
    own = space.config.task.name
    if task == own and task not in NAMED_BY_FILE and is_own(space.dataset(), source):
        return space, space.dataset()
    tokenizer = partial(workspace_tokenizer, space)
    return space, planned_dataset(space.root, task, source, own, tokenizer=tokenizer, **settings)
