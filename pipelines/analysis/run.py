"""Analyses of a workspace's stored activations: find the splits, run, keep, plot."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertvision.featurestore.lazy import check_same_rows
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.alike.cka import CkaResult
from bertvision.pipelines.analysis.alike.cka import cka as cka_of_arrays
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.isotropy import isotropy as isotropy_of_array
from bertvision.pipelines.analysis.records import FOLDER, Analysis, CkaAnalysis, IsotropyAnalysis
from bertvision.pipelines.drawing.figures import check_suffix
from bertvision.pipelines.records import write_record
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)


def cka(
    workspace: Workspace,
    first: str,
    second: str,
    *,
    split: str = "dev",
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
        max_tokens: use a seeded sample of at most so many tokens; None uses all.
        biased: the biased estimator instead of the unbiased one.
        seed: of the sample.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens.
    """
    name = f"cka-{first}-{second}-{split}" + ("-biased" if biased else "")
    command = f"bertvision cka {first} {second} --split {split}" + (" --biased" if biased else "")
    command += _sample(max_tokens, 20_000, seed)
    path = _plot_path(workspace, name, plot)
    x, y = (workspace.split(tag, split).require_complete() for tag in (first, second))
    check_same_rows(x, y)
    states = x.dask()
    result = cka_of_arrays(
        states,
        states if x.name == y.name else y.dask(),
        names=(x.name, y.name),
        layers_x=x.record.layers,
        layers_y=y.record.layers,
        unbiased=not biased,
        max_tokens=max_tokens,
        seed=seed,
        scheduler=scheduler,
    )
    _keep(workspace, name, CkaAnalysis(command=command, **_made((x, y), result)))
    _plot(result, path)
    return result


def isotropy(
    workspace: Workspace,
    tag: str,
    *,
    split: str = "dev",
    max_tokens: int | None = 100_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: Path | None = None,
) -> IsotropyResult:
    """Isotropy of every layer of a snapshot, on the tokens of one split.

    Args:
        workspace: with the activations.
        tag: the snapshot.
        split: of it.
        max_tokens: use a seeded sample of at most so many tokens; None uses all.
        seed: of the sample.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``.
    """
    name = f"isotropy-{tag}-{split}"
    path = _plot_path(workspace, name, plot)
    x = workspace.split(tag, split).require_complete()
    result = isotropy_of_array(
        x.dask(),
        max_tokens=max_tokens,
        seed=seed,
        scheduler=scheduler,
        name=x.name,
        layers=x.record.layers,
    )
    command = f"bertvision isotropy {tag} --split {split}" + _sample(max_tokens, 100_000, seed)
    _keep(workspace, name, IsotropyAnalysis(command=command, **_made((x,), result)))
    _plot(result, path)
    return result


def _sample(max_tokens: int | None, default: int, seed: int) -> str:
    """The options of a sample that are not the default."""
    options = "" if max_tokens == default else f" --max-tokens {max_tokens or 0}"
    return options + (f" --seed {seed}" if seed else "")


def _made(splits: Sequence[ActivationSplit], result: CkaResult | IsotropyResult) -> dict[str, Any]:
    """What was read, and what came out."""
    weights = {str(x.tag): x.record.provenance.get("weights_sha256") for x in splits}
    known = {tag: str(digest) for tag, digest in weights.items() if digest is not None}
    return {"weights_sha256": known, "result": result.to_json()}


def _keep(workspace: Workspace, name: str, analysis: Analysis) -> None:
    """In the workspace, for its report; an older one of the same name is replaced."""
    path = workspace.root / FOLDER / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    write_record(path, analysis)


def _plot_path(workspace: Workspace, name: str, plot: Path | None) -> Path:
    """Where to draw; a name that could not be is refused before the tokens are read."""
    path = plot or workspace.root / FOLDER / f"{name}.svg"
    check_suffix(path)
    return path


def _plot(result: CkaResult | IsotropyResult, path: Path) -> None:
    result.figure().save(path)
    log.info("plot: %s", path)
