"""Charts of methods: their runs beside their mean, and a variant with ever other numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.plotting import Chart, Curves, Figure, Series, curves, figure, points
from bertvision.pipelines.repeats.spread import axis_of, name_of
from bertvision.pipelines.tasks.metrics import METRICS

SEEN = (
    "A row for each method: a point for each run, and their mean with its standard deviation; runs "
    "that are not right of the dotted line learned nothing."
)
"""The description of the figure of the runs."""
_BELOW = " Methods that are one variant with three numbers or more have a curve below."
FEWEST = 3
"""Numbers that make a curve."""

Row = Mapping[str, Any]


def spread_figure(row: Row) -> Figure:
    """The runs of all methods, and a curve for each variant with numbers.

    Args:
        row: Fields of `spread.spread`.
    """
    variants = numbered(row["rows"]).values()
    charts = [runs_chart(row), *(number_chart(row, rows) for rows in variants)]
    return figure(title_of(row), SEEN + _BELOW, charts)


def title_of(found: Row) -> str:
    """The title of the figure of the runs.

    Args:
        found: Fields of `spread.spread`.
    """
    runs = sum(row["runs"] for row in found["rows"])
    return f"{found['task']}, {name_of(found['metric'])} on dev of {runs:,} runs"


def spread_charts(found: Row) -> dict[str, Chart]:
    """Runs and means of methods; differences from the first; variants over their numbers.

    Args:
        found: Fields of `spread.spread`.
    """
    rows = found["rows"]
    charts: dict[str, Chart] = {"score": runs_chart(found)}
    if others := [row for row in rows if row["difference"] is not None]:
        charts["difference"] = points(
            others,
            {"difference": "difference"},
            f"{METRICS[found['metric']].label} less that of {rows[0]['method']} (points)",
            name="method",
            levels={"no difference": 0.0},
        )
    if variants := [row for same in numbered(rows).values() for row in same]:
        charts["by number"] = curves(
            variants,
            "score",
            axis_of(found["metric"]),
            by=("kind",),
            places="number",
            of_places="number of the variant",
            levels=_trivial(found),
            over="seeds",
        )
    return charts


def runs_chart(row: Row) -> Curves:
    """A row for each method: a point for each run, beside them their mean with its deviation.

    Args:
        row: Fields of `spread.spread`.
    """
    means = points(
        row["rows"],
        {"mean": "score"},
        axis_of(row["metric"]),
        name="method",
        levels=_trivial(row),
        over="seeds",
    )
    places = {name: float(i) for i, name in enumerate(means.names)}
    runs = _runs(row, places)
    reach = max(runs.values, default=0.0) - min(runs.values, default=0.0)
    beside = list(runs.places)
    for place in set(runs.places):
        own = [i for i, at in enumerate(runs.places) if at == place]
        for i, aside in zip(own, apart([runs.values[i] for i in own], 0.015 * reach), strict=True):
            beside[i] += aside
    series = {"run": runs._replace(places=beside), **means.series}
    return Curves("", means.of_values, series, means.levels, means.bars, means.names)


def apart(values: Sequence[float], near: float) -> list[float]:
    """Offsets from the middle of a row that keep points beside each other which would overlap.

    Args:
        values: Scores of the runs of one row.
        near: Difference below which points overlap.

    Returns:
        Offsets in rows, at most 0.2 to each side.
    """
    taken: list[tuple[float, int]] = []
    for value in values:
        used = {level for other, level in taken if abs(other - value) <= near}
        levels = (sign * n for n in range(len(used) + 1) for sign in (1, -1))
        taken.append((value, next(level for level in levels if level not in used)))
    most = max((abs(level) for _, level in taken), default=0)
    step = min(0.1, 0.2 / (most or 1))
    return [level * step for _, level in taken]


def numbered(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """By name of a variant the methods that are it with a number, and nothing else.

    Args:
        rows: Rows of methods, as `spread.spread` gives them.

    Returns:
        The rows with ``kind``, the name, and ``number``, in its order; of variants with three whole
        numbers at least, each once, so that nothing else tells the rows apart.
    """
    variants: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name, _, number = row["variant"][0].partition(":") if row["variant"] else ("", "", "")
        own = len(row["variant"]) == 1 and row["system"].startswith("bert:")
        if own and number.isdecimal():
            variants.setdefault(name, []).append({**row, "kind": name, "number": int(number)})
    return {
        name: sorted(same, key=lambda row: row["number"])
        for name, same in variants.items()
        if len({row["number"] for row in same}) == len(same) >= FEWEST
    }


def number_chart(found: Row, rows: Sequence[Row]) -> Curves:
    """A variant with ever other numbers: its runs and their means over the number.

    Args:
        found: Fields of `spread.spread`.
        rows: Rows of the variant, as `numbered` gives them.
    """
    ends = [rows[0]["number"], rows[-1]["number"]]
    numbers = [row["number"] for row in rows]
    places = {row["method"]: float(row["number"]) for row in rows}
    tips = [f"{row['method']}: {row['score']:.1f}" for row in rows]
    series = {
        "run": _runs(found, places),
        "mean": Series(numbers, [row["score"] for row in rows], tips=tips),
    }
    for row in found["rows"]:
        if not row["variant"] and row["system"].startswith("bert:"):
            name = f"{row['method']}: {row['score']:.1f}"
            series[name] = Series(ends, [row["score"]] * 2, look="dashed", tips=[name] * 2)
    axis = f"K of {rows[0]['kind']}:K"
    return Curves(axis, axis_of(found["metric"]), series, _trivial(found))


def _runs(row: Row, places: Mapping[str, float]) -> Series:
    runs = [run for run in row["runs"] if run["method"] in places]
    return Series(
        [places[run["method"]] for run in runs],
        [run["score"] for run in runs],
        look="faint",
        tips=[f"{run['method']}, seed {run['seed']}: {run['score']:.2f}" for run in runs],
    )


def _trivial(row: Row) -> dict[str, float]:
    level = row["baseline"] or 0.0
    return {f"{row['baseline_name']} ({level:.1f})": level}
