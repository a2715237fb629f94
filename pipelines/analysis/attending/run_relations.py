"""Run it on the splits of a workspace."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bertvision.pipelines.analysis.attending.maps import (
    attention_maps,
    load_eager,
    sampled_windows,
)
from bertvision.pipelines.analysis.attending.relations import looked
from bertvision.pipelines.analysis.attending.relations import relations as relations_of_maps
from bertvision.pipelines.analysis.attending.relations_result import RelationsResult
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.trees.treebank import TREEBANK, is_cut
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace


def run_relations(
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
