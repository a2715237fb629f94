"""A plan of a job: what it would make, of which size and in which time, before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bertvision.errors import InputError, counted
from bertvision.jobs.extract import asked_extraction, tags_or_only
from bertvision.jobs.heads import asked_training
from bertvision.jobs.show import RowsField, ShownRecord, Values
from bertvision.jobs.sweep import asked_sweep, with_rates
from bertvision.pipelines.declare import bound
from bertvision.pipelines.reading import (
    Numbers,
    StoredName,
    StrPath,
)
from bertvision.pipelines.text import fill, format_table, size
from bertvision.pipelines.workspace.checks import find_workspace
from bertvision.pipelines.workspace.data import planned_data
from bertvision.pipelines.workspace.job_options import Source, TrainOptions

if TYPE_CHECKING:
    from bertvision.pipelines.planning import TrainingPlan


class DryRun(ShownRecord):
    """A plan of a job, nothing of which was done."""

    job: str
    """Name of the job."""
    rows: RowsField
    """A row for each split or head, with its ``state``: new, begun or there."""
    totals: dict[str, int | str | None]
    """Counts of the whole job; ``bytes_to_write`` and ``bytes_free`` of an extraction, the latter
    None where it is not known."""
    seconds: float | None
    """For what is to be done; None where a part of it was never measured in this workspace."""
    measured: list[str]
    """Records of the workspace that the seconds are from."""
    notes: list[str]
    """Sentences on the limits of the numbers."""

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return dry_run_table(values)


def dry_run(job: Callable[..., Any], *args: Any, **given: Any) -> DryRun:
    """Say what a job would do with these arguments, without doing it.

    Data are read and cut into windows, so that counts are exact; no weights are loaded, nothing is
    computed with them, nothing is written. Seconds are those that earlier jobs of the workspace
    have measured. What the job would refuse is refused here too.

    Examples:
        >>> import bertvision
        >>> plan = bertvision.dry_run(bertvision.extract, "0.5e", split="dev", pool="sep")
        >>> [(row.split, row.state, row.windows) for row in plan.rows]
        [('dev-sep', 'new', 24)]

    Args:
        job: ``extract``, ``train`` or ``sweep`` of bertvision.
        *args: Arguments of the job.
        **given: Arguments of the job, by keyword.

    Raises:
        InputError: Another job is given, or an argument is wrong.
        UnknownNameError: There is no such head, snapshot or split.
        WorkspaceError: There is no workspace, or something was made otherwise before.
        ProvenanceError: A split was begun from something else.
    """
    name = getattr(job, "__name__", str(job))
    if name not in PLANNED:
        raise InputError(f"dry_run plans {', '.join(PLANNED)}, not {name}")
    return DryRun(job=name, **PLANNED[name](**bound(job, args, given)))


def dry_run_table(plan: Values) -> str:
    """Rows, totals, time and notes of a plan."""
    columns = _EXTRACTION if plan["job"] == "extract" else _TRAINING
    rows = [[cell(row) for cell in columns.values()] for row in plan["rows"]]
    time = _time(plan)
    lines = [_extraction_line(plan) if plan["job"] == "extract" else _training_line(plan), time]
    return "\n\n".join(
        [format_table([*columns], rows), "\n".join(map(fill, [*lines, *plan["notes"]]))]
    )


_STATES = {"new": "to make", "begun": "to finish", "there": "there"}
_EXTRACTION: dict[str, Callable[[Values], str]] = {
    "split": lambda r: f"{r['tag']}/{r['split']}",
    "": lambda r: _STATES[r["state"]],
    "windows": lambda r: f"{r['windows']:,}",
    "tokens": lambda r: f"{r['tokens']:,}",
    "layers": lambda r: str(len(r["layers"])),
    "encoding": lambda r: r["encoding"],
    "shards to write": lambda r: f"{r['shards_to_write']:,} of {r['shards']:,}",
    "size": lambda r: size(r["bytes"]),
    "time": lambda r: duration(r["seconds"]),
}
_TRAINING: dict[str, Callable[[Values], str]] = {
    "head": lambda r: r["head"],
    "": lambda r: _STATES[r["state"]],
    "trained on": lambda r: r["trained_on"],
    "part of data": lambda r: f"{r['fraction']:.4g}",
    "seed": lambda r: str(r["seed"]),
    "parameters": lambda r: f"{r['parameters']:,}",
    "windows": lambda r: f"{r['examples']:,}",
    "steps": lambda r: f"{r['steps']:,}",
    "time": lambda r: duration(r["seconds"]),
}


def _extraction_line(plan: Values) -> str:
    totals = plan["totals"]
    free = totals["bytes_free"]
    left = "how much is free there is unknown" if free is None else f"{size(free)} are free there"
    return (
        f"To write: {counted(totals['splits_to_write'], 'split')}, "
        f"{counted(totals['shards_to_write'], 'shard')}, {size(totals['bytes_to_write'])} into "
        f"{totals['store']}; {left}."
    )


def _training_line(plan: Values) -> str:
    totals = plan["totals"]
    scored = totals["evaluations"]
    return (
        f"To train: {counted(totals['runs_to_train'], 'head')}, "
        f"{counted(totals['steps'], 'step')}, from {counted(totals['passes'], 'stream')} of the "
        "store"
        + (f"; to score: {counted(scored, 'pair')} of a head and a snapshot." if scored else ".")
    )


def _time(plan: Values) -> str:
    if plan["seconds"] is None:
        known = sum(row["seconds"] or 0 for row in plan["rows"])
        more = f"; {duration(known)} of it are known" if known else ""
        return f"Time: not known yet: not all of it was measured in this workspace{more}."
    if not plan["measured"]:
        return "Time: none, as nothing is left to do."
    from_ = plan["measured"]
    more = f" and {len(from_) - 3} more" if len(from_) > 3 else ""
    return f"Time: {duration(plan['seconds'])}, by what {', '.join(from_[:3])}{more} measured."


def duration(seconds: float | None) -> str:
    """Seconds as a person says them; None is not known.

    Examples:
        >>> duration(None), duration(0.0), duration(12.3), duration(754.0), duration(9000.0)
        ('-', '0 s', '12 s', '13 min', '2.5 h')
    """
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


Planned = Mapping[str, Any]
"""Fields of `DryRun`."""


def plan_extract(**given: Any) -> Planned:
    """Plan `extract`; arguments and errors are its own."""
    asked = asked_extraction(**given)
    space, dataset = planned_data(*asked.place, weights=False, **asked.settings)
    from bertvision.pipelines.extraction.extract import named_dataset
    from bertvision.pipelines.planning import plan_extraction

    named = named_dataset(asked.options)
    if dataset.name is None and named is not None:
        dataset = space.dataset(named)
    plan = plan_extraction(space, dataset, tags_or_only(space, asked.tags), asked.options)
    made = dict.fromkeys(row.tag for row in plan.splits if row.makes_snapshot)
    notes = [f"Snapshot {tag} is not there, and is made first." for tag in made]
    todo = [row for row in plan.splits if row.shards_to_write]
    needed = sum(row.bytes_to_write for row in todo)
    if todo and asked.options.compression != "none":
        notes.append(
            f"Sizes are those before {asked.options.compression}, which is not known to save."
        )
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


def plan_train(
    *,
    options: TrainOptions,
    overwrite: bool,
    devices: int,
    source: str,
    data_device: str | None,
    workspace: StrPath | None,
    store: StrPath | None,
    tensorboard: bool,
    logger: str | None,
    **given: Any,
) -> Planned:
    """Plan `train`; arguments and errors are its own.

    Raises:
        InputError: The source is not the store, or there is no such device.
    """
    if Source.parse(source).name != "store":
        raise InputError(
            f"--source {source}: --dry-run plans a training on what is stored; `bertvision plan` "
            "says what training costs with and without a store"
        )
    space = find_workspace(workspace, store)
    runs, tag = asked_training(space, options=options, **given)
    _check_device(data_device)
    from bertvision.pipelines.planning import plan_training

    return _training(plan_training(space, runs, tag, options, overwrite=overwrite), devices)


def plan_sweep(
    *,
    lr: Numbers | None,
    options: TrainOptions,
    split: str,
    devices: int,
    data_device: str | None,
    workspace: StrPath | None,
    store: StrPath | None,
    **given: Any,
) -> Planned:
    """Plan `sweep`; arguments and errors are its own."""
    space = find_workspace(workspace, store)
    options, rates = with_rates(options, lr, split)
    asked = asked_sweep(space, split=split, pool=options.pool, **given)
    _check_device(data_device)
    from bertvision.pipelines.planning import plan_sweep as run

    plan = run(space, **asked._asdict(), rates=rates, options=options, split=split)
    return _training(plan, devices)


def _check_device(name: str | None) -> None:
    if name is not None:
        from bertvision.featurestore.resident import find_device

        find_device(name)


def _training(plan: TrainingPlan, devices: int) -> Planned:
    todo = [row for row in plan.runs if row.state != "there"]
    notes = []
    if devices > 1:
        notes.append(f"The time is that of one process; {devices} share the heads out.")
    if plan.evaluations:
        notes.append("The time of scoring is not in it: no record says what a head costs there.")
    if any(row.state == "begun" for row in todo):
        notes.append(
            "An interrupted job resumes where it stopped; its time is given from the start."
        )
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
    values = list(seconds)
    known = [second for second in values if second is not None]
    return sum(known) if len(known) == len(values) else None


def _records(kinds: Iterable[str | None]) -> list[str]:
    """Each record once, in order."""
    return [record for record in dict.fromkeys(kinds) if record is not None]


PLANNED: dict[str, Callable[..., Planned]] = {
    "extract": plan_extract,
    "train": plan_train,
    "sweep": plan_sweep,
}
"""Jobs that can be planned, by name."""
