"""Attention heads of an encoder: what they look at, and which of them it needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bertvision.jobs.analyses import analysed
from bertvision.jobs.checks import check_snapshots
from bertvision.jobs.data import check_data, open_data
from bertvision.jobs.declare import FigurePath, Precision, Seed, WorkspacePath, job
from bertvision.jobs.reading import (
    StrPath,
    Tag,
    parse_tag,
    text_of,
)
from bertvision.pipelines.options import Option
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.attention import AttentionResult
    from bertvision.pipelines.analysis.prune import PruningResult
    from bertvision.pipelines.analysis.relations import RelationsResult


@job
def attention(
    checkpoint: Tag,
    *,
    split: str = "dev",
    task: str | None = None,
    windows: Annotated[int, Option(ge=0)] = 200,
    precision: Precision = "auto",
    seed: Seed = 0,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
) -> AttentionResult:
    """Measure what each attention head looks at.

    Entropy, [SEP], neighbours, over windows of a split; it runs the encoder.

    Examples:
        >>> import bertvision
        >>> heads = bertvision.attention("1e", windows=3)
        >>> heads.values.shape  # (measures, layers, attention heads)
        (6, 2, 4)

    Args:
        checkpoint: Snapshot to analyse.
        split: Split to analyse.
        task: A data set that was added before, not the workspace's own.
        windows: Seeded sample of at most so many windows; 0 takes all.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: ``plot`` does not end in ``.svg``, or the family gives no attention.
    """
    tag = parse_tag(checkpoint)

    def run(space: Workspace, figure: Path | None) -> AttentionResult:
        check_snapshots(space, [tag])
        from bertvision.pipelines.analysis.attention import run_attention as measure

        return measure(
            space,
            tag,
            split=split,
            task=task,
            windows=windows or None,
            precision=precision,
            seed=seed,
            plot=figure,
        )

    return analysed(*(run, (), ()), scheduler="threads", plot=plot, workspace=workspace, store=None)


@job
def prune(
    checkpoint: Tag,
    *,
    split: str = "dev",
    items: Annotated[int, Option(ge=2)] = 100,
    orders: Annotated[int, Option(ge=2)] = 3,
    precision: Precision = "auto",
    seed: Seed = 0,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
) -> PruningResult:
    """Mask attention heads, and measure what the encoder loses.

    Heads are masked one by one, and then ever more of them. For each attention head the layers from
    its own up are run, and for the curve the encoder 38 times, over half of the items each. A
    second call with the same settings, of the same weights, gives what was kept.

    Examples:
        >>> import bertvision
        >>> pruned = bertvision.prune("1e", items=4)
        >>> pruned.rise.shape  # (layers, attention heads)
        (2, 4)

    Args:
        checkpoint: Snapshot to analyse.
        split: Split to score on.
        items: Seeded sample: half orders the heads, half is scored.
        orders: Random orders beside that of importance.
        seed: Seed of the sample and of the orders.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, the family's attention heads cannot be
            masked, or the workspace has no task.
    """
    tag = parse_tag(checkpoint)

    def run(space: Workspace, figure: Path | None) -> PruningResult:
        check_snapshots(space, [tag])
        from bertvision.pipelines.analysis.prune import run_prune as measure

        return measure(
            space,
            tag,
            split=split,
            items=items,
            orders=orders,
            precision=precision,
            seed=seed,
            plot=figure,
        )

    return analysed(*(run, (), ()), scheduler="threads", plot=plot, workspace=workspace, store=None)


@job
def relations(
    checkpoint: Tag,
    *,
    data: StrPath | None = None,
    split: str = "dev",
    sentences: Annotated[int, Option(ge=0)] = 1_000,
    precision: Precision = "auto",
    seed: Seed = 0,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
) -> RelationsResult:
    """Find attention heads that follow dependency relations.

    For each relation the best head is chosen on half of the sentences and scored on the others,
    beside the best fixed offset. It runs the encoder; ``data`` is needed the first time.

    Args:
        checkpoint: Snapshot to analyse.
        data: A treebank in CoNLL-U, to be said once: a file or a folder.
        split: Split of the treebank.
        sentences: Seeded sample of at most so many; 0 takes all.
        seed: Seed of the sample and of intervals.

    Raises:
        UnknownNameError: there is no such snapshot, treebank or split.
        InputError: the treebank is malformed, or no relation has enough examples.
    """
    tag = parse_tag(checkpoint)

    def run(space: Workspace, figure: Path | None) -> RelationsResult:
        check_snapshots(space, [tag])
        check_data(space.root, None, "treebank", text_of(data))
        from bertvision.pipelines.analysis.relations import run_relations as measure

        open_data(space.root, None, "treebank", text_of(data))
        return measure(
            space,
            tag,
            split=split,
            sentences=sentences or None,
            precision=precision,
            seed=seed,
            plot=figure,
        )

    return analysed(*(run, (), ()), scheduler="threads", plot=plot, workspace=workspace, store=None)
