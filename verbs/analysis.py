"""Offline analyses of stored activations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.drawing.figures import check_suffix
from bertvision.verbs.arguments.checks import check_stored, find_workspace
from bertvision.verbs.arguments.reading import StrPath, Tag, at_least, parse_tag, path_of

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.cka import CkaResult
    from bertvision.pipelines.analysis.isotropy import IsotropyResult


def _check(plot: Path | None, scheduler: str) -> None:
    """What does not depend on the workspace."""
    from bertvision.pipelines.scheduler import is_cluster

    if plot is not None:
        check_suffix(plot)
    is_cluster(scheduler)


def cka(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    max_tokens: int = 20_000,
    biased: bool = False,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> CkaResult:
    """Linear CKA between the layers of two snapshots: table, JSON and an SVG figure.

    >>> import bertvision
    >>> alike = bertvision.cka("0.5e", "1e", max_tokens=200)
    >>> alike.cka.shape  # (layers, layers)
    (3, 3)

    Args:
        first: snapshot.
        second: snapshot; may be the same.
        split: that both have.
        max_tokens: seeded sample of at most so many tokens; 0 uses all.
        biased: the biased estimator.
        seed: of the sample.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens.
    """
    tags, file = (parse_tag(first), parse_tag(second)), path_of(plot)
    at_least(max_tokens, 0, "--max-tokens")
    _check(file, scheduler)
    space = find_workspace(workspace, store)
    for tag in tags:
        check_stored(space, tag, split)
    from bertvision.pipelines.analysis.run import cka as run

    return run(
        space,
        *tags,
        split=split,
        max_tokens=max_tokens or None,
        biased=biased,
        seed=seed,
        scheduler=scheduler,
        plot=file,
    )


def isotropy(
    checkpoint: Tag,
    *,
    split: str = "dev",
    max_tokens: int = 100_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> IsotropyResult:
    """Isotropy of each layer: mean cosine, explained variance, outlier channels.

    >>> import bertvision
    >>> spread = bertvision.isotropy("1e", max_tokens=200)
    >>> spread.mean_cosine.shape  # (layers,)
    (3,)

    Args:
        checkpoint: snapshot.
        split: to analyse.
        max_tokens: seeded sample of at most so many tokens; 0 uses all.
        seed: of the sample.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
    """
    tag, file = parse_tag(checkpoint), path_of(plot)
    at_least(max_tokens, 0, "--max-tokens")
    _check(file, scheduler)
    space = find_workspace(workspace, store)
    check_stored(space, tag, split)
    from bertvision.pipelines.analysis.run import isotropy as run

    return run(
        space,
        tag,
        split=split,
        max_tokens=max_tokens or None,
        seed=seed,
        scheduler=scheduler,
        plot=file,
    )
