"""BERT's own answers at a snapshot: the baseline curve, with logits kept for ensembling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.files import digests_in, sha256_of_files, write_json
from bertvision.pipelines.precision import Precision, autocast, device, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.tasks.batch import collate
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.records import BertScores, read_snapshot_info
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.snapshots import Snapshot, load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

Float32Array = npt.NDArray[np.float32]


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
    made = {split: _logits_on(workspace, tag, split, snapshot, task) for split in splits}
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


def _logits_on(
    workspace: Workspace, tag: str, split: str, snapshot: Snapshot, task: Task
) -> tuple[Logits, float]:
    """A snapshot's logits, read or made, and the wall time of the forward passes in seconds."""
    info, windows = snapshot.info, workspace.windows(split, snapshot.tokenizer)
    index = WindowIndex.of(workspace.items(split), windows)
    path = workspace.bert_dir(tag) / f"{split}.safetensors"
    seconds = _seconds(path, info.weights_sha256)
    if seconds is not None:
        return Logits.load(path, index, BERT_COMMAND), seconds
    arrays, seconds = predict_logits(
        snapshot.model,
        task,
        windows,
        padding=pad_id(snapshot.tokenizer, snapshot.model.config),
        precision=resolve_precision(workspace.config.finetune.precision),
        desc=f"BERT {tag} {split}",
    )
    logits, text = Logits(arrays, index), f"{seconds:.3f}"
    made_by = {"snapshot": info.tag, "weights_sha256": info.weights_sha256, "seconds": text}
    logits.save(path, made_by)
    return logits, float(text)


def _seconds(path: Path, weights_sha256: str) -> float | None:
    """What a file of logits says of their cost; None where it is absent or of other weights."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        return float(metadata["seconds"]) if metadata["weights_sha256"] == weights_sha256 else None
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def predict_logits(
    model: PreTrainedModel,
    task: Task,
    windows: Windows,
    *,
    padding: int,
    precision: Precision,
    desc: str | None,
    tokens_per_batch: int | None = None,
) -> tuple[dict[str, Float32Array], float]:
    """Run BERT over windows, sorted by length so that hardly any padding is computed.

    Args:
        model: with the output layer of ``task``; it is moved to this machine's accelerator.
        task: what it was fine-tuned for.
        windows: what to run it over.
        padding: vocabulary index of the padding token.
        precision: arithmetic of the forward pass.
        desc: name of the progress bar; None shows none.
        tokens_per_batch: tokens of a batch, padding included (one window at least); None chooses.

    Returns:
        The logits by name as `Task.logits` gives them, in the order of the windows: (tokens,) of
        spans, else (windows, …); and the wall time of the forward passes in seconds.
    """
    where = device()
    budget = tokens_per_batch or (65_536 if where.type == "cuda" else 8_192)
    model.to(where).eval()  # type: ignore[arg-type]
    first_token, token_types = windows.first_token, takes_token_types(model)
    spans = task.kind == "span"
    count = len(windows.input_ids) if spans else len(windows)
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
                output = model(**batch.to(where).inputs)
            target = rows
            if spans:
                real = batch.attention_mask.numpy().astype(bool)
                places = zip(first_token[rows], windows.n_tokens[rows], strict=True)
                target = np.concatenate([np.arange(first, first + n) for first, n in places])
            for name, tensor in task.logits(output).items():
                values = tensor.float().cpu().numpy()
                values = values[real] if spans else values
                held = logits.setdefault(name, np.empty((count, *values.shape[1:]), np.float32))
                held[target] = values
            done += len(rows)
            bar.update(len(rows))
    return logits, time.monotonic() - began
