"""Statistics of the layers of a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bertvision.jobs.analyses.analysed import analysed
from bertvision.jobs.declare import (
    FigurePath,
    MaxTokens,
    SchedulerName,
    Seed,
    StorePath,
    WorkspacePath,
    job,
)
from bertvision.jobs.reading import (
    Tags,
    parse_tags,
)
from bertvision.pipelines.options import Option
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.context import ContextResult
    from bertvision.pipelines.analysis.isotropy import IsotropyResult


@job
def isotropy(
    checkpoint: Tags,
    *,
    split: str = "dev",
    max_tokens: MaxTokens = 20_000,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> IsotropyResult:
    """Measure how hidden states spread in each layer.

    All tokens and [CLS] alone are measured: mean cosine, spectrum, outlier channels.

    Examples:
        >>> import bertvision
        >>> spread = bertvision.isotropy("0.5e,1e", max_tokens=200)
        >>> spread.mean_cosine.shape  # (snapshots, tokens and [CLS], layers)
        (2, 2, 3)
        >>> frame = spread.to_pandas()
        >>> len(frame), list(frame.columns)[:5]
        (12, ['snapshot', 'set', 'layer', 'mean_norm', 'mean_cosine'])

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the snapshots do not hold the same layers.
    """
    tags = tuple(dict.fromkeys(parse_tags(checkpoint)))

    def run(space: Workspace, figure: Path | None) -> IsotropyResult:
        from bertvision.pipelines.analysis.isotropy import run_isotropy as measure

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
        workspace=workspace,
        store=store,
    )


@job
def context(
    checkpoint: Tags,
    *,
    split: str = "dev",
    tokens: Annotated[int, Option(ge=10)] = 5_000,
    uses: Annotated[int, Option(ge=2)] = 20,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> ContextResult:
    """Measure how much of a token's state is its context.

    Uses of a word are compared with each other, with other words of their window, and with random
    tokens.

    Examples:
        >>> import bertvision
        >>> words = bertvision.context("0.5e,1e", tokens=300)
        >>> words.self_similarity.shape  # (snapshots, layers)
        (2, 3)
        >>> sorted(words.adjusted())
        ['explained_adjusted', 'intra_adjusted', 'self_adjusted', 'static_adjusted']

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.
        tokens: Uses of words that are sampled, and tokens of windows.
        uses: Uses of a word, at most.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or words cannot be told.
        ProvenanceError: the snapshots do not hold the same tokens, or not the same layers.
    """
    tags = tuple(dict.fromkeys(parse_tags(checkpoint)))

    def run(space: Workspace, figure: Path | None) -> ContextResult:
        from bertvision.pipelines.analysis.context import run_context as measure

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
        workspace=workspace,
        store=store,
    )
