"""BERT's own answers at a snapshot: the baseline curve, with logits kept for ensembling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.files import digests_in, sha256_of_files, write_json
from bertvision.pipelines.finetuning.kept_logits import logits_on
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.records import BertScores, read_snapshot_info
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


def evaluate_bert(workspace: Workspace, tag: str) -> BertScores:
    """Run a snapshot over tune and dev, keep its logits, and score it on dev.

    Splits that were run before are not run again. The no-answer threshold of spans is tuned on
    ``tune``, which no training saw, never on dev.

    Args:
        workspace: where the snapshot is.
        tag: which snapshot.

    Returns:
        The contents of ``bert/<tag>/metrics.json``: for each rule of the task (see `Scores`) the
        threshold and the metrics on dev, and the seconds spent.

    Raises:
        StoreNotFoundError: there is no such snapshot.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    folder = workspace.bert_dir(tag)
    info = read_snapshot_info(workspace.snapshot_dir(tag))
    splits = [split for split in ("tune", "dev") if split in workspace.splits()]
    metrics_path = folder / "metrics.json"
    if metrics_path.is_file():
        scores = read_record(metrics_path, BertScores, BERT_COMMAND)
        kept = ["predictions.json", *(f"{split}.safetensors" for split in splits)]
        if scores.weights_sha256 == info.weights_sha256 and _are_kept(folder, kept, scores):
            return scores
    snapshot, task = load_snapshot(workspace.snapshot_dir(tag)), load_task(info.task.name)
    made = {split: logits_on(workspace, tag, split, snapshot, task) for split in splits}
    used = made if task.tunes else {"dev": made["dev"]}
    logits = {split: each for split, (each, _) in used.items()}
    found = task.score(logits["dev"], logits.get("tune"))
    write_json(folder / "predictions.json", found.predictions)
    scores = BertScores(
        snapshot=str(SnapshotTag(tag)),
        weights_sha256=info.weights_sha256,
        split="dev",
        rules=found.rules,
        threshold_tuned_on="tune" if "tune" in logits and found.tuned else None,
        seconds={split: seconds for split, (_, seconds) in used.items()},
        sha256=digests_in(
            folder, ["predictions.json", *(f"{split}.safetensors" for split in splits)]
        ),
    )
    write_record(metrics_path, scores)
    return scores


def _are_kept(folder: Path, names: Sequence[str], scores: BertScores) -> bool:
    """Whether files beside the scores are there, and as they were written where that is known."""
    for name in names:
        path, digest = folder / name, scores.sha256.get(name)
        if not path.is_file() or digest not in (None, sha256_of_files([path])):
            path.unlink(missing_ok=True)  # or it would be taken for what is to be made again
            return False
    return True
