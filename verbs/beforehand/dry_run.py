"""What a job would make, in which size and time, before it does anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from bertvision.errors import InputError, counted
from bertvision.pipelines.text import fill, format_table, size
from bertvision.verbs.beforehand.jobs import plan_extract, plan_sweep, plan_train
from bertvision.verbs.rows import RowsField, ShownRecord
from bertvision.verbs.tables import Values


class DryRun(ShownRecord):
    """What a job would do; nothing of it was done."""

    job: str
    """Name of the verb."""
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
    """What the numbers do not say, in sentences."""

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return dry_run_table(values)


def dry_run(verb: Callable[..., Any], *args: Any, **given: Any) -> DryRun:
    """Say what a verb would do with these arguments, without doing it.

    Data are read and cut into windows, so that counts are exact; no weights are loaded, nothing is
    computed with them, nothing is written. Seconds are those that earlier jobs of the workspace
    have measured. What the verb would refuse is refused here too.

    Examples:
        >>> import bertvision
        >>> plan = bertvision.dry_run(bertvision.extract, "0.5e", split="dev", pool="sep")
        >>> [(row.split, row.state, row.windows) for row in plan.rows]
        [('dev-sep', 'new', 24)]

    Args:
        verb: ``extract``, ``train`` or ``sweep`` of bertvision.
        *args: of the verb.
        **given: likewise.

    Raises:
        InputError: another verb is given, or an argument is wrong.
        UnknownNameError: there is no such head, snapshot or split.
        WorkspaceError: there is no workspace, or something was made otherwise before.
        ProvenanceError: a split was begun from something else.
    """
    name = getattr(verb, "__name__", str(verb))
    if name not in _JOBS:
        raise InputError(f"dry_run plans {', '.join(_JOBS)}, not {name}")
    inspect.signature(verb).bind(*args, **given)  # which refuses what the verb does not take
    # options of a job stay as they were given: their defaults are those of their class
    bound = inspect.signature(inspect.unwrap(verb)).bind(*args, **given)
    bound.apply_defaults()
    changes = bound.arguments.pop("changes")
    return DryRun(job=name, **_JOBS[name](**bound.arguments, **changes))


_JOBS: dict[str, Callable[..., Mapping[str, Any]]] = {
    "extract": plan_extract,
    "train": plan_train,
    "sweep": plan_sweep,
}


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
