"""What the layers of a snapshot are like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.reading import (
    StrPath,
    Tag,
    at_least,
    parse_tag,
)

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.isotropy import IsotropyResult


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
