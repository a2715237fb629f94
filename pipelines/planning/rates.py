"""How long work takes, as jobs of the same workspace have measured it; never a guess."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from bertvision.errors import BertvisionError
from bertvision.pipelines.precision import device
from bertvision.pipelines.records import Record, read_record
from bertvision.pipelines.stored_name import StoredName
from bertvision.pipelines.workspace.heads import trained_heads
from bertvision.pipelines.workspace.records import (
    ExtractionCosts,
    RunConfig,
    read_run_config,
    read_run_metrics,
)
from bertvision.pipelines.workspace.workspace import Workspace

R = TypeVar("R", bound=Record)


class Rate(NamedTuple):
    """What a unit of work took before."""

    seconds: float
    """For a window that is extracted, or a step of a head."""
    measured: str
    """The record that says so, as seen from the workspace."""


def extraction_rate(
    workspace: Workspace, name: str, *, precision: str, pooled_from: str | None
) -> Rate | None:
    """Seconds for a window of a stored split, as another extraction of its data set had them.

    Windows of one data set are about equally long, those of another are not: only what was
    extracted of the same one counts, with the same arithmetic and device, by the encoder or from
    stored tokens as this is to be, and all tokens or pooled like this.

    Args:
        workspace: with the records of extractions.
        name: of the split that is to be stored.
        precision: of the encoder.
        pooled_from: stored split that is to be pooled; None runs the encoder.

    Returns:
        The rate of the split of the same name, else of the largest extraction; None where there
        was none.
    """
    asked = StoredName.parse(name)

    def alike(found: ExtractionCosts) -> bool:
        other = StoredName.parse(found.split)
        return (
            found.examples_written > 0
            and (found.precision, found.device) == (precision, device().type)
            and (found.pooled_from is None) == (pooled_from is None)
            and (other.dataset, other.sites) == (asked.dataset, asked.sites)
            and (other.tokens == "all") == (asked.tokens == "all")
        )

    costs = _records(workspace.root.glob("extraction/*/*.json"), ExtractionCosts)
    held = [(path, found) for path, found in costs if alike(found)]
    if not held:
        return None
    path, found = max(held, key=lambda x: (x[1].split == name, x[1].examples_written))
    return Rate(found.seconds / found.examples_written, _seen(workspace, path))


def training_rate(workspace: Workspace, config: RunConfig) -> Rate | None:
    """Seconds for a step of a head, as another training of it had them.

    Only trainings of the same head on as many layers count, with the same batch size and
    arithmetic.

    Args:
        workspace: with trained heads.
        config: of the run that is to be trained.

    Returns:
        The rate of the longest training, with its share of what runs of a pass have in common; None
        where there was none.
    """
    best: tuple[int, Rate] | None = None
    for tag, name in trained_heads(workspace):
        folder = workspace.head_dir(tag, name)
        try:
            found, metrics = read_run_config(folder), read_run_metrics(folder)
        except BertvisionError:
            continue  # the commands that need it say what is wrong
        if _work(found) == _work(config) and metrics.steps > (best[0] if best else 0):
            seen = _seen(workspace, folder / "metrics.json")
            best = metrics.steps, Rate(metrics.own_seconds / metrics.steps, seen)
    return None if best is None else best[1]


def _work(run: RunConfig) -> tuple[object, ...]:
    """What decides how long a step of a run takes."""
    training = run.training
    return run.head, len(run.layers), run.hidden_size, training.batch_size, training.precision


def _records(paths: Iterable[Path], kind: type[R]) -> Iterator[tuple[Path, R]]:
    """Those that can be read."""
    for path in paths:
        try:
            yield path, read_record(path, kind, "")
        except BertvisionError:
            continue


def _seen(workspace: Workspace, path: Path) -> str:
    return path.relative_to(workspace.root).as_posix()
