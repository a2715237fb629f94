"""Evaluate trained heads on the activations of any snapshot, many in one pass.

What trained heads say on stored examples: one pass over a split for many heads.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bertvision.errors import BertvisionWarning, UnknownNameError, WorkspaceError
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import Provenance
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.models import Kind
from bertvision.pipelines.files import (
    digests_in,
    keep_others,
    new_folder,
    sha256_of_files,
    write_json,
)
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import Precision, autocast, device, head_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.datamodule import decoded
from bertvision.pipelines.training.trained_head import (
    LoadedHead,
    head_lock,
    kind_of_run,
    load_head,
    task_of_kind,
)
from bertvision.pipelines.workspace.dataset import class_order, other_task
from bertvision.pipelines.workspace.heads import find_head, head_activations
from bertvision.pipelines.workspace.records import HeadScores, read_run_config
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

_BATCH = 32  # windows


def predict(
    heads: Sequence[LoadedHead],
    task: Task,
    split: ActivationSplit,
    precision: Precision,
    desc: str,
    order: Sequence[int] | None = None,
) -> list[Logits]:
    """Logits of every head on every window of a split, in stored order.

    Args:
        heads: Heads of one kind and the same layers; they are moved to this machine's accelerator.
        task: Task that they learned.
        split: whole.
        precision: arithmetic of the heads.
        desc: name of the progress bar.
        order: Index of each class of the split among those of the heads; None where they are the
            same.
    """
    modules, layers = [head.module for head in heads], heads[0].config.layers
    windows = _windows_of(split, task, order)
    arrays = run_over(modules, task, split, precision, desc, layers=layers)
    return [Logits(of_head, windows) for of_head in arrays]


@torch.inference_mode()
def run_over(
    modules: Sequence[nn.Module],
    task: Task,
    split: ActivationSplit,
    precision: Precision,
    desc: str,
    *,
    layers: Sequence[int],
    examples: npt.NDArray[np.int64] | None = None,
) -> list[dict[str, npt.NDArray[np.float32]]]:
    """Outputs of heads for the windows of a split, in stored order.

    Args:
        modules: called with packed hidden states (tokens, layers, hidden) and lengths (batch,);
            they are moved to this machine's accelerator.
        task: Task whose outputs they give.
        split: whole.
        precision: Precision of the arithmetic.
        desc: name of the progress bar.
        layers: hidden states that are read.
        examples: (n,) positions of the windows that are read, in this order; None is all.

    Returns:
        For each module the logits by name: (tokens,) of spans, else (windows, …).
    """
    where = device()
    batches: Iterable[ActivationBatch]
    if examples is None:
        batches = ActivationLoader(split, batch_size=_BATCH, shuffle=False, layers=layers)
    else:
        cuts = range(_BATCH, len(examples), _BATCH)
        batches = (split.read(part, layers) for part in np.split(examples, cuts))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    modules = [module.to(where) for module in modules]
    outputs: list[dict[str, list[torch.Tensor]]] = [{} for _ in modules]
    windows = len(split) if examples is None else len(examples)
    with progress(windows, desc, "example") as bar:
        for packed in batches:
            batch = decoded(packed.to(where), dtype)
            seq = torch.arange(int(batch.lengths.max()), device=where)
            real = seq < batch.lengths.unsqueeze(1)
            for parts, module in zip(outputs, modules, strict=True):
                with autocast(precision, where):
                    output = module(batch.hidden_states, batch.lengths)
                for name, values in task.logits(output).items():
                    real_values = values[real] if task.of_tokens else values
                    parts.setdefault(name, []).append(real_values.float().cpu())
            bar.update(len(packed))
    return [
        {name: torch.cat(values).numpy() for name, values in parts.items()} for parts in outputs
    ]


def _windows_of(split: ActivationSplit, task: Task, order: Sequence[int] | None) -> WindowIndex:
    """The windows of a split as it is stored, labels as the heads count them."""
    plan, items = split.plan, task.items_of(split.table())
    if order is not None and task.kind == "classification":
        labels = (None if item.label is None else order[item.label] for item in items)
        items = [x._replace(label=label) for x, label in zip(items, labels, strict=True)]
    offset_mapping = None
    if task.of_tokens:
        n = plan.n_tokens.astype(np.int64)
        within = np.arange(plan.total_tokens) - np.repeat(np.cumsum(n) - n, n)
        offset_mapping = split.array("offset_mapping")[np.repeat(plan.first_token, n) + within]
    return WindowIndex(
        items,
        plan.n_tokens,
        # of sentences a window is an item, whose row in the data the plan knows
        split.labels.get("question_index", plan.example_id).astype(np.int32),
        offset_mapping,
    )


def evaluate(
    workspace: Workspace,
    names: Sequence[str | Run],
    *,
    trained_on: str,
    tag: str,
    split: str = "dev",
    precision: str = "auto",
) -> list[HeadScores]:
    """Score heads on a split of a snapshot's activations, in one pass for all heads.

    The no-answer threshold is tuned on the ``tune`` split of the same snapshot, where it was
    extracted; else it is 0, with a warning.

    Args:
        workspace: Workspace with the heads and the activations.
        names: trained heads, each perhaps with the part of the examples and the seed (`Run`).
        trained_on: snapshot whose activations they were trained on.
        tag: snapshot whose activations they are evaluated on; it may be another one.
        split: Split that is scored: the workspace's own, or ``NAME-SPLIT`` of an added data set
            of its kind of task.
        precision: arithmetic of the heads: auto, 32 or bf16.

    Returns:
        The scores of each head, as in ``heads/<trained_on>/<name>/eval/<tag>/metrics.json``; beside
        it are ``predictions.json`` (official format), ``na_scores.json`` and the logits.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        ProvenanceError: the activations are of another model or task than the head's.
        IncompleteSplitError: the extraction of the split has not ended.
        InputError: the split's classes are not the workspace's.
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
) -> list[HeadScores]:
    """As `evaluate`, for heads that were trained on several snapshots; one pass for all of a kind.

    Args:
        workspace: Workspace with the heads and the activations.
        trained: Snapshot that each head was trained on, and its name.
        tag: snapshot whose activations they are evaluated on.
        split: Split that is scored.
        precision: arithmetic of the heads: auto, 32 or bf16.
    """
    tag = SnapshotTag(tag)
    folders: list[Path] = []
    groups: dict[tuple[_Reads, tuple[int, ...]], dict[Path, LoadedHead]] = {}
    for trained_on, name in trained:
        run = name if isinstance(name, Run) else Run.parse(name)
        folders.append(folder := find_head(workspace, trained_on, run.name))
        head = load_head(folder, run)
        kind = kind_of_run(Run(head.config.head), workspace.config.task.name)
        reads = _Reads(kind, head.config.tokens)
        groups.setdefault((reads, head.config.layers), {})[folder] = head
    other = other_task(workspace.root, own := workspace.config.task, split)
    any_task, order = other is not None, class_order(own, other, split)
    for (reads, _), group in groups.items():  # all of them, before the first pass
        scored = head_activations(workspace, tag, reads.tokens, split)
        for folder, head in group.items():
            head.check_fits(scored, folder.name, any_task=any_task)
    _warn_of_no_threshold(workspace, {reads for reads, _ in groups}, tag, split)
    results: dict[Path, HeadScores] = {}
    for (reads, _), group in groups.items():
        arithmetic = head_precision(precision, reads.kind)
        results |= _evaluate(workspace, reads, group, tag, split, arithmetic, order)
    return [results[folder] for folder in folders]


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
    try:
        folder = find_head(workspace, trained_on, name)
        scores = read_record(_target(folder, tag, split) / "metrics.json", HeadScores, "")
        config = read_run_config(folder)
        reads = _Reads(config.kind, config.tokens)
        return (
            scores.weights_sha256 == sha256_of_files([folder / "model.safetensors"])
            and scores.precision == head_precision(precision, reads.kind)
            and scores.activations == _activations(_splits(workspace, reads, tag, split))
        )
    except (OSError, WorkspaceError, UnknownNameError):  # one that is not trained is not scored
        return False


class _Reads(NamedTuple):
    """Kind of heads, and the tokens that they read."""

    kind: Kind
    tokens: TokenPooling


def _warn_of_no_threshold(
    workspace: Workspace, every: Collection[_Reads], tag: SnapshotTag, split: str
) -> None:
    """Say that a threshold stays at 0, while that of BERT is tuned, where anything is held out."""
    if "tune" not in workspace.splits():
        return
    for reads in every:
        if "tune" in _splits(workspace, reads, tag, split):
            continue
        if task_of_kind(reads.kind, workspace.config.task.name).tunes:
            warnings.warn(
                f"the no-answer threshold of these heads stays at 0, so that they cannot be "
                f"compared with BERT, whose threshold is tuned: {tag} has no stored split tune "
                f"(`bertvision extract --checkpoint {tag} --split tune`, then evaluate again)",
                BertvisionWarning,
                stacklevel=4,
            )


def _splits(
    workspace: Workspace, reads: _Reads, tag: str, split: str
) -> dict[str, ActivationSplit]:
    """The scored split, and the held-out part where a threshold is tuned."""
    activations = {split: head_activations(workspace, tag, reads.tokens, split)}
    if (
        task_of_kind(reads.kind, workspace.config.task.name).tunes
        and split != "tune"
        and "tune" in workspace.stored()[SnapshotTag(tag)]
    ):
        activations["tune"] = workspace.split(tag, "tune").require_complete()
    return activations


def _activations(splits: Mapping[str, ActivationSplit]) -> dict[str, Provenance]:
    """Identity of activations: how they are stored, and what they come from."""
    return {
        name: {
            "encoding": split.record.encoding,
            "plan_sha256": split.record.plan_sha256,
            **split.record.provenance,
        }
        for name, split in splits.items()
    }


def _target(folder: Path, tag: str, split: str) -> Path:
    """Where a head's results on a split of a snapshot are."""
    return folder / "eval" / (tag if split == "dev" else f"{tag}-{split}")


def _evaluate(
    workspace: Workspace,
    reads: _Reads,
    heads: Mapping[Path, LoadedHead],
    tag: SnapshotTag,
    split: str,
    precision: Precision,
    order: Sequence[int] | None,
) -> dict[Path, HeadScores]:
    """One pass over a split for heads that read the same of it; scores by folder."""
    started = time.perf_counter()
    splits = _splits(workspace, reads, tag, split)
    scored = splits[split]
    task = task_of_kind(reads.kind, workspace.config.task.name)
    loaded = list(heads.values())
    predicted = predict(loaded, task, scored, precision, f"evaluate on {scored.name}", order)
    tune: Sequence[Logits | None] = [None] * len(heads)
    if (held_out := splits.get("tune", scored)) is not scored:
        tune = predict(loaded, task, held_out, precision, f"threshold on {held_out.name}")
    results = {}
    for folder, logits, held_out_too in zip(heads, predicted, tune, strict=True):
        name = folder.name
        if not all(np.isfinite(x).all() for x in logits.arrays.values()):
            raise WorkspaceError(
                f"the logits of {name} hold NaN or infinity: it has diverged; train it again "
                "with a lower --lr and --overwrite"
            )
        scores = task.score(logits, held_out_too)
        if held_out_too is not None and not scores.tuned:
            warnings.warn(
                f"the no-answer threshold stays at 0: {held_out.name} has no unanswerable question "
                "to tune it on",
                BertvisionWarning,
                stacklevel=4,
            )
        results[folder] = HeadScores(
            head=name,
            trained_on=folder.parent.name,
            checkpoint=str(tag),
            split=split,
            rules=scores.rules,
            precision=precision,
            threshold_tuned_on="tune" if held_out_too is not None and scores.tuned else None,
            seconds=time.perf_counter() - started,
            weights_sha256=sha256_of_files([folder / "model.safetensors"]),
            provenance=scored.record.provenance,
            activations=_activations(splits),
        )
        with (
            head_lock(folder, f"writing to {name}", wait=True),
            new_folder(_target(folder, tag, split)) as target,
        ):
            write_json(target / "predictions.json", scores.predictions)
            write_json(target / "na_scores.json", scores.na_scores)
            logits.save(target / f"{split}.safetensors")
            if held_out_too is not None:
                held_out_too.save(target / "tune.safetensors")
            digests = digests_in(target, sorted(file.name for file in target.iterdir()))
            results[folder] = results[folder].model_copy(update={"sha256": digests})
            write_record(target / "metrics.json", results[folder])
            keep_others(_target(folder, tag, split), target, "metrics.json")
    return results
