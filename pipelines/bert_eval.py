"""BERT's own answers at a snapshot: the baseline curve, with logits kept for ensembling."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import BertForQuestionAnswering

from bertvision.errors import WorkspaceError
from bertvision.featurestore.durable import write_durably
from bertvision.featurestore.schema import SnapshotTag
from bertvision.pipelines.batching import collate
from bertvision.pipelines.files import write_json
from bertvision.pipelines.precision import Precision, autocast, device, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.scoring import SplitLogits, score
from bertvision.pipelines.selection import windows_of
from bertvision.pipelines.snapshots import Snapshot, load_snapshot, read_snapshot_info
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace import Workspace

Float32Array = npt.NDArray[np.float32]


class SpanLogits(NamedTuple):
    """Start and end logits of all windows of a split, ragged like `Windows`."""

    start_logits: Float32Array
    """(tokens,)"""
    end_logits: Float32Array
    """(tokens,)"""
    n_tokens: npt.NDArray[np.int32]
    """(windows,)"""
    question_index: npt.NDArray[np.int32]
    """(windows,) row in the split's questions."""
    seconds: float
    """Wall time of the forward passes."""


def evaluate_bert(
    workspace: Workspace, tag: str, splits: Sequence[str] = ("tune", "dev")
) -> dict[str, Any] | None:
    """Run a snapshot over splits, keep its logits, and score it on dev.

    Splits that were run before are not run again. The no-answer threshold is tuned on ``tune``,
    which no training saw, never on dev.

    Args:
        workspace: where the snapshot is.
        tag: which snapshot.
        splits: where to run it; those the workspace does not have are left out.

    Returns:
        The contents of ``bert/<tag>/metrics.json``: for each rule (``n-best`` with the tuned
        threshold, ``n-best, threshold 0``, ``argmax``) the threshold and the metrics on dev, and
        the seconds spent. None where ``dev`` is not among ``splits``.

    Raises:
        StoreNotFoundError: there is no such snapshot.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    folder = workspace.bert_dir(tag)
    info = read_snapshot_info(workspace.snapshot_dir(tag))
    splits = [split for split in splits if split in workspace.splits()]
    metrics_path = folder / "metrics.json"
    if metrics_path.is_file():
        metrics: dict[str, Any] = json.loads(metrics_path.read_text(encoding="utf-8"))
        logits_there = all((folder / f"{split}.safetensors").is_file() for split in splits)
        if logits_there and metrics["weights_sha256"] == info.weights_sha256:
            return metrics
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = load_snapshot(workspace.snapshot_dir(tag))
    for split in splits:
        path = folder / f"{split}.safetensors"
        if not _is_of(path, info.weights_sha256):
            windows = workspace.windows(split, snapshot.tokenizer)
            logits = _run(workspace, snapshot, windows, f"BERT {tag} {split}")
            _save(path, logits, snapshot)
    if "dev" not in splits:
        return None
    return _score(workspace, snapshot, SnapshotTag(tag))


def predict_logits(
    model: BertForQuestionAnswering,
    windows: Windows,
    *,
    pad_id: int,
    precision: Precision,
    desc: str,
    tokens_per_batch: int | None = None,
) -> SpanLogits:
    """Run BERT over windows, sorted by length so that hardly any padding is computed.

    Args:
        model: BERT with its span outputs; it is moved to this machine's accelerator.
        windows: what to run it over.
        pad_id: vocabulary index of the padding token.
        precision: arithmetic of the forward pass.
        desc: name of the progress bar.
        tokens_per_batch: tokens of a batch, padding included (one window at least); None chooses.
    """
    where = device()
    budget = tokens_per_batch or (65_536 if where.type == "cuda" else 8_192)
    model.to(where).eval()  # type: ignore[arg-type]
    first_token = windows.first_token
    start = np.empty(len(windows.input_ids), np.float32)
    end = np.empty_like(start)
    order = np.argsort(-windows.n_tokens, kind="stable").astype(np.int64)
    began = time.monotonic()
    done = 0
    with torch.inference_mode(), progress(len(order), desc, "window") as bar:
        while done < len(order):
            size = max(1, budget // int(windows.n_tokens[order[done]]))
            rows = order[done : done + size]
            batch = collate(windows, first_token, rows, pad_id)
            with autocast(precision, where):
                output = model(
                    input_ids=batch.input_ids.to(where),
                    token_type_ids=batch.token_type_ids.to(where),
                    attention_mask=batch.attention_mask.to(where),
                )
            real = batch.attention_mask.numpy().astype(bool)
            tokens = np.concatenate(
                [np.arange(first_token[r], first_token[r] + windows.n_tokens[r]) for r in rows]
            )
            start[tokens] = output.start_logits.float().cpu().numpy()[real]
            end[tokens] = output.end_logits.float().cpu().numpy()[real]
            done += len(rows)
            bar.update(len(rows))
    seconds = time.monotonic() - began
    return SpanLogits(start, end, windows.n_tokens, windows.question_index, seconds)


def read_logits(path: Path) -> SpanLogits:
    """Read the logits of one split, ``bert/<tag>/<split>.safetensors``.

    Raises:
        WorkspaceError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            seconds = float(file.metadata()["seconds"])
            return SpanLogits(
                file.get_tensor("start_logits"),
                file.get_tensor("end_logits"),
                file.get_tensor("n_tokens"),
                file.get_tensor("question_index"),
                seconds,
            )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise WorkspaceError(
            f"the logits {path} cannot be read ({error}): delete the file and run "
            "`bertvision finetune --resume`"
        ) from error


def _run(workspace: Workspace, snapshot: Snapshot, windows: Windows, desc: str) -> SpanLogits:
    return predict_logits(
        snapshot.model,
        windows,
        pad_id=snapshot.tokenizer.pad_token_id or 0,
        precision=resolve_precision(workspace.config.finetune.precision),
        desc=desc,
    )


def _save(path: Path, logits: SpanLogits, snapshot: Snapshot) -> None:
    metadata = {
        "snapshot": snapshot.info.tag,
        "weights_sha256": snapshot.info.weights_sha256,
        "seconds": f"{logits.seconds:.3f}",
    }
    arrays = {k: v for k, v in logits._asdict().items() if k != "seconds"}
    write_durably(path, lambda target: save_file(arrays, target, metadata))


def _is_of(path: Path, weights_sha256: str) -> bool:
    try:
        with safe_open(path, framework="numpy") as file:
            return bool((file.metadata() or {}).get("weights_sha256") == weights_sha256)
    except (OSError, SafetensorError):
        return False


def _score(workspace: Workspace, snapshot: Snapshot, tag: SnapshotTag) -> dict[str, Any]:
    """Tune on ``tune``, score on ``dev``, write predictions and metrics."""
    folder = workspace.bert_dir(tag)
    seconds: dict[str, float] = {}

    def logits_of(split: str) -> SplitLogits:
        questions = workspace.questions(split)
        windows = windows_of(questions, snapshot.tokenizer, workspace.config.task)
        logits = read_logits(folder / f"{split}.safetensors")
        seconds[split] = logits.seconds
        return SplitLogits(
            logits.start_logits,
            logits.end_logits,
            logits.n_tokens,
            windows.offset_mapping,
            logits.question_index,
            questions,
        )

    abstains = workspace.config.task.name == "squad_v2"
    tune = logits_of("tune") if abstains and "tune" in workspace.splits() else None
    scores = score(logits_of("dev"), tune, abstains=abstains)
    write_json(folder / "predictions.json", scores.predictions)
    metrics = {
        "snapshot": str(tag),
        "weights_sha256": snapshot.info.weights_sha256,
        "split": "dev",
        "rules": scores.rules,
        "seconds": seconds,
    }
    write_json(folder / "metrics.json", metrics)
    return metrics
