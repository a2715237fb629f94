"""The fine-tuned encoder as a ranker: it reads a question and a passage together, in one window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import pad_id
from bertvision.pipelines.finetuning.kept_logits import predict_logits
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.ranking.options import CROSS_ENCODER
from bertvision.pipelines.ranking.records import Ranking, find_ranking
from bertvision.pipelines.ranking.systems import Job
from bertvision.pipelines.tasks.sentences.wikiqa import WikiqaPairsTask, pairs_of
from bertvision.pipelines.tasks.soundness import report_doubts
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot


def check_cross_encoder(job: Job) -> None:
    """Refuse a workspace whose encoder was not fine-tuned on pairs.

    Raises:
        InputError: it was not.
    """
    own = job.workspace.dataset()
    if not isinstance(own.task, WikiqaPairsTask):
        raise InputError(
            f"{CROSS_ENCODER}: the encoder of {job.workspace.root} was fine-tuned on "
            f"{own.task.name}, so that it cannot score a question and a passage together: make a "
            "workspace with `bertvision finetune --task wikiqa_pairs`, or leave it out of --scorers"
        )


def report_shared(job: Job) -> None:
    """Say how many pairs of test the encoder was fine-tuned on, if it was and there are any."""
    own = job.workspace.dataset()
    if isinstance(own.task, WikiqaPairsTask):
        parts = {"train": own.items("train"), "test": pairs_of(job.data, "test")}
        report_doubts(
            f"{job.dataset}, beside what the encoder was fine-tuned on,",
            {part: list(map(own.task.example, items)) for part, items in parts.items()},
        )


def rank_together(job: Job, tag: str, precision: str) -> Ranking:
    """Rank by a snapshot's own scores; find what was ranked before.

    The score of a pair is by how much the logit of an answer is above that of none.

    Args:
        job: the data.
        tag: snapshot of a workspace of pairs.
        precision: of the forward pass.

    Raises:
        UnknownNameError: there is no such snapshot.
        ProvenanceError: the ranking was made with other settings; names the field.
        WorkspaceError: the snapshot or the ranking is damaged.
    """
    ensure_snapshot(job.workspace, tag)
    arithmetic = resolve_precision(precision)
    folder = job.workspace.snapshot_dir(tag)
    info = read_snapshot_info(folder)
    settings = {
        "data_sha256": job.data.sha256,
        "checkpoint": str(tag),
        "scorer": CROSS_ENCODER,
        "weights_sha256": info.weights_sha256,
        "max_length": info.task.max_length,
        "precision": arithmetic,
    }
    path = Path(tag, CROSS_ENCODER)
    if record := find_ranking(job.folder / path, settings):
        return record
    snapshot, task = load_snapshot(folder), job.workspace.dataset().task

    def score(part: str) -> npt.NDArray[np.float32]:
        windows = task.windows(pairs_of(job.data, part), snapshot.tokenizer, info.task)
        arrays, _ = predict_logits(
            snapshot.model,
            task,
            windows,
            padding=pad_id(snapshot.tokenizer, snapshot.model.config),
            precision=arithmetic,
            desc=f"{CROSS_ENCODER} {tag} {part}",
        )
        none, answer = arrays["logits"].T
        found: npt.NDArray[np.float32] = answer - none
        return found

    return job.write(path, settings, {part: score(part) for part in job.ranked})
