"""How alike the layers of two snapshots are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed, find_beside
from bertvision.verbs.arguments.deprecated import renamed
from bertvision.verbs.arguments.reading import (
    Names,
    StrPath,
    Tag,
    at_least,
    parse_names,
    parse_tag,
)

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.alike.cca import CcaResult
    from bertvision.pipelines.analysis.alike.cka import CkaResult
    from bertvision.pipelines.analysis.alike.rsa import RsaResult

_SAMPLE = 5_000


def cka(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: StrPath | None = None,
    max_tokens: int = 20_000,
    biased: bool = False,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> CkaResult:
    """Measure how alike the layers of two snapshots are, by linear CKA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cka("0.5e", "1e", max_tokens=200)
        >>> alike.cka.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'cka', 'cka_dropped']

    Args:
        first: snapshot.
        second: snapshot; may be the same.
        split: that both have.
        beside: workspace with the second snapshot, of the same data.
        max_tokens: seeded sample of at most so many tokens; 0 uses all.
        biased: the biased estimator.
        seed: of the sample.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens.
    """
    tags = parse_tag(first), parse_tag(second)
    at_least(max_tokens, 0, "--max-tokens")
    other = find_beside(beside, workspace, tags[1], [split])

    def run(space: Workspace, figure: Path | None) -> CkaResult:
        from bertvision.pipelines.analysis.run import cka as measure

        return measure(
            space,
            *tags,
            split=split,
            beside=other,
            max_tokens=max_tokens or None,
            biased=biased,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags if other is None else tags[:1],
        [split],
        scheduler=scheduler,
        plot=plot,
        csv=csv,
        workspace=workspace,
        store=store,
    )


def cca(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: StrPath | None = None,
    max_tokens: int = 20_000,
    keep: float = 0.99,
    ridge: float = 1e-6,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> CcaResult:
    """Measure what the layers of two snapshots hold of each other, by SVCCA and PWCCA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cca("0.5e", "1e", max_tokens=330)
        >>> alike.pwcca.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'pwcca', 'svcca']

    Args:
        first: snapshot.
        second: snapshot; may be the same.
        split: that both have.
        beside: workspace with the second snapshot, of the same data.
        max_tokens: seeded sample of at most so many tokens; 0 uses all.
        keep: share of the variance whose directions SVCCA takes.
        ridge: added to the variance of every direction, as a part of the channels' mean variance.
        seed: of the sample.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a share is out of range.
        ProvenanceError: the two do not hold the same tokens.
    """
    tags = parse_tag(first), parse_tag(second)
    at_least(max_tokens, 0, "--max-tokens")
    other = find_beside(beside, workspace, tags[1], [split])

    def run(space: Workspace, figure: Path | None) -> CcaResult:
        from bertvision.pipelines.analysis.run import cca as measure

        return measure(
            space,
            *tags,
            split=split,
            beside=other,
            max_tokens=max_tokens or None,
            keep=keep,
            ridge=ridge,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags if other is None else tags[:1],
        [split],
        scheduler=scheduler,
        plot=plot,
        csv=csv,
        workspace=workspace,
        store=store,
    )


def rsa(
    first: Tag,
    second: Tag,
    *,
    split: Names = "dev",
    max_tokens: int = _SAMPLE,
    repeats: int = 10,
    tokens: int | None = None,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> RsaResult:
    """Measure how alike tokens lie to each other in two snapshots, by RSA of sampled tokens.

    A second call with the same settings, of the same weights, gives what was kept.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.rsa("0.5e", "1e", max_tokens=100, repeats=3)
        >>> alike.of_pairs.shape  # (splits, repeats, layers, layers)
        (1, 3, 3, 3)
        >>> [list(row) for row in alike.same_layers()][0]
        ['x', 'y', 'split', 'layer_x', 'layer_y', 'rsa', 'rsa_sd', 'by_token', 'by_token_sd']

    Args:
        first: snapshot.
        second: snapshot; may be the same.
        split: that both have; several stand side by side, such as ``dev,mpqa-all``.
        max_tokens: of a sample; tokens of the two are joined on example and position.
        repeats: samples of each split; means and deviations are over them.
        tokens: former name of ``max_tokens``, which goes in 0.4.
        seed: of the samples.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, a number is too small, or the sample's size
            is given by both names.
        ProvenanceError: the two do not hold the same tokens; the message names them.
    """
    tags, splits = (parse_tag(first), parse_tag(second)), tuple(dict.fromkeys(parse_names(split)))
    max_tokens = renamed(
        *("tokens", tokens, "max_tokens", max_tokens), default=_SAMPLE, since="0.2", gone="0.4"
    )
    at_least(max_tokens, 3, "--max-tokens")
    at_least(repeats, 1, "--repeats")

    def run(space: Workspace, figure: Path | None) -> RsaResult:
        from bertvision.pipelines.analysis.run import rsa as measure

        return measure(
            space,
            *tags,
            splits=splits,
            n_tokens=max_tokens,
            repeats=repeats,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags,
        splits,
        scheduler=scheduler,
        plot=plot,
        csv=csv,
        workspace=workspace,
        store=store,
    )
