"""One way for every analysis: take what is kept, or measure and keep it; draw it either way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import JsonValue

from bertvision.errors import WorkspaceError
from bertvision.featurestore.lazy import SplitSource
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.records import FOLDER, Analysis
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.drawing.figures import check_suffix
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)

R = TypeVar("R", bound=AnalysisResult)


class Job(NamedTuple):
    """An analysis that is asked for."""

    record: type[Analysis]
    """What it is kept as."""
    name: str
    """What its files are called, without suffix."""
    command: str
    """What makes it."""
    settings: Mapping[str, JsonValue]
    """What decides its result beside the splits; where it computes does not."""
    splits: Sequence[ActivationSplit]
    """What it reads."""


def kept_or_measured(
    workspace: Workspace,
    job: Job,
    kind: type[R],
    measure: Callable[[], R],
    plot: Path | None = None,
) -> R:
    """The result of a job: the one that is kept, where it is of the same settings and splits.

    Otherwise it is measured and kept in the place of what was there. It is drawn in both cases.

    Args:
        workspace: where it is kept, for its report.
        job: what is asked for.
        kind: class of the result.
        measure: makes it.
        plot: SVG file to write; by default beside the record.

    Raises:
        InputError: ``plot`` does not end in ``.svg``; before anything is read.
    """
    folder = workspace.root / FOLDER
    path, drawn = folder / f"{job.name}.json", plot or folder / f"{job.name}.svg"
    check_suffix(drawn)
    made = {
        "splits_sha256": {split.name: SplitSource.of(split).record_sha256 for split in job.splits},
        "settings": dict(job.settings),
    }
    result = _find(path, job, made, kind)
    if result is None:
        result = measure()
        weights = {
            str(split.tag): str(digest)
            for split in job.splits
            if (digest := split.record.provenance.get("weights_sha256")) is not None
        }
        folder.mkdir(exist_ok=True)
        values = {"weights_sha256": weights, "result": result.to_json(), **made}
        write_record(path, job.record(command=job.command, **values))
    result.figure().save(drawn)
    log.info("plot: %s", drawn)
    return result


def _find(path: Path, job: Job, made: Mapping[str, object], kind: type[R]) -> R | None:
    """What is kept, where it is the result of the same job."""
    if not path.exists():
        return None
    try:
        record = read_record(path, job.record, job.command)
    except WorkspaceError as error:
        log.warning("measured anew: %s", error)
        return None
    if any(getattr(record, field) != value for field, value in made.items()):
        return None
    log.info("as it was measured before, with the same settings and weights: %s", path)
    return kind.from_json(record.to_json()["result"])
