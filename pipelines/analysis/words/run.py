"""Words in the hidden states that a workspace stores, and under which name it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.joined import in_order, joined_rows
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.sides import check_layers
from bertvision.pipelines.analysis.words.context import Samples
from bertvision.pipelines.analysis.words.context import context as context_of_arrays
from bertvision.pipelines.analysis.words.context_result import ContextResult
from bertvision.pipelines.analysis.words.uses import (
    Vocabulary,
    sample_positions,
    sample_uses,
    sample_windows,
)
from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace

POSITIONS = (0, 1, 2, 4, 16, 64, 256)
"""Positions at which tokens are compared, where windows are as long."""
AT_A_POSITION = 200
"""Windows at each."""


def run_context(
    workspace: Workspace,
    tags: Sequence[str],
    *,
    split: str = "dev",
    tokens: int = 5_000,
    uses: int = 20,
    seed: int = 0,
    scheduler: str = "threads",
    plot: Path | None = None,
) -> ContextResult:
    """How contextual the hidden states of snapshots are, on the same tokens of one split.

    Args:
        workspace: with the activations and the snapshots, whose tokenizer says what is a word.
        tags: the snapshots.
        split: of each.
        tokens: uses of words that are sampled, and tokens of windows.
        uses: of a word, at most.
        seed: of the samples.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: the split holds no ids of tokens, or too few words; ``plot`` does not end in
            ``.svg``.
        ProvenanceError: the snapshots do not hold the same tokens, or not the same layers.
        WorkspaceError: the tokenizer of a snapshot is damaged.
    """
    splits = [workspace.split(tag, split).require_complete() for tag in tags]
    check_layers(splits)
    _check_tokens(splits[0])
    folder = workspace.require_snapshot(tags[0])

    def measure() -> ContextResult:
        first = splits[0]
        vocabulary = Vocabulary.of(load_snapshot_tokenizer(folder))
        ids = in_order(first, "input_ids").astype(np.int64)
        lengths = first.plan.n_tokens[np.argsort(first.plan.example_id)].astype(np.int64)
        positions = [p for p in POSITIONS if (lengths > p).sum() > 1]
        samples = Samples(
            sample_uses(ids, lengths, vocabulary, most=tokens, of_word=uses, seed=seed),
            sample_windows(vocabulary.special[ids], lengths, tokens, seed),
            sample_positions(lengths, positions, AT_A_POSITION, seed),
            positions,
        )
        names = [str(of.tag) for of in splits]
        return context_of_arrays(
            {name: of.dask() for name, of in zip(names, splits, strict=True)},
            samples,
            rows=dict(zip(names, joined_rows(splits), strict=True)),
            scheduler=scheduler,
            name=split,
            layers=first.record.layers,
            seed=seed,
        )

    options = {"tokens": Given(tokens, 5_000), "uses": Given(uses, 20), "seed": Given(seed, 0)}
    job = Job(ContextResult, tags, (split,), options, splits, tags_between=",")
    return kept_or_measured(workspace, job, measure, plot)


def _check_tokens(split: ActivationSplit) -> None:
    """Refuse a split whose tokens are not known.

    Raises:
        InputError: it holds a vector for each window, or no ids of tokens.
    """
    if split.record.tokens == split.record.examples:
        raise InputError(
            f"{split.name} holds one vector for each window, and words are looked for in all "
            f"tokens: `bertvision extract --checkpoint {split.tag} --pool none` writes a split of "
            "these; give its name with --split"
        )
    if "input_ids" not in split.record.arrays:
        raise InputError(
            f"{split.name} was written without the ids of its tokens: `bertvision store rm "
            f"{split.name}`, then `bertvision extract --checkpoint {split.tag} --split "
            f"{split.split}` writes them"
        )
