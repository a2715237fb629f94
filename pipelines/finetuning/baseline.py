"""BERT's own answers at a snapshot: the baseline curve, with logits kept for ensembling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.schema import SnapshotTag
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.files import write_json
from bertvision.pipelines.precision import Precision, autocast, device, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.records import read_record
from bertvision.pipelines.tasks.batch import collate
from bertvision.pipelines.tasks.scores import Predicted
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.records import BertScores
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.snapshots import Snapshot, load_snapshot, read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace

Float32Array = npt.NDArray[np.float32]


class BertLogits(NamedTuple):
    """BERT's logits on all windows of a split, in the order of the data."""

    logits: dict[str, Float32Array]
    """By name as `Task.logits` gives them: ``start_logits`` and ``end_logits`` (tokens,), ragged
    like `Windows`; or ``logits`` (windows, 2) of classes."""
    n_tokens: npt.NDArray[np.int32]
    """(windows,)"""
    item_index: npt.NDArray[np.int32]
    """(windows,) row in the split's items."""
    seconds: float
    """Wall time of the forward passes."""


def evaluate_bert(
    workspace: Workspace, tag: str, splits: Sequence[str] = ("tune", "dev")
) -> BertScores | None:
    """Run a snapshot over splits, keep its logits, and score it on dev.

    Splits that were run before are not run again. The no-answer threshold of spans is tuned on
    ``tune``, which no training saw, never on dev.

    Args:
        workspace: where the snapshot is.
        tag: which snapshot.
        splits: where to run it; those the workspace does not have are left out.

    Returns:
        The contents of ``bert/<tag>/metrics.json``: for each rule of the task (see `Scores`) the
        threshold and the metrics on dev, and the seconds spent. None where ``dev`` is not among
        ``splits``.

    Raises:
        StoreNotFoundError: there is no such snapshot.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    folder = workspace.bert_dir(tag)
    info = read_snapshot_info(workspace.snapshot_dir(tag))
    splits = [split for split in splits if split in workspace.splits()]
    metrics_path = folder / "metrics.json"
    if metrics_path.is_file():
        scores = read_record(metrics_path, BertScores, BERT_COMMAND)
        logits_there = all((folder / f"{split}.safetensors").is_file() for split in splits)
        if logits_there and scores.weights_sha256 == info.weights_sha256:
            return scores
    folder.mkdir(parents=True, exist_ok=True)
    snapshot, task = load_snapshot(workspace.snapshot_dir(tag)), load_task(info.task.name)
    for split in splits:
        path = folder / f"{split}.safetensors"
        if not _is_of(path, info.weights_sha256):
            windows = workspace.windows(split, snapshot.tokenizer)
            logits = predict_logits(
                snapshot.model,
                task,
                windows,
                padding=pad_id(snapshot.tokenizer, snapshot.model.config),
                precision=resolve_precision(workspace.config.finetune.precision),
                desc=f"BERT {tag} {split}",
            )
            _save(path, logits, snapshot)
    if "dev" not in splits:
        return None
    return _score(workspace, snapshot, task, SnapshotTag(tag))


def predict_logits(
    model: PreTrainedModel,
    task: Task,
    windows: Windows,
    *,
    padding: int,
    precision: Precision,
    desc: str,
    tokens_per_batch: int | None = None,
) -> BertLogits:
    """Run BERT over windows, sorted by length so that hardly any padding is computed.

    Args:
        model: with the output layer of ``task``; it is moved to this machine's accelerator.
        task: what it was fine-tuned for.
        windows: what to run it over.
        padding: vocabulary index of the padding token.
        precision: arithmetic of the forward pass.
        desc: name of the progress bar.
        tokens_per_batch: tokens of a batch, padding included (one window at least); None chooses.
    """
    where = device()
    budget = tokens_per_batch or (65_536 if where.type == "cuda" else 8_192)
    model.to(where).eval()  # type: ignore[arg-type]
    first_token, token_types = windows.first_token, takes_token_types(model)
    count = len(windows.input_ids) if task.per_token else len(windows)
    logits: dict[str, Float32Array] = {}
    order = np.argsort(-windows.n_tokens, kind="stable").astype(np.int64)
    began = time.monotonic()
    done = 0
    with torch.inference_mode(), progress(len(order), desc, "window") as bar:
        while done < len(order):
            size = max(1, budget // int(windows.n_tokens[order[done]]))
            rows = order[done : done + size]
            batch = collate(windows, first_token, rows, padding, token_types=token_types)
            with autocast(precision, where):
                output = model(**{name: ids.to(where) for name, ids in batch.inputs.items()})
            target = rows
            if task.per_token:
                real = batch.attention_mask.numpy().astype(bool)
                spans = zip(first_token[rows], windows.n_tokens[rows], strict=True)
                target = np.concatenate([np.arange(first, first + n) for first, n in spans])
            for name, tensor in task.logits(output).items():
                values = tensor.float().cpu().numpy()
                values = values[real] if task.per_token else values
                held = logits.setdefault(name, np.empty((count, *values.shape[1:]), np.float32))
                held[target] = values
            done += len(rows)
            bar.update(len(rows))
    seconds = time.monotonic() - began
    return BertLogits(logits, windows.n_tokens, windows.item_index, seconds)


def read_logits(path: Path) -> BertLogits:
    """Read the logits of one split, ``bert/<tag>/<split>.safetensors``.

    Raises:
        WorkspaceError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            seconds = float(file.metadata()["seconds"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return BertLogits(
                n_tokens=arrays.pop("n_tokens"),
                item_index=arrays.pop("question_index"),
                logits=arrays,
                seconds=seconds,
            )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise WorkspaceError(
            f"the logits {path} cannot be read ({error}): delete the file and run "
            "`bertvision finetune --resume`"
        ) from error


def _save(path: Path, predicted: BertLogits, snapshot: Snapshot) -> None:
    metadata = {
        "snapshot": snapshot.info.tag,
        "weights_sha256": snapshot.info.weights_sha256,
        "seconds": f"{predicted.seconds:.3f}",
    }
    beside = {"n_tokens": predicted.n_tokens, "question_index": predicted.item_index}
    arrays = {**predicted.logits, **beside}
    write_durably(path, lambda target: save_file(arrays, target, metadata))


def _is_of(path: Path, weights_sha256: str) -> bool:
    try:
        with safe_open(path, framework="numpy") as file:
            return bool((file.metadata() or {}).get("weights_sha256") == weights_sha256)
    except (OSError, SafetensorError):
        return False


def _score(workspace: Workspace, snapshot: Snapshot, task: Task, tag: SnapshotTag) -> BertScores:
    """Tune on ``tune``, score on ``dev``, write predictions and metrics."""
    folder = workspace.bert_dir(tag)
    seconds: dict[str, float] = {}

    def predicted(split: str) -> Predicted:
        items = workspace.items(split)
        windows = task.windows(items, snapshot.tokenizer, workspace.config.task)
        held = read_logits(folder / f"{split}.safetensors")
        seconds[split] = held.seconds
        return Predicted(
            held.logits, windows.n_tokens, windows.offset_mapping, windows.item_index, items
        )

    tune = predicted("tune") if task.tunes and "tune" in workspace.splits() else None
    scores = task.score(predicted("dev"), tune)
    write_json(folder / "predictions.json", scores.predictions)
    found = BertScores(
        snapshot=tag,
        weights_sha256=snapshot.info.weights_sha256,
        split="dev",
        rules=scores.rules,
        seconds=seconds,
    )
    write_json(folder / "metrics.json", found.to_json())
    return found
