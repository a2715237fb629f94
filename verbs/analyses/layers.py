"""Offline analyses of stored activations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.reading import (
    Names,
    StrPath,
    Tag,
    at_least,
    parse_names,
    parse_tag,
)

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.alike.cka import CkaResult
    from bertvision.pipelines.analysis.alike.rsa import RsaResult
    from bertvision.pipelines.analysis.isotropy import IsotropyResult


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
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> CkaResult:
    """Measure how alike the layers of two snapshots are, by linear CKA.

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

    def run(space: Workspace, figure: Path | None) -> CkaResult:
        from bertvision.pipelines.analysis.run import cka as measure

        return measure(
            space,
            *tags,
            split=split,
            max_tokens=max_tokens or None,
            biased=biased,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags,
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
    tokens: int = 5_000,
    repeats: int = 10,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> RsaResult:
    """Measure how alike tokens lie to each other in two snapshots, by RSA of sampled tokens.

    A second call with the same settings, of the same weights, gives what was kept.

    >>> import bertvision
    >>> alike = bertvision.rsa("0.5e", "1e", tokens=100, repeats=3)
    >>> alike.of_pairs.shape  # (splits, repeats, layers, layers)
    (1, 3, 3, 3)
    >>> [list(row) for row in alike.same_layers()][0]
    ['x', 'y', 'split', 'layer_x', 'layer_y', 'rsa', 'rsa_sd', 'by_token', 'by_token_sd']

    Args:
        first: snapshot.
        second: snapshot; may be the same.
        split: that both have; several stand side by side, such as ``dev,mpqa-test``.
        tokens: of a sample; tokens of the two are joined on example and position.
        repeats: samples of each split; means and deviations are over them.
        seed: of the samples.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a number is too small.
        ProvenanceError: the two do not hold the same tokens; the message names them.
    """
    tags, splits = (parse_tag(first), parse_tag(second)), tuple(dict.fromkeys(parse_names(split)))
    at_least(tokens, 3, "--tokens")
    at_least(repeats, 1, "--repeats")

    def run(space: Workspace, figure: Path | None) -> RsaResult:
        from bertvision.pipelines.analysis.run import rsa as measure

        return measure(
            space,
            *tags,
            splits=splits,
            n_tokens=tokens,
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


def isotropy(
    checkpoint: Tag,
    *,
    split: str = "dev",
    max_tokens: int = 100_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> IsotropyResult:
    """Measure the isotropy of each layer: mean cosine, explained variance, outlier channels.

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
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
    """
    tag = parse_tag(checkpoint)
    at_least(max_tokens, 0, "--max-tokens")

    def run(space: Workspace, figure: Path | None) -> IsotropyResult:
        from bertvision.pipelines.analysis.run import isotropy as measure

        return measure(
            space,
            tag,
            split=split,
            max_tokens=max_tokens or None,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        [tag],
        [split],
        scheduler=scheduler,
        plot=plot,
        csv=csv,
        workspace=workspace,
        store=store,
    )
