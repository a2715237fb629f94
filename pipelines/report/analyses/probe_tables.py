"""Tables of probes: the best layers, layers end to end, control tasks."""

from __future__ import annotations

from collections.abc import Sequence

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.readouts.probe_results import DOUBTFUL, ProbeFile, Row
from bertvision.pipelines.report.analyses.probe_grid import grid_tables
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.registry import POOLINGS, TASKS
from bertvision.pipelines.text import signed

SOURCE = f"{ProbeFile.folder}/<data set>/<snapshot>-<pooling>-<settings>.json"
COMMAND = "bertvision probe DATA… --checkpoint TAG,TAG --pool cls,sep,mean,max --untrained"


def probe_tables(rows: Sequence[Row]) -> list[Table]:
    """The tables of all probes, whatever their settings.

    Args:
        rows: see `probe_rows`.
    """
    rows = [{**r, "mark": DOUBTFUL if r["doubts"] else ""} for r in rows]
    ordered = _in_order(rows)
    return [
        _best(ordered),
        *grid_tables(ordered, SOURCE, COMMAND),
        *_joined(ordered),
        *_controls(ordered),
    ]


def _marks(rows: Sequence[Row]) -> list[Column]:
    """The column of marks, where a data set is doubtful."""
    return [Column("mark", "note", "text")] if any(r["mark"] for r in rows) else []


def by_registry(names: set[str]) -> list[str]:
    """Data sets as the registry lists their tasks: probing tasks from surface to semantics."""
    known = [task for task in TASKS if task in names]
    return known + sorted(names.difference(known))


def _best(rows: Sequence[Row]) -> Table:
    """A row for each data set, snapshot and kind of probe, with the best layer of each pooling."""
    poolings = [p for p in POOLINGS if any(r["pooling"] == p for r in rows)]
    lines: dict[tuple[str, str, str], Row] = {}
    for r in rows:
        line = lines.setdefault(
            (r["dataset"], r["settings"], r["tag"]),
            {key: r[key] for key in _KEYS},
        )
        if r["best"]:
            gain = "" if r["difference"] is None else f" ({signed(r['difference'])})"
            p = r["pooling"]
            line[p] = f"{r['accuracy']:.1f}{gain} @{r['layers']}"
            line |= {f"{p}_{key}": r[key] for key in _DETAILS}
    return Table(
        "probes",
        "Probes: accuracy of the best layer (@ layer), in brackets its difference from untrained",
        [
            Column("tag", "snapshot", "text"),
            *_marks(rows),
            Column("probe", "probe", "text"),
            Column("majority", "majority"),
            Column("examples", "examples", "count"),
            *(Column(p, p, "text") for p in poolings),
        ],
        list(lines.values()),
        SOURCE,
        COMMAND,
        group="dataset",
        more=["settings", "doubts", *(f"{p}_{key}" for p in poolings for key in _DETAILS)],
    )


_KEYS = ("dataset", "tag", "mark", "probe", "majority", "examples", "settings", "doubts", "data")
_DETAILS = (
    "layers",
    "accuracy",
    "low",
    "high",
    "held_out",
    "difference",
    "difference_low",
    "difference_high",
)


def _joined(rows: Sequence[Row]) -> list[Table]:
    """Layers end to end beside the best single layer."""
    best = {_key(r): r["accuracy"] for r in rows if r["best"]}
    lines = [
        {**r, "single": best.get(_key(r)), "more": r["accuracy"] - best.get(_key(r), r["accuracy"])}
        for r in rows
        if "+" in r["layers"]
    ]
    if not lines:
        return []
    columns = [
        Column("tag", "snapshot", "text"),
        *_marks(lines),
        Column("pooling", "pooling", "text"),
        Column("layers", "layers", "text"),
        Column("accuracy", "accuracy"),
        Column("difference", "− untrained", "signed"),
        Column("single", "best single layer"),
        Column("more", "difference", "signed"),
    ]
    title = "Probes of layers end to end, beside the best single layer"
    command = f"{COMMAND} --concat first+last"
    return [Table("probes_joined", title, columns, lines, SOURCE, command, group="dataset")]


def _controls(rows: Sequence[Row]) -> list[Table]:
    """Selectivity and description length of the best layers, where they were measured."""
    lines = [
        r for r in rows if r["best"] and (r["selectivity"] is not None or r["bits"] is not None)
    ]
    if not lines:
        return []
    columns = [
        Column("tag", "snapshot", "text"),
        *_marks(lines),
        Column("pooling", "pooling", "text"),
        Column("layers", "layer", "text"),
        Column("accuracy", "accuracy"),
        Column("control", "control task"),
        Column("selectivity", "selectivity", "signed"),
        Column("memorised", "control, memorised"),
        Column("unseen", "unseen sentences (%)"),
        Column("bits", "code (bits)", digits=0),
        Column("compression", "compression", digits=2),
    ]
    title = "Control task and description length of the best layers"
    command = f"{COMMAND} --control --mdl"
    return [Table("probes_control", title, columns, lines, SOURCE, command, group="dataset")]


def _key(r: Row) -> tuple[str, str, str, str]:
    return r["dataset"], r["settings"], r["tag"], r["pooling"]


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by data set as the registry lists tasks, settings, snapshot and pooling."""
    place = {task: i for i, task in enumerate(by_registry({r["dataset"] for r in rows}))}
    return sorted(
        rows,
        key=lambda r: (
            place[r["dataset"]],
            r["settings"],
            SnapshotTag(r["tag"]).fraction,
            POOLINGS.index(r["pooling"]),
        ),
    )
