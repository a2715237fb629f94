"""Evaluate trained heads on the activations of any snapshot, several in one pass."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import nn

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.featurestore.schema import SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.models.registry import build_head
from bertvision.pipelines.datamodule import decoded
from bertvision.pipelines.files import new_folder, write_json
from bertvision.pipelines.precision import Precision, autocast, device, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.questions import questions_of
from bertvision.pipelines.scoring import SplitLogits, score
from bertvision.pipelines.workspace import Workspace

_SAME = ("model", "tokenizer_sha256", "task", "max_length")


class LoadedHead(NamedTuple):
    """A trained head: the module in evaluation mode, and its ``config.json``."""

    module: nn.Module
    config: dict[str, Any]


def load_head(folder: Path) -> LoadedHead:
    """Load a trained head from its folder.

    Raises:
        WorkspaceError: it is damaged.
        UnknownNameError: its class is not installed here.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        module = build_head(
            config["head"], layers=len(config["layers"]), hidden=config["hidden_size"]
        )
        module.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise WorkspaceError(f"the head {folder} is damaged: {error}; train it again") from error
    return LoadedHead(module.eval(), config)


def evaluate(
    workspace: Workspace,
    names: Sequence[str],
    *,
    trained_on: str,
    tag: str,
    split: str = "dev",
    precision: str = "auto",
) -> list[dict[str, Any]]:
    """Score heads on a split of a snapshot's activations, in one pass for all heads.

    The no-answer threshold is tuned on the ``tune`` split of the same snapshot, where it was
    extracted; else it is 0.

    Args:
        workspace: with the heads and the activations.
        names: trained heads.
        trained_on: snapshot whose activations they were trained on.
        tag: snapshot whose activations they are evaluated on; it may be another one.
        split: what is scored.
        precision: arithmetic of the heads: auto, 32 or bf16.

    Returns:
        For each head the contents of ``heads/<trained_on>/<name>/eval/<tag>/metrics.json``; beside
        it are ``predictions.json`` (official format), ``na_scores.json`` and the logits.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        ProvenanceError: the activations are of another model or task than the head's.
        IncompleteSplitError: the extraction of the split has not ended.
    """
    trained_on, tag = SnapshotTag(trained_on), SnapshotTag(tag)
    folders = [workspace.trained_head(trained_on, name) for name in names]
    heads = [load_head(folder) for folder in folders]
    scored = workspace.split(tag, split).require_complete()
    for name, head in zip(names, heads, strict=True):
        _check_fits(name, head, scored)
        if head.config["layers"] != heads[0].config["layers"]:
            raise InputError(
                f"{name} and {names[0]} were trained on different layers: evaluate them one by one"
            )
    started = time.perf_counter()
    arithmetic = resolve_precision(precision)
    abstains = workspace.config.task.name == "squad_v2"
    dev = _run(heads, scored, arithmetic, f"evaluate on {scored.name}")
    tune: list[SplitLogits] | list[None] = [None] * len(heads)
    if abstains and "tune" in workspace.stored()[tag]:
        held_out = workspace.split(tag, "tune").require_complete()
        tune = _run(heads, held_out, arithmetic, f"threshold on {held_out.name}")
    results = []
    for name, folder, dev_logits, tune_logits in zip(names, folders, dev, tune, strict=True):
        scores = score(dev_logits, tune_logits, abstains=abstains)
        metrics = {
            "head": name,
            "trained_on": str(trained_on),
            "checkpoint": str(tag),
            "split": split,
            "rules": scores.rules,
            "threshold_tuned_on": None if tune_logits is None else "tune",
            "seconds": time.perf_counter() - started,
            "provenance": dict(scored.record.provenance),
        }
        with new_folder(folder / "eval" / (tag if split == "dev" else f"{tag}-{split}")) as target:
            write_json(target / "predictions.json", scores.predictions)
            write_json(target / "na_scores.json", scores.na_scores)
            _save_logits(target / f"{split}.safetensors", dev_logits)
            if tune_logits is not None:
                _save_logits(target / "tune.safetensors", tune_logits)
            write_json(target / "metrics.json", metrics)
        results.append(metrics)
    return results


@torch.inference_mode()
def _run(
    heads: Sequence[LoadedHead], split: ActivationSplit, precision: Precision, desc: str
) -> list[SplitLogits]:
    """Logits of every head on every window of a split, in stored order."""
    where = device()
    layers = heads[0].config["layers"]
    loader = ActivationLoader(split, batch_size=32, shuffle=False, layers=layers)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    modules = [head.module.to(where) for head in heads]
    logits: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in heads]
    with progress(len(split), desc, "example") as bar:
        for packed in loader:
            batch = decoded(packed.to(where), dtype)
            seq = torch.arange(int(batch.lengths.max()), device=where)
            real = seq < batch.lengths.unsqueeze(1)
            for found, module in zip(logits, modules, strict=True):
                with autocast(precision, where):
                    output = module(batch.hidden_states, batch.lengths)
                start, end = output.start_logits[real], output.end_logits[real]
                found.append((start.float().cpu(), end.float().cpu()))
            bar.update(len(packed))
    plan, questions = split.plan, questions_of(split.table())
    n = plan.n_tokens.astype(np.int64)
    within = np.arange(plan.total_tokens) - np.repeat(np.cumsum(n) - n, n)
    offsets = split.array("offset_mapping")[np.repeat(plan.first_token, n) + within]
    return [
        SplitLogits(
            torch.cat([start for start, _ in found]).numpy(),
            torch.cat([end for _, end in found]).numpy(),
            plan.n_tokens,
            offsets,
            split.labels["question_index"],
            questions,
        )
        for found in logits
    ]


def _save_logits(path: Path, logits: SplitLogits) -> None:
    names = ("start_logits", "end_logits", "n_tokens", "question_index")
    save_file({name: getattr(logits, name) for name in names}, path)


def _check_fits(name: str, head: LoadedHead, split: ActivationSplit) -> None:
    record, config = split.record, head.config
    missing = sorted(set(config["layers"]) - set(record.layers))
    if missing or config["hidden_size"] != record.hidden_size:
        raise ProvenanceError(
            f"{name} was trained on layers {config['layers']} of width {config['hidden_size']}; "
            f"{split.name} holds layers {list(record.layers)} of width {record.hidden_size}"
        )
    for field in _SAME:
        there, here = config["activations"].get(field), record.provenance.get(field)
        if there != here:
            raise ProvenanceError(
                f"{name} was trained with {field} = {there!r}, {split.name} was extracted with "
                f"{here!r}: a head works on activations of the model and task it was trained for"
            )
