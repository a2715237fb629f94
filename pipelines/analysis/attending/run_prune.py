"""Run it on the splits of a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.pruning import Sample
from bertvision.pipelines.analysis.attending.pruning import pruning as prune_model
from bertvision.pipelines.analysis.attending.pruning_result import PruningResult
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


def run_prune(
    workspace: Workspace,
    tag: str,
    *,
    split: str = "dev",
    items: int = 100,
    orders: int = 3,
    precision: str = "auto",
    seed: int = 0,
    plot: Path | None = None,
) -> PruningResult:
    """Find which attention heads a fine-tuned snapshot needs; runs the encoder often.

    Args:
        workspace: with the snapshot.
        tag: the snapshot.
        split: of the workspace's own data.
        items: of a seeded sample: half of them order the heads, the other half is scored.
        orders: random orders beside that of importance.
        precision: arithmetic of the forward passes: auto, 32 or bf16.
        seed: of the sample and the orders.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, it is not known where the family has its
            attention heads, or the workspace has no task.
        WorkspaceError: the snapshot is damaged, or the data changed.
    """
    if not find_task(workspace.config.task.name).learns:
        raise InputError(
            f"workspace {workspace.root} has no task by which attention heads could be told "
            "important: make one with `bertvision finetune`"
        )
    folder, arithmetic = ensure_snapshot(workspace, tag), resolve_precision(precision)
    data = workspace.dataset()
    data.check([split])

    def measure() -> PruningResult:
        snapshot = load_snapshot(folder)
        every = data.items(split)
        chosen = np.random.default_rng(seed).permutation(len(every))[:items]
        half = len(chosen) // 2

        def sample(rows: Any) -> Sample:
            some = [every[i] for i in sorted(rows)]
            return Sample(some, data.task.windows(some, snapshot.tokenizer, data.config))

        return prune_model(
            *(snapshot.model, data.task, sample(chosen[:half]), sample(chosen[half:])),
            orders=orders,
            precision=arithmetic,
            seed=seed,
            name=f"{tag}/{split}",
        )

    options = {
        "items": Given(items, 100),
        "orders": Given(orders, 3),
        "precision": Given(arithmetic, arithmetic),
        "seed": Given(seed, 0),
    }
    runs = {str(tag): read_snapshot_info(folder).weights_sha256}
    job = Job(PruningResult, (tag,), (split,), options, (), runs)
    return kept_or_measured(workspace, job, measure, plot)
