"""How alike the layers of two snapshots are: which splits, and under which name it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertvision.pipelines.analysis.alike.cca import CcaResult
from bertvision.pipelines.analysis.alike.cca import cca as cca_of_arrays
from bertvision.pipelines.analysis.alike.cka import CkaResult
from bertvision.pipelines.analysis.alike.cka import cka as cka_of_arrays
from bertvision.pipelines.analysis.alike.rsa import Paired, RsaResult
from bertvision.pipelines.analysis.alike.rsa import rsa as rsa_of_arrays
from bertvision.pipelines.analysis.joined import joined_rows
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.sides import check_layers, given_beside, sides
from bertvision.pipelines.workspace.workspace import Workspace


def cka(
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


def cca(
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


def rsa(
    workspace: Workspace,
    first: str,
    second: str,
    *,
    splits: Sequence[str] = ("dev",),
    n_tokens: int = 5_000,
    repeats: int = 10,
    seed: int = 0,
    scheduler: str = "threads",
    plot: Path | None = None,
) -> RsaResult:
    """RSA between all layers of two snapshots, on sampled tokens of splits side by side.

    Args:
        workspace: with the activations.
        first: snapshot of the rows.
        second: snapshot of the columns; may be the same.
        splits: which both have; tokens are joined on (example id, position).
        n_tokens: of a sample.
        repeats: samples of a split.
        seed: of the samples.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens, or splits not the same layers.
    """
    pairs = {
        split: tuple(workspace.split(tag, split).require_complete() for tag in (first, second))
        for split in splits
    }
    stored = [split for pair in pairs.values() for split in pair]
    for of_tag in zip(*pairs.values(), strict=True):
        check_layers(of_tag)
    x, y = next(iter(pairs.values()))

    def measure() -> RsaResult:
        found = {}
        for split, (one, other) in pairs.items():
            rows = joined_rows((one, other))
            states = one.dask()
            found[split] = Paired(states, states if one.name == other.name else other.dask(), *rows)
        return rsa_of_arrays(
            found,
            n_tokens=n_tokens,
            repeats=repeats,
            seed=seed,
            scheduler=scheduler,
            names=(str(x.tag), str(y.tag)),
            layers_x=x.record.layers,
            layers_y=y.record.layers,
        )

    options = {
        "max_tokens": Given(n_tokens, 5_000),
        "repeats": Given(repeats, 10),
        "seed": Given(seed, 0),
    }
    job = Job(RsaResult, (first, second), splits, options, stored)
    return kept_or_measured(workspace, job, measure, plot)


def _sample(max_tokens: int | None, default: int, seed: int) -> dict[str, Given]:
    """The options of a sample."""
    return {"max_tokens": Given(max_tokens, default), "seed": Given(seed, 0)}
