"""Early exits from the encoder: savings and costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bertvision.jobs.analyses.analysed import analysed
from bertvision.jobs.declare import FigurePath, StorePath, WorkspacePath, job
from bertvision.jobs.reading import Names, Tag, parse_names, parse_tag
from bertvision.pipelines.options import Option
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.exits import ExitsResult


@job
def exits(
    checkpoint: Tag,
    *,
    split: str = "dev",
    criterion: Names | None = None,
    tolerance: Annotated[float | None, Option(ge=0)] = None,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> ExitsResult:
    """Measure what leaving the encoder early saves and costs.

    Windows that are sure leave early. Stored hidden states go through the output layers of the
    snapshot, and every threshold of a criterion is followed in one pass; the encoder is not run. A
    second call with the same settings, of the same weights, gives what was kept.

    Args:
        checkpoint: Snapshot that was fine-tuned with --variant exits:LAYERS.
        split: Split that is scored: dev or tune.
        criterion: What decides where a window leaves: entropy,probability,patience (default all).
        tolerance: Scores that differ by less agree (default a tenth of their standard deviation).

    Raises:
        UnknownNameError: there is no such snapshot, or what its output layers read is not stored.
        InputError: the snapshot has no output layer below its last, a criterion does not fit the
            task, or ``plot`` does not end in ``.svg``.
        WorkspaceError: fine-tuning kept no answers of this split, or those of other weights.
    """
    tag = parse_tag(checkpoint)
    criteria = None if criterion is None else parse_names(criterion)

    def run(space: Workspace, figure: Path | None) -> ExitsResult:
        from bertvision.pipelines.analysis.exits import run_exits as measure

        return measure(space, tag, split=split, criteria=criteria, tolerance=tolerance, plot=figure)

    return analysed(
        run,
        (),
        (),
        scheduler="threads",
        plot=plot,
        workspace=workspace,
        store=store,
    )
