"""What leaving the encoder early saves, and costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.reading import Names, StrPath, Tag, parse_names, parse_tag

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.exiting.exits_result import ExitsResult


def exits(
    checkpoint: Tag,
    *,
    split: str = "dev",
    criterion: Names | None = None,
    tolerance: float | None = None,
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> ExitsResult:
    """Measure the score against the layers used, where sure windows leave the encoder early.

    Stored hidden states go through the output layers of the snapshot, and every threshold of a
    criterion is followed in one pass; the encoder is not run. A second call with the same settings,
    of the same weights, gives what was kept.

    Args:
        checkpoint: snapshot that was fine-tuned with ``--variant exits:LAYERS`` or its kin.
        split: that is scored: ``dev`` or ``tune``.
        criterion: what decides where a window leaves: ``entropy``, ``probability``, ``patience``;
            several, with commas; None is all that fit the task.
        tolerance: scores that differ by less agree (regression); None is a tenth of the standard
            deviation of what the last layer gives.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot, or what its output layers read is not stored.
        InputError: the snapshot has no output layer below its last, a criterion does not fit the
            task, or ``plot`` does not end in ``.svg``.
        WorkspaceError: fine-tuning kept no answers of this split, or those of other weights.
    """
    tag = parse_tag(checkpoint)
    criteria = None if criterion is None else parse_names(criterion)

    def run(space: Workspace, figure: Path | None) -> ExitsResult:
        from bertvision.pipelines.analysis.exiting.run import exits as measure

        return measure(space, tag, split=split, criteria=criteria, tolerance=tolerance, plot=figure)

    return analysed(
        run,
        (),
        (),
        scheduler="threads",
        plot=plot,
        csv=csv,
        workspace=workspace,
        store=store,
    )
