"""Attention heads of an encoder: what they look at, and which of them it needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.options import PrecisionName
from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.checks import check_snapshots
from bertvision.verbs.arguments.data import check_data, open_data
from bertvision.verbs.arguments.reading import (
    PRECISIONS,
    StrPath,
    Tag,
    at_least,
    parse_choice,
    parse_tag,
    text_of,
)

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.attending.looks_result import AttentionResult
    from bertvision.pipelines.analysis.attending.pruning_result import PruningResult
    from bertvision.pipelines.analysis.attending.relations_result import RelationsResult


def attention(
    checkpoint: Tag,
    *,
    split: str = "dev",
    task: str | None = None,
    windows: int = 200,
    precision: PrecisionName = "auto",
    seed: int = 0,
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
) -> AttentionResult:
    """Measure what each attention head looks at: entropy, [SEP], neighbours; runs the encoder.

    A second call with the same settings, of the same weights, gives what was kept.

    Examples:
        >>> import bertvision
        >>> heads = bertvision.attention("1e", windows=3)
        >>> heads.values.shape  # (measures, layers, attention heads)
        (6, 2, 4)

    Args:
        checkpoint: snapshot.
        split: of the data.
        task: a data set that was added before; by default the workspace's own.
        windows: seeded sample of at most so many; 0 takes all.
        precision: arithmetic of the forward pass: auto, 32 or bf16.
        seed: of the sample.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: ``plot`` does not end in ``.svg``, or the family gives no attention.
    """
    tag = parse_tag(checkpoint)
    at_least(windows, 0, "--windows")
    parse_choice(precision, PRECISIONS, "--precision")

    def run(space: Workspace, figure: Path | None) -> AttentionResult:
        check_snapshots(space, [tag])
        from bertvision.pipelines.analysis.attending.run import attention as measure

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

    return analysed(
        *(run, (), ()), scheduler="threads", plot=plot, csv=csv, workspace=workspace, store=None
    )


def prune(
    checkpoint: Tag,
    *,
    split: str = "dev",
    items: int = 100,
    orders: int = 3,
    precision: PrecisionName = "auto",
    seed: int = 0,
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
) -> PruningResult:
    """Mask attention heads, one by one and then ever more, and see what the encoder loses.

    Runs for each attention head the layers from its own up, and the encoder 38 times for the
    curve, over half of the items each. A second call with the same settings, of the same weights,
    gives what was kept.

    Examples:
        >>> import bertvision
        >>> pruned = bertvision.prune("1e", items=4)
        >>> pruned.rise.shape  # (layers, attention heads)
        (2, 4)

    Args:
        checkpoint: snapshot, fine-tuned.
        split: of the workspace's own data.
        items: seeded sample: half of them order the heads, the other half is scored.
        orders: random orders beside that of importance.
        precision: arithmetic of the forward passes: auto, 32 or bf16.
        seed: of the sample and the orders.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, the family's attention heads cannot be
            masked, or the workspace has no task.
    """
    tag = parse_tag(checkpoint)
    at_least(items, 2, "--items")
    at_least(orders, 2, "--orders")
    parse_choice(precision, PRECISIONS, "--precision")

    def run(space: Workspace, figure: Path | None) -> PruningResult:
        check_snapshots(space, [tag])
        from bertvision.pipelines.analysis.attending.run import prune as measure

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

    return analysed(
        *(run, (), ()), scheduler="threads", plot=plot, csv=csv, workspace=workspace, store=None
    )


def relations(
    checkpoint: Tag,
    *,
    data: StrPath | None = None,
    split: str = "dev",
    sentences: int = 1_000,
    precision: PrecisionName = "auto",
    seed: int = 0,
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
) -> RelationsResult:
    """Find the attention heads that follow a dependency relation; runs the encoder.

    For each relation the best head is chosen on half of the sentences and scored on the others,
    beside the best fixed offset. ``data`` is needed the first time.

    Args:
        checkpoint: snapshot.
        data: a treebank in CoNLL-U, to be said once: a file or a folder.
        split: of the treebank.
        sentences: seeded sample of at most so many; 0 takes all.
        precision: arithmetic of the forward pass: auto, 32 or bf16.
        seed: of the sample and the bootstrap.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.

    Raises:
        UnknownNameError: there is no such snapshot, treebank or split.
        InputError: the treebank is malformed, or no relation has enough examples.
    """
    tag = parse_tag(checkpoint)
    at_least(sentences, 0, "--sentences")
    parse_choice(precision, PRECISIONS, "--precision")

    def run(space: Workspace, figure: Path | None) -> RelationsResult:
        check_snapshots(space, [tag])
        check_data(space.root, None, "treebank", text_of(data))
        from bertvision.pipelines.analysis.attending.run import relations as measure

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

    return analysed(
        *(run, (), ()), scheduler="threads", plot=plot, csv=csv, workspace=workspace, store=None
    )
