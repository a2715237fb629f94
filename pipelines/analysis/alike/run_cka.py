"""Run it on the splits of a workspace."""

from __future__ import annotations

from pathlib import Path

from bertvision.pipelines.analysis.alike.cka import CkaResult
from bertvision.pipelines.analysis.alike.cka import cka as cka_of_arrays
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.sides import given_beside, sides
from bertvision.pipelines.workspace.workspace import Workspace


def run_cka(
    workspace: Workspace,
    first: str,
    second: str,
    *,
    split: str = "dev",
    beside: Workspace | None = None,
    max_tokens: int | None = 20_000,
    biased: bool = False,
    seed: int = 0,
    scheduler: str = "threads",
    plot: Path | None = None,
) -> CkaResult:
    """Linear CKA between all layers of two snapshots, on the tokens of one split.

    Args:
        workspace: with the activations.
        first: snapshot of the rows.
        second: snapshot of the columns; may be the same.
        split: which both have.
        beside: workspace with the second; None is the same one.
        biased: the biased estimator instead of the unbiased one.
        max_tokens: use a seeded sample of at most so many tokens; None uses all.
        seed: of the sample.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens.
    """
    both = sides(workspace, first, second, split, beside)

    def measure() -> CkaResult:
        x, y, places = both.arrays()
        return cka_of_arrays(
            x,
            y,
            places=places,
            unbiased=not biased,
            max_tokens=max_tokens,
            seed=seed,
            scheduler=scheduler,
            **both.told(),
        )

    options = {
        "biased": Given(biased, False, named=True),
        **given_beside(workspace, beside),
        **_sample(max_tokens, 20_000, seed),
    }
    job = Job(CkaResult, (first, second), (split,), options, both.own, others=both.others)
    return kept_or_measured(workspace, job, measure, plot)


def _sample(max_tokens: int | None, default: int, seed: int) -> dict[str, Given]:
    """The options of a sample."""
    return {"max_tokens": Given(max_tokens, default), "seed": Given(seed, 0)}
