"""Tables of probes: the best layers, layer × data set, means by what is asked for, controls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.poolings import POOLINGS, pooling_order
from bertvision.pipelines.readouts.probe_results import DOUBTFUL, ProbeFile, Row
from bertvision.pipelines.records import digest_of
from bertvision.pipelines.report.section import Table
from bertvision.pipelines.results.columns import Column, columns, grouped
from bertvision.pipelines.tasks.registry import TASKS
from bertvision.pipelines.text import signed

SOURCE = f"{ProbeFile.folder}/<data set>/<snapshot>-<pooling>-<settings>.json"
COMMAND = f"bertvision probe DATA… --checkpoint TAG,TAG --pool {','.join(POOLINGS)} --untrained"
CATEGORIES = {
    "surface": ("sentence_length", "word_content"),
    "syntactic": ("tree_depth", "top_constituents", "bigram_shift"),
    "semantic": (
        *("past_present", "subj_number", "obj_number"),
        *("odd_man_out", "coordination_inversion"),
    ),
}
"""Categories of the probing tasks of Conneau et al. 2018, in their order."""
_ALL = "all"
_WITH_GAINS = 13
"""Layers side by side with their gains; of more there is room for the accuracy alone."""


def probe_tables(rows: Sequence[Row]) -> list[Table]:
    """The tables of all probes, whatever their settings.

    Args:
        rows: Rows of `probe_rows`.
    """
    rows = [{**r, "mark": DOUBTFUL if r["doubts"] else ""} for r in rows]
    ordered = _in_order(rows)
    return [
        _best(ordered),
        _layers(single := [row for row in ordered if "+" not in row["layers"]]),
        *_means(single),
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
    poolings = sorted({r["pooling"] for r in rows}, key=pooling_order)
    lines: dict[tuple[str, str, str], Row] = {}
    for r in rows:
        line = lines.setdefault(
            (r["dataset"], r["settings"], r["tag"]), {key: r[key] for key in _KEYS}
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
    shown = [
        Column("tag", "snapshot", "text"),
        *_marks(lines),
        *columns("text", pooling="pooling", layers="layers"),
        Column("accuracy", "accuracy"),
        Column("difference", "− untrained", "signed"),
        Column("single", "best single layer"),
        Column("more", "difference", "signed"),
    ]
    title = "Probes of layers end to end, beside the best single layer"
    command = f"{COMMAND} --concat first+last"
    return [Table("probes_joined", title, shown, lines, SOURCE, command, group="dataset")]


def _controls(rows: Sequence[Row]) -> list[Table]:
    """Selectivity and description length of the best layers, where they were measured."""
    lines = [
        r for r in rows if r["best"] and (r["selectivity"] is not None or r["bits"] is not None)
    ]
    if not lines:
        return []
    shown = [
        Column("tag", "snapshot", "text"),
        *_marks(lines),
        *columns("text", pooling="pooling", layers="layer"),
        *columns(accuracy="accuracy", control="control task"),
        Column("selectivity", "selectivity", "signed"),
        *columns(memorised="control, memorised", unseen="unseen sentences (%)"),
        Column("bits", "code (bits)", digits=0),
        Column("compression", "compression", digits=2),
    ]
    title = "Control task and description length of the best layers"
    command = f"{COMMAND} --control --mdl"
    return [Table("probes_control", title, shown, lines, SOURCE, command, group="dataset")]


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
            SnapshotTag(r["tag"]),
            pooling_order(r["pooling"]),
        ),
    )


def _layers(rows: Sequence[Row]) -> Table:
    """A row for each data set and each category's mean, by snapshot, pooling and settings."""
    layers = sorted({int(row["layers"]) for row in rows})
    gain = len(layers) <= _WITH_GAINS
    lines: list[Row] = []
    for (tag, pooling, settings), rows_of in _by(rows, "tag", "pooling", "settings").items():
        group = f"{tag}, {pooling}-pooled{_which(rows, settings)}"
        place: Row = {"group": group, "tag": tag, "pooling": pooling, "settings": settings}
        by_data = _by(rows_of, "dataset")
        for (name,), own in by_data.items():
            line = place | {key: own[0][key] for key in ("mark", "data", "doubts")}
            line["best"] = next((row["layers"] for row in own if row["best"]), None)
            lines.append(line | {"name": name} | _cells([own], layers))
        for category, names in _categories(name for (name,) in by_data).items():
            sound = [
                own for (name,), own in by_data.items() if name in names and not own[0]["doubts"]
            ]
            if len(sound) > 1:
                name = f"mean of {category} ({len(sound)})"
                lines.append(place | {"name": name, "data": _data(sound)} | _cells(sound, layers))
    return Table(
        "probe_layers",
        "Probes: accuracy by layer (0: embeddings)"
        + ", in brackets its difference from untrained" * gain,
        [
            Column("name", "data set", "text"),
            *_marks(rows),
            Column("best", "best layer", "text"),
            *(Column(f"layer_{i}", str(i), gain=gain) for i in layers),
        ],
        lines,
        SOURCE,
        COMMAND,
        group="group",
        more=[
            *("tag", "pooling", "settings"),
            *(f"layer_{i}_difference" for i in layers if not gain),
            *(f"layer_{i}_{end}" for i in layers for end in ("low", "high")),
        ],
        basis=_basis(rows) + "; 95 % intervals over examples are in the files.",
    )


def _basis(rows: Sequence[Row]) -> str:
    """The number of examples that a probe is scored on, and that it was trained once."""
    scored = sorted({row["examples"] for row in rows})
    few = f"{scored[0]:,}" + (f" to {scored[-1]:,}" if len(scored) > 1 else "")
    return f"{few} scored examples of each data set, one seed"


def _cells(sets: Sequence[Sequence[Row]], layers: Sequence[int]) -> Row:
    """A cell for each layer: the mean over data sets that all have it."""
    cells: Row = {}
    for layer in layers:
        there = [row for own in sets for row in own if row["layers"] == str(layer)]
        if len(there) == len(sets):
            cells |= _mean(there, f"layer_{layer}")
            if len(there) == 1:
                cells |= {f"layer_{layer}_{end}": there[0][end] for end in ("low", "high")}
    return cells


def _means(rows: Sequence[Row]) -> list[Table]:
    """A row for each snapshot and category: of each pooling all layers, and the best one.

    They are of the data sets and the layers that every snapshot has with every pooling: else one
    would be compared with another by what it was probed on.
    """
    lines: list[Row] = []
    left_out: set[str] = set()
    partly: list[str] = []
    for (settings,), same in _by(rows, "settings").items():
        sound = [row for row in same if not row["doubts"]]
        sets = [{row["dataset"] for row in own} for own in _by(sound, "tag", "pooling").values()]
        shared = set.intersection(*sets) if sets else set()
        left_out |= {row["dataset"] for row in sound} - shared
        comparable = [row for row in sound if row["dataset"] in shared]
        layers, others = _layers_of_all(comparable)
        if others:
            kept_layers = f"the layers {_listed(layers)} alone" if layers else "no layer"
            partly.append(
                f"Shown: {kept_layers}{_which(rows, settings)}; not every snapshot and data set "
                f"was probed on {_listed(others)} with every pooling."
            )
        comparable = _best_marked([row for row in comparable if int(row["layers"]) in layers])
        for (tag,), own in _by(comparable, "tag").items():
            for category, names in _categories(row["dataset"] for row in own).items():
                members = [row for row in own if row["dataset"] in names]
                lines.append(
                    {
                        "group": f"{tag}{_which(rows, settings)}",
                        "name": category,
                        "sets": len(datasets := _by(members, "dataset")),
                        "datasets": [name for (name,) in datasets],
                        "layers": sorted(layers),
                        "data": _data(datasets.values()),
                        **{"tag": tag, "settings": settings},
                        **_by_pooling(members),
                    }
                )
    if not lines:
        return []
    poolings = sorted({row["pooling"] for row in rows}, key=pooling_order)
    cells = [f"{p}_{over}" for p in poolings for over in ("layers", "best")]
    told = "; ".join(f"{name}: {', '.join(names)}" for name, names in CATEGORIES.items())
    remarks = [f"Categories are those of Conneau et al. 2018: {told}."]
    remarks += partly
    if left_out:
        without = ", ".join(sorted(left_out))
        remarks.append(f"Without {without}: not probed at every snapshot with every pooling.")
    return [
        Table(
            "probe_means",
            "Probes: mean accuracy over data sets, of all layers and of the best one (on held-out "
            "examples), in brackets the difference from untrained",
            [
                Column("name", "category", "text"),
                Column("sets", "data sets", "count"),
                *(Column(cell, cell.replace("_", ", "), gain=True) for cell in cells),
            ],
            lines,
            SOURCE,
            COMMAND,
            group="group",
            more=["tag", "settings", "datasets", "layers"],
            basis=_basis(rows) + ".",
            remarks=remarks,
        )
    ]


def _layers_of_all(rows: Sequence[Row]) -> tuple[set[int], set[int]]:
    """The layers that every data set, snapshot and pooling was probed on, and all others."""
    probed = [
        {int(row["layers"]) for row in own}
        for own in _by(rows, "dataset", "tag", "pooling").values()
    ]
    shared = set.intersection(*probed) if probed else set()
    return shared, set().union(*probed) - shared


def _best_marked(rows: Sequence[Row]) -> list[Row]:
    """Rows with ``best`` set anew: of these layers the one of `best_layer`."""
    marked = []
    for own in _by(rows, "dataset", "tag", "pooling").values():
        best = max(own, key=lambda row: (row["held_out"], -int(row["layers"])))
        marked += [{**row, "best": row is best} for row in own]
    return marked


def _listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))


def _by_pooling(rows: Sequence[Row]) -> Row:
    """The mean over the layers of each data set, then over data sets; and that of best layers."""
    cells: Row = {}
    for (pooling,), own in _by(rows, "pooling").items():
        cells |= _mean(own, f"{pooling}_layers")
        cells |= _mean([row for row in own if row["best"]], f"{pooling}_best")
    return cells


def _mean(rows: Sequence[Row], key: str) -> Row:
    """The mean accuracy of rows, each data set with the same weight, and of differences if all."""
    sets = list(_by(rows, "dataset").values())

    def mean(field: str) -> float:
        return fmean(fmean(row[field] for row in own) for own in sets)

    gain = None if any(row["difference"] is None for row in rows) else mean("difference")
    return {key: mean("accuracy"), f"{key}_difference": gain}


def _categories(names: Iterable[str]) -> dict[str, list[str]]:
    """The names in each category that has some; all of them last, where that is more."""
    names = list(dict.fromkeys(names))
    members = {c: [name for name in names if name in some] for c, some in CATEGORIES.items()}
    members = {category: some for category, some in members.items() if some}
    return members if list(members.values()) == [names] else members | {_ALL: names}


def _by(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by some columns, snapshots in their order and poolings in theirs."""
    groups = grouped(rows, lambda row: tuple(row[key] for key in keys))

    def place(key: tuple[str, ...]) -> tuple[object, ...]:
        ranks: dict[str, Callable[[str], object]] = {
            "tag": SnapshotTag,
            "pooling": pooling_order,
        }
        return tuple(
            ranks[name](part) if name in ranks else part
            for name, part in zip(keys, key, strict=True)
        )

    order = sorted(groups, key=place) if keys[0] in ("tag", "pooling") else list(groups)
    return {key: groups[key] for key in order}


def _which(rows: Sequence[Row], settings: str) -> str:
    """A suffix that tells settings from others, where there are several."""
    kinds: Mapping[str, str] = {row["settings"]: row["probe"] for row in rows}
    return f", {kinds[settings]} ({settings[:6]})" if len(kinds) > 1 else ""


def _data(sets: Iterable[Sequence[Row]]) -> str:
    """A digest of the data that a mean is of."""
    return digest_of([[own[0]["dataset"], own[0]["data"]] for own in sets])[:12]
