"""The folder of a trained head: loading it, whether it is whole, and who may write to it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from bertvision.errors import InputError, ProvenanceError, UnknownNameError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import first_difference
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.lock import exclusive
from bertvision.models import Kind
from bertvision.models.factory import HEADS, build_head, kind_of
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.workspace.heads import check_kind, find_head
from bertvision.pipelines.workspace.records import (
    RunConfig,
    read_run_config,
    read_run_metrics,
)
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace


class LoadedHead(NamedTuple):
    """A trained head: the module in evaluation mode, and its record."""

    module: nn.Module
    config: RunConfig

    def check_fits(self, split: ActivationSplit, name: str, *, any_task: bool = False) -> None:
        """Make sure that a split's activations are what the head was trained on, or alike.

        Args:
            split: Name that it is to be given.
            name: Name of the head, for the message.
            any_task: Whether the texts may be those of another task, whose labels fit.

        Raises:
            ProvenanceError: they lack its layers, are of another model or task, or of sites.
        """
        record, config = split.record, self.config
        missing = sorted(set(config.layers) - set(record.layers))
        if missing or config.hidden_size != record.hidden_size:
            raise ProvenanceError(
                f"{name} was trained on layers {list(config.layers)} of width "
                f"{config.hidden_size}; {split.name} holds layers {list(record.layers)} of width "
                f"{record.hidden_size}"
            )
        same = [field for field in _SAME if not any_task or field != "task"]
        if difference := first_difference(config.activations, record.provenance, same):
            field, there, here = difference
            remedy = "a head works on activations of the model and task it was trained for"
            if field == "max_length" and any_task:
                remedy = f"name these data with --max-length {there} where they are first named"
            raise ProvenanceError(
                f"{name} was trained with {field} = {there!r}, {split.name} was extracted with "
                f"{here!r}: {remedy}"
            )


_SAME = ("model", "tokenizer_sha256", "task", "max_length", "layer_names")


def load_head(folder: str | Path, named: Run | None = None) -> LoadedHead:
    """Load a trained head from its folder, or by its name and snapshot in a workspace.

    Examples:
        >>> import bertvision
        >>> _ = bertvision.train("learned-pooling", checkpoint="1e")
        >>> head = bertvision.load_head("heads/1e/learned-pooling")
        >>> head.config.trained_on, head.module.training
        ('1e', False)
        >>> bertvision.load_head("learned-pooling:1e").config == head.config
        True

    Args:
        folder: Folder of the run; or ``NAME:TRAINED_ON`` of the workspace that you stand in.
        named: Name that the user gave. A class of one's own, whose module is imported, is only
            taken where its dotted path was named: a workspace that somebody else made runs no code.

    Raises:
        InputError: it is a class of one's own, which was not named.
        WorkspaceError: it is damaged.
        UnknownNameError: there is no such folder or head, or the class is not installed here.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        name, _, tag = str(folder).rpartition(":")
        if not (name and SnapshotTag.is_valid(tag)):
            raise UnknownNameError(
                f"there is no folder {folder}: give that of a trained head, such as "
                "heads/1e/learned-pooling in a workspace, or learned-pooling:1e where you stand "
                "in one"
            )
        named = named or Run.parse(name)
        folder = find_head(Workspace.find(None), tag, name)
    config = read_run_config(folder)
    head = config.head
    if ":" in head and (named is None or named.head != head):
        marks = folder.name[len(Run.of(head, 1.0, 0).name) :]
        raise InputError(
            f"{folder.name} is of the class {head}, which is code of somebody's own: name it "
            f"{head}{marks} to have it imported"
        )
    if (changed := changed_file(folder)) is not None:
        raise WorkspaceError(
            f"the head {folder} is damaged: {changed} is not as it was written; train it again "
            "with --overwrite"
        )
    module = build_head(
        head,
        layers=len(config.layers),
        hidden=config.hidden_size,
        classes=config.classes,
        kind=config.kind,
    )
    try:
        module.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise WorkspaceError(
            f"the head {folder} is damaged: {error}; train it again with --overwrite"
        ) from error
    return LoadedHead(module.eval(), config)


def is_whole(folder: Path) -> bool:
    """Whether a head's folder has its records, and weights that can be read."""
    try:
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return (folder / "metrics.json").is_file() and (folder / "config.json").is_file()
    except (OSError, SafetensorError):
        return False


def changed_file(folder: Path) -> str | None:
    """The first file of a trained head that is not as it was written; None where all are.

    Args:
        folder: Folder of the run. Of one that an earlier version wrote nothing is known.

    Raises:
        WorkspaceError: its ``metrics.json``, which has the digests, is missing or damaged.
    """
    for name, digest in read_run_metrics(folder).sha256.items():
        path = folder / name
        if not path.is_file() or sha256_of_files([path]) != digest:
            return name
    return None


def head_lock(folder: Path, what: str, *, wait: bool = False) -> AbstractContextManager[None]:
    """Held while a head's folder, or results in it, are written.

    Args:
        folder: Folder of the run.
        what: Action of the holder, for the message.
        wait: Whether to wait until it is free, instead of raising `LockedError`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    return exclusive(folder.with_name(f".{folder.name}.lock"), what, wait=wait)


def task_of_kind(kind: Kind, task: str) -> Task:
    """Task that heads of a kind learn in a workspace.

    Classification heads beside spans learn whether there is an answer.
    """
    return load_task(task if kind == find_task(task).kind else "answerable")


def kind_of_run(run: Run, task: str) -> Kind:
    """The kind of a run's head.

    Args:
        run: the head.
        task: Task of the workspace.

    Raises:
        InputError: a span head, where the task has no spans to score; or the workspace has no task.
        UnknownNameError: there is no such head.
    """
    if not find_task(task).learns:
        raise InputError(
            "this workspace is for hidden states alone, without a task that heads could learn: "
            "`bertvision probe` trains probes on them; heads are trained in a workspace that "
            "`bertvision finetune` made"
        )
    if run.head in HEADS:
        kind = HEADS[run.head].kind
    else:
        with torch.device("meta"):
            kind = kind_of(build_head(run.head, layers=13, hidden=768))  # whatever the dimensions
    return check_kind(run.head, kind, task)
