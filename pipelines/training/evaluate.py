"""Evaluate trained heads on the activations of any snapshot, many in one pass."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from torch import nn

from bertvision.errors import ProvenanceError, WorkspaceError
from bertvision.featurestore.format.difference import first_difference
from bertvision.featurestore.format.schema import Provenance, SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.models.outputs import SpanOutput
from bertvision.pipelines.files import new_folder, sha256_of_files, write_json
from bertvision.pipelines.precision import Precision, autocast, device, head_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.records import read_record
from bertvision.pipelines.tasks.scores import Predicted
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.datamodule import decoded
from bertvision.pipelines.training.trained_head import (
    head_lock,
    kind_of_run,
    load_head,
    task_of_kind,
)
from bertvision.pipelines.workspace.records import HeadScores, RunConfig, read_run_config
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.selection import head_split
from bertvision.pipelines.workspace.workspace import Workspace

_SAME = ("model", "tokenizer_sha256", "task", "max_length")


def evaluate(
    workspace: Workspace,
    names: Sequence[str | Run],
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
        names: trained heads, each perhaps with the part of the examples and the seed (`Run`).
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
    pairs = [(SnapshotTag(trained_on), name) for name in names]
    return evaluate_across(workspace, pairs, tag=tag, split=split, precision=precision)


def evaluate_across(
    workspace: Workspace,
    trained: Sequence[tuple[str, str | Run]],
    *,
    tag: str,
    split: str = "dev",
    precision: str = "auto",
) -> list[dict[str, Any]]:
    """As `evaluate`, for heads that were trained on several snapshots; one pass for all of a kind.

    Args:
        workspace: with the heads and the activations.
        trained: for each head the snapshot that it was trained on, and its name.
        tag: snapshot whose activations they are evaluated on.
        split: what is scored.
        precision: arithmetic of the heads: auto, 32 or bf16.
    """
    tag = SnapshotTag(tag)
    heads = [
        _Trained.load(workspace, on, name if isinstance(name, Run) else Run.parse(name))
        for on, name in trained
    ]
    groups: dict[tuple[str, tuple[int, ...]], list[_Trained]] = {}
    for head in heads:
        groups.setdefault((head.kind, head.config.layers), []).append(head)
    for (kind, _), group in groups.items():  # all of them, before the first pass
        scored = workspace.split(tag, head_split(kind, split)).require_complete()
        for head in group:
            _check_fits(head, scored)
    results: dict[Path, HeadScores] = {}
    for (kind, _), group in groups.items():
        results |= _evaluate(workspace, kind, group, tag, split, head_precision(precision, kind))
    return [results[head.folder].to_json() for head in heads]


def is_evaluated(
    workspace: Workspace,
    trained_on: str,
    name: str,
    *,
    tag: str,
    split: str = "dev",
    precision: str = "auto",
) -> bool:
    """Whether these weights were scored on these activations, in this way, before."""
    folder = workspace.trained_head(trained_on, name)
    try:
        scores = read_record(_target(folder, tag, split) / "metrics.json", HeadScores, "")
        kind = read_run_config(folder).kind
        return (
            scores.weights_sha256 == sha256_of_files([folder / "model.safetensors"])
            and scores.precision == head_precision(precision, kind)
            and scores.activations == _activations(_splits(workspace, kind, tag, split))
        )
    except (OSError, WorkspaceError):
        return False


def _splits(workspace: Workspace, kind: str, tag: str, split: str) -> dict[str, ActivationSplit]:
    """What is scored, and the held-out part where a threshold is tuned."""
    found = {split: workspace.split(tag, head_split(kind, split)).require_complete()}
    if (
        task_of_kind(kind, workspace.config.task.name).tunes
        and split != "tune"
        and "tune" in workspace.stored()[SnapshotTag(tag)]
    ):
        found["tune"] = workspace.split(tag, "tune").require_complete()
    return found


def _activations(splits: Mapping[str, ActivationSplit]) -> dict[str, Provenance]:
    """What tells activations from others: how they are stored, and what they come from."""
    return {
        name: {
            "encoding": split.record.encoding,
            "plan_sha256": split.record.plan_sha256,
            **split.record.provenance,
        }
        for name, split in splits.items()
    }


class _Trained(NamedTuple):
    """A trained head and where it came from."""

    trained_on: str
    name: str
    folder: Path
    module: nn.Module
    config: RunConfig
    kind: str

    @classmethod
    def load(cls, workspace: Workspace, trained_on: str, run: Run) -> _Trained:
        folder = workspace.trained_head(trained_on, run.name)
        module, config = load_head(folder, run)
        kind = kind_of_run(Run(config.head), workspace.config.task.name)
        return cls(str(trained_on), folder.name, folder, module, config, kind)


def _target(folder: Path, tag: str, split: str) -> Path:
    """Where a head's results on a split of a snapshot are."""
    return folder / "eval" / (tag if split == "dev" else f"{tag}-{split}")


def _evaluate(
    workspace: Workspace,
    kind: str,
    heads: list[_Trained],
    tag: SnapshotTag,
    split: str,
    precision: Precision,
) -> dict[Path, HeadScores]:
    """One pass over a split for heads of one kind and the same layers; scores by folder."""
    started = time.perf_counter()
    splits = _splits(workspace, kind, tag, split)
    scored = splits[split]
    task = task_of_kind(kind, workspace.config.task.name)
    found = _predict(heads, task, scored, precision, f"evaluate on {scored.name}")
    tune: Sequence[Predicted | None] = [None] * len(heads)
    if (held_out := splits.get("tune")) is not None and held_out is not scored:
        tune = _predict(heads, task, held_out, precision, f"threshold on {held_out.name}")
    results = {}
    for head, predicted, held_out_too in zip(heads, found, tune, strict=True):
        if not all(np.isfinite(x).all() for x in predicted.logits.values()):
            raise WorkspaceError(
                f"the logits of {head.name} hold NaN or infinity: it has diverged; train it again "
                "with a lower --lr and --overwrite"
            )
        scores = task.score(predicted, held_out_too)
        results[head.folder] = HeadScores(
            head=head.name,
            trained_on=head.trained_on,
            checkpoint=str(tag),
            split=split,
            rules=scores.rules,
            precision=precision,
            threshold_tuned_on=None if held_out_too is None else "tune",
            seconds=time.perf_counter() - started,
            weights_sha256=sha256_of_files([head.folder / "model.safetensors"]),
            provenance=scored.record.provenance,
            activations=_activations(splits),
        )
        with (
            head_lock(head.folder, f"writing to {head.name}", wait=True),
            new_folder(_target(head.folder, tag, split)) as target,
        ):
            write_json(target / "predictions.json", scores.predictions)
            write_json(target / "na_scores.json", scores.na_scores)
            save_file(_arrays(predicted), target / f"{split}.safetensors")
            if held_out_too is not None:
                save_file(_arrays(held_out_too), target / "tune.safetensors")
            write_json(target / "metrics.json", results[head.folder].to_json())
    return results


@torch.inference_mode()
def _predict(
    heads: Sequence[_Trained],
    task: Task,
    split: ActivationSplit,
    precision: Precision,
    desc: str,
) -> list[Predicted]:
    """Logits of every head on every window of a split, in stored order."""
    where = device()
    loader = ActivationLoader(split, batch_size=32, shuffle=False, layers=heads[0].config.layers)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    modules = [head.module.to(where) for head in heads]
    found: list[list[torch.Tensor]] = [[] for _ in heads]
    with progress(len(split), desc, "example") as bar:
        for packed in loader:
            batch = decoded(packed.to(where), dtype)
            seq = torch.arange(int(batch.lengths.max()), device=where)
            real = seq < batch.lengths.unsqueeze(1)
            for parts, module in zip(found, modules, strict=True):
                with autocast(precision, where):
                    output = module(batch.hidden_states, batch.lengths)
                if isinstance(output, SpanOutput):
                    both = torch.stack([output.start_logits[real], output.end_logits[real]], 1)
                else:
                    both = output.logits
                parts.append(both.float().cpu())
            bar.update(len(packed))
    items, plan = task.items_of(split.table()), split.plan
    # of sentences a window is an item, whose row in the data the plan knows
    index = split.labels.get("question_index", plan.example_id).astype(np.int32)
    values = [torch.cat(parts).numpy() for parts in found]
    if heads[0].kind == "classification":
        return [Predicted({"logits": x}, plan.n_tokens, None, index, items) for x in values]
    n = plan.n_tokens.astype(np.int64)
    within = np.arange(plan.total_tokens) - np.repeat(np.cumsum(n) - n, n)
    offsets = split.array("offset_mapping")[np.repeat(plan.first_token, n) + within]
    return [
        Predicted(
            {
                "start_logits": np.ascontiguousarray(both[:, 0]),
                "end_logits": np.ascontiguousarray(both[:, 1]),
            },
            plan.n_tokens,
            offsets,
            index,
            items,
        )
        for both in values
    ]


def _arrays(predicted: Predicted) -> dict[str, npt.NDArray[Any]]:
    """What is kept of logits: all but what the split says anyway."""
    beside = {"question_index": predicted.item_index}
    if predicted.offset_mapping is not None:
        beside["n_tokens"] = predicted.n_tokens
    return {**predicted.logits, **beside}


def _check_fits(head: _Trained, split: ActivationSplit) -> None:
    name, record, config = head.name, split.record, head.config
    missing = sorted(set(config.layers) - set(record.layers))
    if missing or config.hidden_size != record.hidden_size:
        raise ProvenanceError(
            f"{name} was trained on layers {list(config.layers)} of width {config.hidden_size}; "
            f"{split.name} holds layers {list(record.layers)} of width {record.hidden_size}"
        )
    if difference := first_difference(config.activations, record.provenance, _SAME):
        field, there, here = difference
        raise ProvenanceError(
            f"{name} was trained with {field} = {there!r}, {split.name} was extracted with "
            f"{here!r}: a head works on activations of the model and task it was trained for"
        )
