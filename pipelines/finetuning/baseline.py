"""BERT's own answers at a snapshot: the baseline curve, with logits kept for ensembling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.files import digests_in, sha256_of_files, write_json
from bertvision.pipelines.finetuning.kept_logits import logits_on
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.records import BertScores, read_snapshot_info
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.snapshots import Snapshot, load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

S = TypeVar("S", bound=BertScores)


def evaluate_bert(workspace: Workspace, tag: str) -> BertScores:
    """Run a snapshot over tune and dev, keep its logits, and score it on dev.

    Splits that were run before are not run again. The no-answer threshold of spans is tuned on
    ``tune``, which no training saw, never on dev.

    Args:
        workspace: Workspace of the snapshot.
        tag: Tag of the snapshot.

    Returns:
        The contents of ``bert/<tag>/metrics.json``: for each rule of the task (see `Scores`) the
        threshold and the metrics on dev, and the seconds spent.

    Raises:
        StoreNotFoundError: there is no such snapshot.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    folder = workspace.bert_dir(tag)
    if (kept_before := kept_scores(workspace, tag, folder, BertScores, BERT_COMMAND)) is not None:
        return kept_before
    scores = scored(workspace, load_snapshot(workspace.snapshot_dir(tag)), folder)
    write_record(folder / "metrics.json", scores)
    return scores


def kept_scores(
    workspace: Workspace, tag: str, folder: Path, kind: type[S], command: str
) -> S | None:
    """The scores in a folder, where they and what they were made of are of a snapshot's weights.

    Args:
        workspace: Workspace with the snapshot.
        tag: Tag of the snapshot.
        folder: Folder with ``metrics.json``; files in it that are damaged are removed.
        kind: Kind of the record.
        command: Command that makes it again, for messages.

    Raises:
        StoreNotFoundError: there is no such snapshot.
        WorkspaceError: the record is damaged.
    """
    info, path = read_snapshot_info(workspace.snapshot_dir(tag)), folder / "metrics.json"
    if not path.is_file():
        return None
    scores = read_record(path, kind, command)
    names = ["predictions.json", *(f"{split}.safetensors" for split in _splits(workspace))]
    same = scores.weights_sha256 == info.weights_sha256
    return scores if same and _are_kept(folder, names, scores) else None


def scored(
    workspace: Workspace,
    snapshot: Snapshot,
    folder: Path,
    where: torch.device | None = None,
    command: str = BERT_COMMAND,
) -> BertScores:
    """Run a snapshot over tune and dev, and score it on dev; its answers are kept in a folder.

    Args:
        workspace: Workspace with the data.
        snapshot: Snapshot as it is to be run.
        folder: Folder of its logits and predictions.
        where: see `logits_on`.
        command: likewise.
    """
    info, splits = snapshot.info, _splits(workspace)
    task = load_task(info.task.name)
    made = {
        split: logits_on(
            *(workspace, info.tag, split, snapshot, task, command), folder=folder, where=where
        )
        for split in splits
    }
    used = made if task.tunes else {"dev": made["dev"]}
    logits = {split: each for split, (each, _) in used.items()}
    scores = task.score(logits["dev"], logits.get("tune"))
    write_json(folder / "predictions.json", scores.predictions)
    return BertScores(
        snapshot=str(SnapshotTag(info.tag)),
        weights_sha256=info.weights_sha256,
        split="dev",
        rules=scores.rules,
        threshold_tuned_on="tune" if "tune" in logits and scores.tuned else None,
        seconds={split: seconds for split, (_, seconds) in used.items()},
        sha256=digests_in(
            folder, ["predictions.json", *(f"{split}.safetensors" for split in splits)]
        ),
    )


def _splits(workspace: Workspace) -> list[str]:
    return [split for split in ("tune", "dev") if split in workspace.splits()]


def _are_kept(folder: Path, names: Sequence[str], scores: BertScores) -> bool:
    """Whether files beside the scores are there, and as they were written where that is known."""
    for name in names:
        path, digest = folder / name, scores.sha256.get(name)
        if not path.is_file() or digest not in (None, sha256_of_files([path])):
            path.unlink(missing_ok=True)  # or it would be taken for what is to be made again
            return False
    return True
