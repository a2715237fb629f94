"""Attention of a workspace's snapshots: which windows, and under which name it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.looks import attention as attention_of_maps
from bertvision.pipelines.analysis.attending.looks_result import AttentionResult
from bertvision.pipelines.analysis.attending.maps import (
    attention_maps,
    load_eager,
    sampled_windows,
)
from bertvision.pipelines.analysis.attending.pruning import Sample
from bertvision.pipelines.analysis.attending.pruning import pruning as prune_model
from bertvision.pipelines.analysis.attending.pruning_result import PruningResult
from bertvision.pipelines.analysis.attending.relations import looked
from bertvision.pipelines.analysis.attending.relations import relations as relations_of_maps
from bertvision.pipelines.analysis.attending.relations_result import RelationsResult
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.trees.treebank import TREEBANK, is_cut
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot, load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace


def attention(
    workspace: Workspace,
    tag: str,
    *,
    split: str = "dev",
    task: str | None = None,
    windows: int | None = 200,
    precision: str = "auto",
    seed: int = 0,
    plot: Path | None = None,
) -> AttentionResult:
    """Measure what each attention head of a snapshot looks at, on sampled windows.

    Args:
        workspace: with the snapshot; ``0e`` and ``untrained`` are made where they are missing.
        tag: the snapshot.
        split: of the data.
        task: an added data set; None is the workspace's own data.
        windows: of a seeded sample; None takes all.
        precision: arithmetic of the forward pass: auto, 32 or bf16.
        seed: of the sample.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: ``plot`` does not end in ``.svg``, or the family gives no attention.
        WorkspaceError: the snapshot is damaged, or the data changed.
    """
    folder, arithmetic = ensure_snapshot(workspace, tag), resolve_precision(precision)
    data = workspace.dataset(task)
    data.check([split])

    def measure() -> AttentionResult:
        tokenizer = load_snapshot_tokenizer(folder)
        every = data.windows(split, tokenizer)
        if every.parts is not None:
            raise InputError(
                f"the windows of {data.name} hold several documents each, which do not attend to "
                "each other: add the documents without packing, in another --workspace"
            )
        rows = sampled_windows(len(every), windows, seed)
        where = f"{tag}/{split}" if data.name is None else f"{tag}/{data.name}-{split}"
        return attention_of_maps(
            attention_maps(load_eager(folder), every, rows, precision=arithmetic),
            sep=tokenizer.sep_token_id,
            name=where,
            n_available=len(every),
            seed=seed,
        )

    options = {
        "task": Given(data.name, None, named=True),
        "windows": Given(windows, 200),
        "precision": Given(arithmetic, arithmetic),
        "seed": Given(seed, 0),
    }
    runs = {str(tag): read_snapshot_info(folder).weights_sha256}
    job = Job(AttentionResult, (tag,), (split,), options, (), runs)
    return kept_or_measured(workspace, job, measure, plot)


def prune(
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


def relations(
    workspace: Workspace,
    tag: str,
    *,
    split: str = "dev",
    sentences: int | None = 1_000,
    precision: str = "auto",
    seed: int = 0,
    plot: Path | None = None,
) -> RelationsResult:
    """Find which attention heads of a snapshot follow a dependency relation.

    Args:
        workspace: with the snapshot and a treebank.
        tag: the snapshot.
        split: of the treebank.
        sentences: of a seeded sample, half of which choose heads and offsets; None takes all.
        precision: arithmetic of the forward pass: auto, 32 or bf16.
        seed: of the sample and the bootstrap.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        UnknownNameError: there is no such snapshot, treebank or split.
        InputError: ``plot`` does not end in ``.svg``, or no relation has enough examples.
        WorkspaceError: the snapshot is damaged, or the data changed.
    """
    folder, arithmetic = ensure_snapshot(workspace, tag), resolve_precision(precision)
    data = workspace.dataset(TREEBANK)
    data.check([split])

    def measure() -> RelationsResult:
        tokenizer = load_snapshot_tokenizer(folder)
        items, windows = data.items(split), data.windows(split, tokenizer)
        ends = windows.first_token + windows.n_tokens
        offsets = [
            windows.offset_mapping[begin:end]
            for begin, end in zip(windows.first_token, ends, strict=True)
        ]
        whole = np.array(
            [
                i
                for i, item in enumerate(items)
                if not is_cut(item.text, offsets[i], data.config.max_length)
            ]
        )
        chosen = whole[sampled_windows(len(whole), sentences, seed)]
        order = np.random.default_rng(seed).permutation(chosen)
        model = load_eager(folder)
        halves = (
            (
                looked(items[maps.row], offsets[maps.row], maps)
                for maps in attention_maps(model, windows, rows, precision=arithmetic)
            )
            for rows in (order[: len(order) // 2], order[len(order) // 2 :])
        )
        return relations_of_maps(
            *halves, name=f"{tag}/{TREEBANK}-{split}", n_cut=len(items) - len(whole), seed=seed
        )

    options = {
        "sentences": Given(sentences, 1_000),
        "precision": Given(arithmetic, arithmetic),
        "seed": Given(seed, 0),
    }
    runs = {str(tag): read_snapshot_info(folder).weights_sha256}
    job = Job(RelationsResult, (tag,), (split,), options, (), runs)
    return kept_or_measured(workspace, job, measure, plot)
