"""What a figure holds, without matplotlib: series with intervals, or a heat map.

Series run over an axis of numbers, such as layers, or are points in rows that have names. Both are
made from the rows that a result has anyway, in which ``KEY_low`` and ``KEY_high``, or ``KEY_sd``,
stand beside the value ``KEY``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # what only shows a table starts without numpy
    import numpy as np
    from numpy.typing import NDArray

LAYER = "layer (0: embedding output)"
"""What axes of layers are called."""
INTERVAL = "95 % interval"

Numbers = Sequence[float]
Row = Mapping[str, Any]


class Series(NamedTuple):
    """Values of one series; NaN is drawn as a gap."""

    places: Numbers
    """(points,) on the axis of places: layer numbers, or numbers of rows."""
    values: Numbers
    """(points,)"""
    low: Numbers | None = None
    """(points,) lower ends of intervals; NaN where a point has none."""
    high: Numbers | None = None
    """(points,) upper ends."""


@dataclass(frozen=True, eq=False)
class Curves:
    """Series beside each other, with level lines for what scores without learning."""

    of_places: str
    """Name of the axis of places."""
    of_values: str
    """Name of the values, with their unit."""
    series: Mapping[str, Series]
    levels: Mapping[str, float] = field(default_factory=dict)
    bars: str = ""
    """What the bars are; empty where there are none."""
    names: Sequence[str] = ()
    """Names of the rows; empty where places are numbers, and series lines over them."""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Values in rows and columns."""

    of_rows: str
    rows: Sequence[int]
    of_columns: str
    columns: Sequence[int]
    of_values: str
    """Name of the values, with their unit."""
    values: NDArray[np.floating[Any]]
    """(rows, columns); NaN is grey."""
    signed: bool = False
    """Whether values are differences: 0 is in the middle of the scale, which else is 0 to 1."""


Chart = Curves | HeatMap


def curves(
    rows: Sequence[Row],
    key: str,
    of_values: str,
    *,
    by: Sequence[str],
    places: str = "layer",
    of_places: str = LAYER,
    levels: Mapping[str, float | None] | None = None,
    over: str = "",
) -> Curves:
    """Lines over layers, or over another column of numbers, from rows.

    Args:
        rows: those without a place or without the key are left out.
        key: column of the values.
        of_values: their name with their unit.
        by: columns whose values tell series apart; those that do not vary are not in the legend.
        places: column of the places.
        of_places: its name.
        levels: level lines by name; None and NaN are left out.
        over: what a standard deviation is taken over, such as ``seeds``.
    """
    kept = [row for row in rows if row.get(places) is not None and key in row]
    shown = [name for name in by if len({row[name] for row in kept}) > 1]
    found: dict[str, list[Row]] = {}
    for row in kept:
        name = ", ".join(str(row[column]) for column in shown or by[:1])
        found.setdefault(name, []).append(row)
    series = {
        name: _series(sorted(of, key=lambda row: float(row[places])), key, places)
        for name, of in found.items()
    }
    return Curves(of_places, of_values, series, _known(levels), _bars(kept, key, over))


def points(
    rows: Sequence[Row],
    series: Mapping[str, str],
    of_values: str,
    *,
    name: str,
    of_places: str = "",
    levels: Mapping[str, float | None] | None = None,
    over: str = "",
) -> Curves:
    """Points in rows that have names, from rows.

    Args:
        rows: in their order from top to bottom.
        series: by name the column of its values, of the series beside each other; those of which no
            row has a value are left out.
        of_values: name of the values with their unit.
        name: column of the rows' names.
        of_places: what rows are; often plain from their names.
        levels: level lines by name; None and NaN are left out.
        over: what a standard deviation is taken over.
    """
    names = list(dict.fromkeys(str(row[name]) for row in rows))
    placed = [{**row, "": names.index(str(row[name]))} for row in rows]
    drawn = {
        title: _series(of, key, "")
        for title, key in series.items()
        if (of := [row for row in placed if row.get(key) is not None])
    }
    said = [text for key in series.values() if (text := _bars(rows, key, over))]
    return Curves(of_places, of_values, drawn, _known(levels), said[0] if said else "", names)


def _series(rows: Sequence[Row], key: str, places: str) -> Series:
    at, values = _column(rows, places), _column(rows, key)
    low, high = _column(rows, f"{key}_low"), _column(rows, f"{key}_high")
    if not any(map(math.isfinite, low)):
        sds = _column(rows, f"{key}_sd")
        low = [value - sd for value, sd in zip(values, sds, strict=True)]
        high = [value + sd for value, sd in zip(values, sds, strict=True)]
    if not any(map(math.isfinite, low)):
        return Series(at, values)
    return Series(at, values, low, high)


def _bars(rows: Sequence[Row], key: str, over: str) -> str:
    """What bars are, in words."""
    if any(row.get(f"{key}_low") is not None for row in rows):
        return INTERVAL
    if any(row.get(f"{key}_sd") is not None for row in rows):
        return "± standard deviation" + (f" over {over}" if over else "")
    return ""


def _column(rows: Sequence[Row], key: str) -> list[float]:
    values = [row.get(key) for row in rows]
    return [math.nan if value is None else float(value) for value in values]


def _known(levels: Mapping[str, float | None] | None) -> dict[str, float]:
    return {
        name: float(level)
        for name, level in (levels or {}).items()
        if level is not None and math.isfinite(level)
    }
