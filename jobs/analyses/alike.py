"""How alike the layers of two snapshots are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bertvision.jobs.analyses.analysed import analysed, find_beside
from bertvision.jobs.declare import (
    FigurePath,
    MaxTokens,
    OtherWorkspace,
    SchedulerName,
    Seed,
    StorePath,
    WorkspacePath,
    job,
)
from bertvision.jobs.reading import (
    Names,
    Tag,
    parse_names,
    parse_tag,
)
from bertvision.pipelines.options import Option
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.cca import CcaResult
    from bertvision.pipelines.analysis.cka import CkaResult
    from bertvision.pipelines.analysis.rsa import RsaResult


@job
def cka(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: OtherWorkspace = None,
    max_tokens: MaxTokens = 20_000,
    biased: bool = False,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> CkaResult:
    """Compare the layers of two snapshots by linear CKA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cka("0.5e", "1e", max_tokens=200)
        >>> alike.cka.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'cka', 'cka_dropped']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have.
        biased: Use the biased estimator.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens.
    """
    tags = parse_tag(first), parse_tag(second)
    other = find_beside(beside, workspace, tags[1], [split])

    def run(space: Workspace, figure: Path | None) -> CkaResult:
        from bertvision.pipelines.analysis.cka import run_cka as measure

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
        workspace=workspace,
        store=store,
    )


@job
def cca(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: OtherWorkspace = None,
    max_tokens: MaxTokens = 20_000,
    keep: float = 0.99,
    ridge: float = 1e-6,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> CcaResult:
    """Compare the layers of two snapshots by SVCCA and PWCCA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cca("0.5e", "1e", max_tokens=330)
        >>> alike.pwcca.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'pwcca', 'svcca']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have.
        keep: Share of the variance whose directions SVCCA takes.
        ridge: Part of the channels' mean variance that is added to each direction.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a share is out of range.
        ProvenanceError: the two do not hold the same tokens.
    """
    tags = parse_tag(first), parse_tag(second)
    other = find_beside(beside, workspace, tags[1], [split])

    def run(space: Workspace, figure: Path | None) -> CcaResult:
        from bertvision.pipelines.analysis.cca import run_cca as measure

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
        workspace=workspace,
        store=store,
    )


@job
def rsa(
    first: Tag,
    second: Tag,
    *,
    split: Names = "dev",
    max_tokens: Annotated[int, Option(ge=3)] = 5_000,
    repeats: Annotated[int, Option(ge=1)] = 10,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> RsaResult:
    """Compare how tokens are arranged in two snapshots (RSA).

    Tokens are sampled, and their similarities to each other correlated (representational similarity
    analysis).

    Examples:
        >>> import bertvision
        >>> alike = bertvision.rsa("0.5e", "1e", max_tokens=100, repeats=3)
        >>> alike.of_pairs.shape  # (splits, repeats, layers, layers)
        (1, 3, 3, 3)
        >>> [list(row) for row in alike.same_layers()][0]
        ['x', 'y', 'split', 'layer_x', 'layer_y', 'rsa', 'rsa_sd', 'by_token', 'by_token_sd']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have; several side by side, such as dev,mpqa-all.
        max_tokens: Seeded sample of at most so many tokens.
        repeats: Samples of each split.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a number is too small.
        ProvenanceError: the two do not hold the same tokens; the message names them.
    """
    tags, splits = (parse_tag(first), parse_tag(second)), tuple(dict.fromkeys(parse_names(split)))

    def run(space: Workspace, figure: Path | None) -> RsaResult:
        from bertvision.pipelines.analysis.rsa import run_rsa as measure

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
        workspace=workspace,
        store=store,
    )
