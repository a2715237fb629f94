"""Run it on the splits of a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertvision.pipelines.analysis.alike.rsa import Paired, RsaResult
from bertvision.pipelines.analysis.alike.rsa import rsa as rsa_of_arrays
from bertvision.pipelines.analysis.joined import joined_rows
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.sides import check_layers
from bertvision.pipelines.workspace.workspace import Workspace


def run_rsa(
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
