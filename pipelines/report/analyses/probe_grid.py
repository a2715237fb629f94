"""Tables of probes as papers have them: layer × data set, and means by what is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.readouts.probe_results import Row
from bertvision.pipelines.records import digest_of
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.registry import POOLINGS

CATEGORIES = {
    "surface": ("sentence_length", "word_content"),
    "syntactic": ("tree_depth", "top_constituents", "bigram_shift"),
    "semantic": (
        *("past_present", "subj_number", "obj_number"),
        *("odd_man_out", "coordination_inversion"),
    ),
}
"""What the probing tasks of Conneau et al. 2018 ask for, in their order."""
_ALL = "all"
_WITH_GAINS = 13
"""Layers side by side with their gains; of more there is room for the accuracy alone."""


def grid_tables(rows: Sequence[Row], source: str, command: str) -> list[Table]:
    """Layers side by side for each data set, and means over data sets of the same category.

    Args:
        rows: see `probe_rows`, in order, with ``mark``.
        source: the files they stand in.
        command: that makes them.
    """
    single = [row for row in rows if "+" not in row["layers"]]
    return [_layers(single, source, command), *_means(single, source, command)]


def _layers(rows: Sequence[Row], source: str, command: str) -> Table:
    """A row for each data set and each category's mean, by snapshot, pooling and settings."""
    layers = sorted({int(row["layers"]) for row in rows})
    gain = len(layers) <= _WITH_GAINS
    lines: list[Row] = []
    for (tag, pooling, settings), found in _by(rows, "tag", "pooling", "settings").items():
        group = f"{tag}, {pooling}-pooled{_which(rows, settings)}"
        place: Row = {"group": group, "tag": tag, "pooling": pooling, "settings": settings}
        of = _by(found, "dataset")
        for (name,), own in of.items():
            line = place | {key: own[0][key] for key in ("mark", "data", "doubts")}
            line["best"] = next((row["layers"] for row in own if row["best"]), None)
            lines.append(line | {"name": name} | _cells([own], layers))
        for category, names in _categories(name for (name,) in of).items():
            sound = [own for (name,), own in of.items() if name in names and not own[0]["doubts"]]
            if len(sound) > 1:
                name = f"mean of {category} ({len(sound)})"
                lines.append(place | {"name": name, "data": _data(sound)} | _cells(sound, layers))
    return Table(
        "probe_layers",
        "Probes: accuracy by layer (0: embeddings)"
        + ", in brackets its difference from untrained" * gain,
        [
            Column("name", "data set", "text"),
            *([Column("mark", "note", "text")] if any(row["mark"] for row in rows) else []),
            Column("best", "best layer", "text"),
            *(Column(f"layer_{i}", str(i), gain=gain) for i in layers),
        ],
        lines,
        source,
        command,
        group="group",
        more=[
            *("tag", "pooling", "settings"),
            *(f"layer_{i}_difference" for i in layers if not gain),
            *(f"layer_{i}_{end}" for i in layers for end in ("low", "high")),
        ],
        basis=_basis(rows) + "; 95 % intervals over examples are in the files.",
    )


def _basis(rows: Sequence[Row]) -> str:
    """How many examples a probe is scored on, and that it was trained once."""
    scored = sorted({row["examples"] for row in rows})
    few = f"{scored[0]:,}" + (f" to {scored[-1]:,}" if len(scored) > 1 else "")
    return f"{few} scored examples of each data set, one seed"


def _cells(found: Sequence[Sequence[Row]], layers: Sequence[int]) -> Row:
    """A cell for each layer: the mean over data sets that all have it."""
    cells: Row = {}
    for layer in layers:
        there = [row for own in found for row in own if row["layers"] == str(layer)]
        if len(there) == len(found):
            cells |= _mean(there, f"layer_{layer}")
            if len(there) == 1:
                cells |= {f"layer_{layer}_{end}": there[0][end] for end in ("low", "high")}
    return cells


def _means(rows: Sequence[Row], source: str, command: str) -> list[Table]:
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
        kept = [row for row in sound if row["dataset"] in shared]
        layers, others = _layers_of_all(kept)
        if others:
            kept_layers = f"the layers {_listed(layers)} alone" if layers else "no layer"
            partly.append(
                f"Of {kept_layers}{_which(rows, settings)}: not every snapshot and data set was "
                f"probed on {_listed(others)} with every pooling."
            )
        kept = _best_marked([row for row in kept if int(row["layers"]) in layers])
        for (tag,), own in _by(kept, "tag").items():
            for category, names in _categories(row["dataset"] for row in own).items():
                of = [row for row in own if row["dataset"] in names]
                lines.append(
                    {
                        "group": f"{tag}{_which(rows, settings)}",
                        "name": category,
                        "sets": len(datasets := _by(of, "dataset")),
                        "datasets": [name for (name,) in datasets],
                        "layers": sorted(layers),
                        "data": _data(datasets.values()),
                        **{"tag": tag, "settings": settings},
                        **_by_pooling(of),
                    }
                )
    if not lines:
        return []
    poolings = [p for p in POOLINGS if any(row["pooling"] == p for row in rows)]
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
            source,
            command,
            group="group",
            more=["tag", "settings", "datasets", "layers"],
            basis=_basis(rows) + ".",
            remarks=remarks,
        )
    ]


def _layers_of_all(rows: Sequence[Row]) -> tuple[set[int], set[int]]:
    """The layers that every data set, snapshot and pooling was probed on, and all others."""
    found = [
        {int(row["layers"]) for row in own}
        for own in _by(rows, "dataset", "tag", "pooling").values()
    ]
    shared = set.intersection(*found) if found else set()
    return shared, set().union(*found) - shared


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
    found = {c: [name for name in names if name in of] for c, of in CATEGORIES.items()}
    found = {category: of for category, of in found.items() if of}
    return found if list(found.values()) == [names] else found | {_ALL: names}


def _by(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    order = sorted(found, key=_place) if keys[0] in ("tag", "pooling") else list(found)
    return {key: found[key] for key in order}


def _place(key: tuple[str, ...]) -> tuple[object, ...]:
    """Snapshots in their order, poolings in theirs."""
    return tuple(
        POOLINGS.index(part) if part in POOLINGS else SnapshotTag(part).fraction if i == 0 else part
        for i, part in enumerate(key)
    )


def _which(rows: Sequence[Row], settings: str) -> str:
    """What tells settings from others, where there are several."""
    kinds: Mapping[str, str] = {row["settings"]: row["probe"] for row in rows}
    return f", {kinds[settings]} ({settings[:6]})" if len(kinds) > 1 else ""


def _data(found: Iterable[Sequence[Row]]) -> str:
    """A digest of the data that a mean is of."""
    return digest_of([[own[0]["dataset"], own[0]["data"]] for own in found])[:12]
