"""The jobs that can be planned: their arguments, read and checked as the verbs do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertvision.pipelines.stored_name import StoredName
from bertvision.pipelines.tasks.sentences.labelled_file import Columns
from bertvision.pipelines.workspace.heads import only_tag
from bertvision.pipelines.workspace.job_options import ExtractOptions, TrainOptions
from bertvision.verbs.arguments.checks import find_workspace
from bertvision.verbs.arguments.data import check_data, planned_data
from bertvision.verbs.arguments.options import chosen
from bertvision.verbs.arguments.reading import (
    Names,
    Numbers,
    StrPath,
    Tag,
    Tags,
    parse_tags,
    path_of,
    text_of,
)
from bertvision.verbs.extract import check_names
from bertvision.verbs.heads import asked_training
from bertvision.verbs.sweep import asked_sweep

if TYPE_CHECKING:
    from bertvision.pipelines.planning.training import TrainingPlan

Planned = Mapping[str, Any]
"""Fields of `DryRun`."""


def plan_extract(
    *,
    checkpoint: Tags | None,
    options: ExtractOptions | None,
    task: str | None,
    data: StrPath | None,
    model: StrPath | None,
    workspace: StrPath | None,
    store: StrPath | None,
    **given: Any,
) -> Planned:
    """What `extract` would do with these arguments.

    Raises:
        UnknownNameError: as of the verb, likewise InputError and ProvenanceError.
    """
    settings = {name: given.pop(name) for name in _OF_DATA}
    options = chosen(ExtractOptions, options, given)
    tags = None if checkpoint is None else parse_tags(checkpoint)
    root, source, encoder = path_of(workspace), text_of(data), text_of(model)
    columns = Columns(settings["text"] or "text", settings["pair"], settings["label"] or "label")
    check_names(options, tags, check_data(root, encoder, task, source, columns), task)
    space, dataset = planned_data(root, encoder, task, source, weights=False, **settings)
    if tags is None:
        tags = (only_tag(space.snapshots() or ["0e"], "snapshots"),)
    from bertvision.pipelines.extraction.extract import named_dataset
    from bertvision.pipelines.planning.extraction import plan_extraction

    named = named_dataset(options)
    if dataset.name is None and named is not None:
        dataset = space.dataset(named)
    options = replace(options, store=text_of(store) or options.store)
    plan = plan_extraction(space, dataset, tags, options)
    made = dict.fromkeys(row.tag for row in plan.splits if row.makes_snapshot)
    notes = [f"Snapshot {tag} is not there, and is made first." for tag in made]
    todo = [row for row in plan.splits if row.shards_to_write]
    needed = sum(row.bytes_to_write for row in todo)
    if todo and options.compression != "none":
        notes.append(f"Sizes are those before {options.compression}, which is not known to save.")
    if plan.free is not None and needed > plan.free:
        notes.append("The disk cannot hold it: free some space, or name another --store.")
    of_passes: dict[tuple[str, str, str | None], float | None] = {}
    for row in todo:  # what differs by its pooling alone is of one pass, whose time each row has
        key = row.tag, StoredName.parse(row.split).split, row.pooled_from
        times = row.seconds, of_passes.get(key, 0.0)
        known = [time for time in times if time is not None]
        of_passes[key] = max(known) if len(known) == len(times) else None
    return {
        "rows": [row._asdict() for row in plan.splits],
        "totals": {
            "splits_to_write": len(todo),
            "shards_to_write": sum(row.shards_to_write for row in todo),
            "windows": sum(row.windows for row in todo),
            "bytes_to_write": needed,
            "bytes_free": plan.free,
            "store": plan.store,
        },
        "seconds": _sum(of_passes.values()),
        "measured": _records(row.measured for row in plan.splits),
        "notes": notes,
    }


_OF_DATA = ("text", "pair", "label", "max_length", "windows", "date", "skip_bad")


def plan_train(
    *,
    heads: Names,
    checkpoint: Tag | None,
    options: TrainOptions | None,
    seed: int,
    fraction: float,
    overwrite: bool,
    devices: int,
    workspace: StrPath | None,
    store: StrPath | None,
    tensorboard: bool,
    logger: str | None,
    **changes: Any,
) -> Planned:
    """What `train` would do with these arguments.

    Raises:
        UnknownNameError: as of the verb, likewise WorkspaceError and IncompleteSplitError.
    """
    options = chosen(TrainOptions, options, changes)
    space = find_workspace(workspace, store)
    runs, tag = asked_training(space, heads, checkpoint, options, seed=seed, fraction=fraction)
    from bertvision.pipelines.planning.training import plan_training

    return _training(plan_training(space, runs, tag, options, overwrite=overwrite), devices)


def plan_sweep(
    *,
    heads: Names | None,
    trained_on: Tags | None,
    checkpoint: Tags | None,
    fractions: Numbers,
    seeds: int,
    options: TrainOptions | None,
    split: str,
    devices: int,
    workspace: StrPath | None,
    store: StrPath | None,
    **changes: Any,
) -> Planned:
    """What `sweep` would do with these arguments.

    Raises:
        UnknownNameError: as of the verb, likewise WorkspaceError and InputError.
    """
    options = chosen(TrainOptions, options, changes)
    space = find_workspace(workspace, store)
    asked = asked_sweep(space, heads, trained_on, checkpoint, fractions, seeds, split)
    from bertvision.pipelines.planning.training import plan_sweep as run

    return _training(run(space, **asked._asdict(), options=options, split=split), devices)


def _training(plan: TrainingPlan, devices: int) -> Planned:
    todo = [row for row in plan.runs if row.state != "there"]
    notes = []
    if devices > 1:
        notes.append(f"The time is that of one process; {devices} share the heads out.")
    if plan.evaluations:
        notes.append("The time of scoring is not in it: no record says what a head costs there.")
    if any(row.state == "begun" for row in todo):
        notes.append("What was begun goes on where it stopped; its time is given from the start.")
    return {
        "rows": [row._asdict() for row in plan.runs],
        "totals": {
            "runs_to_train": len(todo),
            "steps": sum(row.steps for row in todo),
            "parameters": sum(row.parameters for row in todo),
            "passes": plan.passes,
            "evaluations": plan.evaluations,
        },
        "seconds": _sum(row.seconds for row in todo),
        "measured": _records(row.measured for row in todo),
        "notes": notes,
    }


def _sum(seconds: Iterable[float | None]) -> float | None:
    """The sum; None where one is not known."""
    found = list(seconds)
    known = [second for second in found if second is not None]
    return sum(known) if len(known) == len(found) else None


def _records(found: Iterable[str | None]) -> list[str]:
    """Each record once, in order."""
    return [record for record in dict.fromkeys(found) if record is not None]
