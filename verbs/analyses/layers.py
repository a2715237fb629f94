"""What the layers of a snapshot are like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.reading import (
    StrPath,
    Tags,
    at_least,
    parse_tags,
)

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.geometry.isotropy_result import IsotropyResult
    from bertvision.pipelines.analysis.words.context_result import ContextResult


def isotropy(
    checkpoint: Tags,
    *,
    split: str = "dev",
    max_tokens: int = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> IsotropyResult:
    """Measure how tokens and [CLS] spread in each layer, and over which channels.

    Examples:
        >>> import bertvision
        >>> spread = bertvision.isotropy("0.5e,1e", max_tokens=200)
        >>> spread.mean_cosine.shape  # (snapshots, tokens and [CLS], layers)
        (2, 2, 3)
        >>> frame = spread.to_pandas()
        >>> len(frame), list(frame.columns)[:5]
        (12, ['snapshot', 'set', 'layer', 'mean_norm', 'mean_cosine'])

    Args:
        checkpoint: snapshots, such as ``0e,1e``; of each one outlier channels are compared with
            those of the one before.
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
        ProvenanceError: the snapshots do not hold the same layers.
    """
    tags = tuple(dict.fromkeys(parse_tags(checkpoint)))
    at_least(max_tokens, 0, "--max-tokens")

    def run(space: Workspace, figure: Path | None) -> IsotropyResult:
        from bertvision.pipelines.analysis.geometry.run import isotropy as measure

        return measure(
            space,
            tags,
            split=split,
            max_tokens=max_tokens or None,
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


def context(
    checkpoint: Tags,
    *,
    split: str = "dev",
    tokens: int = 5_000,
    uses: int = 20,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> ContextResult:
    """Measure how much of a token's state is its word, and how much its context.

    Examples:
        >>> import bertvision
        >>> words = bertvision.context("0.5e,1e", tokens=300)
        >>> words.self_similarity.shape  # (snapshots, layers)
        (2, 3)
        >>> sorted(words.adjusted())
        ['explained_adjusted', 'intra_adjusted', 'self_adjusted', 'static_adjusted']

    Args:
        checkpoint: snapshots, such as ``0e,1e``, on the same tokens.
        split: to analyse.
        tokens: uses of words that are sampled, and tokens of windows.
        uses: of a word, at most.
        seed: of the samples.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or words cannot be told.
        ProvenanceError: the snapshots do not hold the same tokens, or not the same layers.
    """
    tags = tuple(dict.fromkeys(parse_tags(checkpoint)))
    at_least(tokens, 10, "--tokens")
    at_least(uses, 2, "--uses")

    def run(space: Workspace, figure: Path | None) -> ContextResult:
        from bertvision.pipelines.analysis.words.run import context as measure

        return measure(
            space,
            tags,
            split=split,
            tokens=tokens,
            uses=uses,
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
