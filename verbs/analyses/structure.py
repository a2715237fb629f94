"""Structure: what of gold trees each layer holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import UnknownNameError
from bertvision.pipelines.analysis.structure.options import StructureOptions, treebank_splits
from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.options import chosen, takes
from bertvision.verbs.arguments.reading import StrPath, Tags, parse_tags

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.structure.result import StructureResult


@takes(StructureOptions)
def structure(
    checkpoint: Tags,
    *,
    split: str = "treebank-test",
    options: StructureOptions | None = None,
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
    **changes: Any,
) -> StructureResult:
    """Measure how much of gold trees each layer holds, by structural probes and edge probing.

    Reads a stored treebank (``bertvision extract --task treebank --data FOLDER``) with train and
    dev. A second call with the same settings, of the same weights, gives what was kept.

    Args:
        checkpoint: snapshots, such as ``0e,1e``; ``untrained`` has random weights.
        split: that is scored; probes are trained on train of the same treebank, chosen on dev.
        **changes: options of the job, by keyword.
        options: these in one object; what is given by keyword goes before it.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a split holds no trees.
        ProvenanceError: splits were not extracted alike; names what differs.
    """
    options = chosen(StructureOptions, options, changes)
    tags = parse_tags(checkpoint)

    def run(space: Workspace, figure: Path | None) -> StructureResult:
        from bertvision.pipelines.analysis.structure.run import structure as measure

        return measure(space, tags, split=split, options=options, plot=figure)

    try:
        return analysed(
            run,
            tags,
            treebank_splits(split),
            scheduler="threads",
            plot=plot,
            csv=csv,
            workspace=workspace,
            store=store,
        )
    except UnknownNameError as error:
        if f"no split {split!r}" not in str(error):
            raise
        raise UnknownNameError(
            f"{error}; a part that is stored is scored with --split, such as --split treebank-dev"
        ) from None
