"""Geometry of the hidden states that a workspace stores, and under which name it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertvision.featurestore.format.encoding import RELATIVE_ROUNDING
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.geometry.isotropy import isotropy as isotropy_of_arrays
from bertvision.pipelines.analysis.geometry.isotropy_result import IsotropyResult
from bertvision.pipelines.analysis.geometry.spread import Rounding
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.sides import check_layers
from bertvision.pipelines.workspace.workspace import Workspace


def run_isotropy(
    workspace: Workspace,
    tags: Sequence[str],
    *,
    split: str = "dev",
    max_tokens: int | None = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: Path | None = None,
) -> IsotropyResult:
    """Isotropy of every layer of snapshots, on the tokens and the [CLS] of one split.

    Args:
        workspace: with the activations.
        tags: the snapshots, in the order in which they are compared.
        split: of each.
        max_tokens: use a seeded sample of at most so many tokens; None uses all.
        seed: of the sample.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the snapshots do not hold the same layers.
    """
    splits = [workspace.split(tag, split).require_complete() for tag in tags]
    check_layers(splits)

    def measure() -> IsotropyResult:
        # where windows are one vector each, these are all there is
        pooled = all(of.record.tokens == of.record.examples for of in splits)
        lengths = {str(of.tag): of.plan.n_tokens.astype(np.int64) for of in splits}
        first = {tag: np.cumsum(n) - n for tag, n in lengths.items()}
        sets = [False] if pooled else [False, True]
        return isotropy_of_arrays(
            {str(of.tag): of.dask() for of in splits},
            first=None if pooled else first,
            max_tokens=max_tokens,
            seed=seed,
            scheduler=scheduler,
            name=split,
            layers=splits[0].record.layers,
            rounding={str(of.tag): [_rounding(of, first=each) for each in sets] for of in splits},
        )

    options = {"max_tokens": Given(max_tokens, 20_000), "seed": Given(seed, 0)}
    job = Job(IsotropyResult, tags, (split,), options, splits, tags_between=",")
    return kept_or_measured(workspace, job, measure, plot)


def _rounding(split: ActivationSplit, *, first: bool) -> Rounding:
    """What the encoding of a split adds to the variance of its tokens, or of its first ones."""
    variance = split.rounding_variance(first=first)
    if variance is None:
        return Rounding(relative=RELATIVE_ROUNDING[split.encoding.name])
    return Rounding(variance)
