"""Checks of jobs before anything heavy is imported: a wrong name costs no seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bertvision.errors import InputError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.models.zoo import HEADS, check_head
from bertvision.pipelines.reading import StoredName, StrPath, check_hidden_states, path_of, text_of
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.workspace.heads import check_head_activations, check_kind, find_head
from bertvision.pipelines.workspace.records import RunConfig, read_run_config
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.plugins import load_class


def find_workspace(
    workspace: StrPath | Workspace | None, store: StrPath | None = None
) -> Workspace:
    """Open the workspace that ``workspace`` names, or the one the current folder stands in.

    Args:
        workspace: Its folder, or itself.
        store: Folder or URL of its activations for this once.

    Raises:
        WorkspaceError: there is none.
    """
    if not isinstance(workspace, Workspace):
        workspace = Workspace.find(path_of(workspace))
    return workspace.at(text_of(store))


def check_learns(space: Workspace) -> None:
    """Check that an encoder has an output layer: that its workspace has a task.

    Raises:
        InputError: it is for hidden states alone.
    """
    if not find_task(space.config.task.name).learns:
        raise InputError(
            "this workspace is for hidden states alone: its encoder has no output layer, and says "
            "nothing; `bertvision finetune` makes a workspace whose encoder answers"
        )


def check_new_heads(space: Workspace, runs: Iterable[Run]) -> None:
    """Check that heads to train exist and are of a kind that the workspace's task takes.

    Raises:
        UnknownNameError: there is no such head.
        InputError: a span head, where the task has no spans to score, or a class of one's own that
            cannot be imported.
    """
    for run in runs:
        if ":" in check_head(run.head):
            load_class(run.head, "head", named=True)
        elif run.head in HEADS and space.splits():  # else nothing is trained at all
            check_kind(run.head, HEADS[run.head].kind, space.config.task.name)


def check_trained_heads(
    space: Workspace, heads: Sequence[str], trained_on: str
) -> dict[str, RunConfig]:
    """Check that heads were trained on a snapshot.

    Returns:
        Their records, by the names given.

    Raises:
        UnknownNameError: one was not.
        WorkspaceError: a record is damaged.
    """
    return {head: read_run_config(find_head(space, trained_on, head)) for head in heads}


def check_stored(space: Workspace, tag: str, split: str, *, whole: bool = True) -> None:
    """Check that a split is stored, and holds hidden states.

    Args:
        space: the workspace.
        tag: the snapshot.
        split: Name of the split.
        whole: Whether every token of each example is needed.

    Raises:
        StoreNotFoundError: nothing was extracted yet.
        UnknownNameError: this snapshot or split was not extracted.
        InputError: it holds other sites of the encoder, or some tokens of each example.
    """
    space.stored_snapshot(tag).require(split)
    check_hidden_states(split)
    if whole:
        StoredSplit(space.activations, tag, split).require_all_tokens()


def check_training_data(
    space: Workspace, runs: Iterable[Run], tag: str, layers: Sequence[int] | None
) -> None:
    """Check that what heads are trained on is stored.

    Args:
        space: the workspace.
        runs: the heads.
        tag: the snapshot.
        layers: Layers that those take which name none of their own; None is all.

    Raises:
        StoreNotFoundError: nothing was extracted yet.
        UnknownNameError: this snapshot or split was not extracted.
        InputError: a layer was not.
    """
    for run in runs:
        if run.head in HEADS:
            kind = check_kind(run.head, HEADS[run.head].kind, space.config.task.name)
            tokens = run.tokens(kind)
            check_head_activations(space, tag, tokens, "train")
            split = StoredSplit(space.activations, tag, StoredName("train", tokens).name)
            split.layer_positions(run.settings.get("layers", layers))


def check_snapshots(space: Workspace, tags: Iterable[str]) -> None:
    """Check that snapshots are there, or are made without training: ``0e``, ``untrained``, means.

    Raises:
        UnknownNameError: one is neither.
    """
    for tag in (part for text in tags for part in SnapshotTag(text).parts):
        if not (tag.is_untrained or tag.is_pretrained):
            space.require_snapshot(tag)


def check_cluster(scheduler: str | None) -> None:
    """Check that a scheduler that is to extract can be a cluster; None extracts here.

    Whether it answers is not asked: where all is stored, it is not needed.

    Raises:
        InputError: it cannot.
    """
    if scheduler is None:
        return
    from bertvision.pipelines.scheduler import is_cluster

    if not is_cluster(scheduler):
        raise InputError(
            f"--scheduler {scheduler!r}: give tcp://HOST:PORT of a Dask cluster, or leave it out "
            "to extract in this process"
        )
