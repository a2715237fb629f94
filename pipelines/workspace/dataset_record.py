"""``datasets/<name>.json``: where added data sets come from, read without their tasks' code."""

from __future__ import annotations

import re
from pathlib import Path

from bertvision.errors import InputError, UnknownNameError
from bertvision.featurestore.format.names import check_name
from bertvision.pipelines.records import Record, read_record
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import NAMED_BY_FILE, TASKS, path_name
from bertvision.pipelines.workspace.config import DataConfig

_RESERVED = ("train", "tune", "dev", "test", "all")


class DatasetRecord(Record):
    """``datasets/<name>.json``: where an added data set comes from, and how it is read."""

    task: TaskConfig
    data: dict[str, DataConfig]
    """By split."""


def record_path(root: Path, name: str) -> Path:
    """Where the record of a data set of the workspace at ``root`` lies, or will lie."""
    return root / "datasets" / f"{check_name(name, 'data set')}.json"


def is_added(root: Path, name: str) -> bool:
    """Whether a data set of this name was added to the workspace at ``root``."""
    return record_path(root, name).is_file()


def read_dataset_record(root: Path, name: str) -> DatasetRecord:
    """The record of an added data set.

    Raises:
        UnknownNameError: it was not added.
        WorkspaceError: its record is damaged.
    """
    path = record_path(root, name)
    if not path.is_file():
        held = ", ".join(sorted(p.stem for p in path.parent.glob("*.json"))) or "none"
        raise UnknownNameError(
            f"{root} has no data set {name!r} (there are: {held}): say where it is with --data PATH"
        )
    again = "bertvision extract --task TASK --data PATH"
    return read_record(path, DatasetRecord, again, "delete it and name the data with --data again")


def dataset_name(task: str, source: str) -> str:
    """The name of a data set: its task's, or of a file of one's own the file's.

    A file that is named like a task is no data set of that task: of ``mr.csv`` it is ``csv_mr``.

    Raises:
        InputError: the file's name cannot be one.
    """
    if task not in NAMED_BY_FILE:
        return path_name(task)
    name = re.sub(r"[^a-z0-9]+", "_", Path(source).name.lower().split(".")[0]).strip("_")
    name = f"{task}_{name}" if name in TASKS else name
    if not name or name in _RESERVED or len(name) > 40:
        raise InputError(
            f"{source}: a data set is named by its file, and {name!r} cannot be one's name: rename "
            "the file to something of its own, of at most 40 letters, digits and '_'"
        )
    return name
