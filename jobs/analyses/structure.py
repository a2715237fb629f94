"""Structure: what of gold trees each layer holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import UnknownNameError
from bertvision.jobs.analyses.analysed import analysed
from bertvision.jobs.declare import DEFAULTS, FigurePath, StorePath, WorkspacePath, job
from bertvision.jobs.reading import Tags, parse_tags
from bertvision.pipelines.readouts.options import StructureOptions, treebank_splits
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.structure import StructureResult


@job
def structure(
    checkpoint: Tags,
    *,
    split: str = "treebank-test",
    options: StructureOptions = DEFAULTS,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> StructureResult:
    """Measure how much of gold syntax trees each layer holds.

    Structural probes and edge probing read a stored treebank with train and dev, which `bertvision
    extract --task treebank` stores. A second call with the same settings, of the same weights,
    gives what was kept.

    Args:
        checkpoint: Snapshots, such as 0e,1e; untrained has random weights.
        split: Split that is scored; probes are trained on train of the same treebank.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a split holds no trees.
        ProvenanceError: splits were not extracted alike; names what differs.
    """
    tags = parse_tags(checkpoint)

    def run(space: Workspace, figure: Path | None) -> StructureResult:
        from bertvision.pipelines.analysis.structure import structure as measure

        return measure(space, tags, split=split, options=options, plot=figure)

    try:
        return analysed(
            run,
            tags,
            treebank_splits(split),
            scheduler="threads",
            plot=plot,
            workspace=workspace,
            store=store,
        )
    except UnknownNameError as error:
        if f"no split {split!r}" not in str(error):
            raise
        raise UnknownNameError(
            f"{error}; a part that is stored is scored with --split, such as --split treebank-dev"
        ) from None
