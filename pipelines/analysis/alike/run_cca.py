"""Run it on the splits of a workspace."""

from __future__ import annotations

from pathlib import Path

from bertvision.pipelines.analysis.alike.cca import CcaResult
from bertvision.pipelines.analysis.alike.cca import cca as cca_of_arrays
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.sides import given_beside, sides
from bertvision.pipelines.workspace.workspace import Workspace


def run_cca(
    workspace: Workspace,
    first: str,
    second: str,
    *,
    split: str = "dev",
    beside: Workspace | None = None,
    keep: float = 0.99,
    ridge: float = 1e-6,
    max_tokens: int | None = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: Path | None = None,
) -> CcaResult:
    """SVCCA and PWCCA between all layers of two snapshots, on the tokens of one split.

    Args:
        workspace: with the activations.
        first: snapshot of the rows.
        second: snapshot of the columns; may be the same.
        split: which both have.
        beside: workspace with the second; None is the same one.
        keep: share of the variance whose directions SVCCA takes.
        ridge: added to the variance of every direction, as a part of the channels' mean variance.
        max_tokens: use a seeded sample of at most so many tokens; None uses all.
        seed: of the sample.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``, or a share is out of range.
        ProvenanceError: the two do not hold the same tokens.
    """
    both = sides(workspace, first, second, split, beside)

    def measure() -> CcaResult:
        x, y, places = both.arrays()
        return cca_of_arrays(
            x,
            y,
            places=places,
            keep=keep,
            ridge=ridge,
            max_tokens=max_tokens,
            seed=seed,
            scheduler=scheduler,
            **both.told(),
        )

    options = {
        **given_beside(workspace, beside),
        "keep": Given(keep, 0.99),
        "ridge": Given(ridge, 1e-6),
        **_sample(max_tokens, 20_000, seed),
    }
    job = Job(CcaResult, (first, second), (split,), options, both.own, others=both.others)
    return kept_or_measured(workspace, job, measure, plot)


def _sample(max_tokens: int | None, default: int, seed: int) -> dict[str, Given]:
    """The options of a sample."""
    return {"max_tokens": Given(max_tokens, default), "seed": Given(seed, 0)}
