"""Charts: how a result declares them, and how they are drawn, on matplotlib axes or as SVG.

A chart holds series over an axis of numbers, points in rows that have names, stacked bars or a heat
map. Results and sections of the report declare theirs here; `draw` puts one on axes of a paper,
`panels` makes SVG for a page and `figure` a file of it. matplotlib is imported when something is
drawn. SVG has no ground of its own and no fonts; what is black on paper has the colour of the text
around it, so that it can be read on a dark page too.
"""

from __future__ import annotations

import io
import math
import os
import textwrap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from bertvision.errors import InputError, UnknownNameError, did_you_mean
from bertvision.pipelines.files import write_text

if TYPE_CHECKING:  # what only shows a table starts without numpy
    import matplotlib.figure
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

LAYER = "layer (0: embedding output)"
"""Name of an axis of layers."""
INTERVAL = "95 % interval"
MOST_PANELS = 6
"""Charts in one figure of the report, so that it fits a printed page."""
# Okabe and Ito (2008), between light and dark so that both grounds show them
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b05a8e", "#b98300", "#2f8fc4", "#6a6f78", "#7a4fb5")
SERIES = len(COLOURS)
"""Series that differ in colour; a ninth looks like the first."""
_SHAPES = "osD^vP"
_GREY = "#6a6f78"
_PANEL, _SINGLE, FULL, _PAGE, _GAP = 392, 560, 720, 800, 16
"""Widths in px: of one of several panels, of a chart alone, of rows, of a page, between panels."""
_MAP, _CELL, _NUMBERED, _TICKS = 440, 34.0, 31.0, 13
"""The largest side of a heat map and of its cells, the least side of a cell with a number, all in
px, and how many layers or attention heads are named at most."""

_LARGEST = 1e100
"""Size from which a number is not drawn."""

Numbers = Sequence[float]
Row = Mapping[str, Any]
Look = Literal["line", "dashed", "points", "faint"]


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
    look: Look = "line"
    """Whether points are joined; ``faint`` ones are small and grey."""
    tips: Sequence[str] = ()
    """(points,) texts where the pointer rests; empty for the name and the numbers."""
    labels: Sequence[str] = ()
    """(points,) texts beside the points, where there is room."""


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
    """Meaning of the bars; empty where there are none."""
    names: Sequence[str] = ()
    """Names of the rows; empty where places are numbers, and series lines over them."""
    title: str = ""
    """Heading, where it stands beside others."""
    log: bool = False
    """Whether the axis of places is logarithmic."""
    span: tuple[float, float] | None = None
    """Ends of the axis of values; None fits them."""
    joined: bool = False
    """Whether the points of a row lie on one line, which joins them."""


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Values in rows and columns: rows of numbers upwards from the bottom, of names downwards."""

    of_rows: str
    rows: Sequence[int] | Sequence[str]
    of_columns: str
    columns: Sequence[int] | Sequence[str]
    of_values: str
    """Name of the values, with their unit."""
    values: NDArray[np.floating[Any]]
    """(rows, columns); NaN is grey."""
    signed: bool = False
    """Whether values are differences: 0 is in the middle of the scale, which else is 0 to 1."""
    title: str = ""
    missing: str = "no value"
    """Meaning of NaN."""
    texts: Sequence[Sequence[str]] | None = None
    """(rows, columns) texts of the cells; None for the numbers, where there is room."""
    tips: Sequence[Sequence[str]] | None = None
    """(rows, columns) texts where the pointer rests."""
    framed: Sequence[tuple[int, int]] = ()
    """Cells with a frame."""
    largest: float | None = None
    """End of the scale of differences; None fits the values."""
    cell: tuple[float, float] = (_CELL, _CELL)
    """Width and height of a cell at most, px."""


@dataclass(frozen=True, eq=False)
class Bars:
    """A stacked bar for each row."""

    of_values: str
    names: Sequence[str]
    parts: Mapping[str, Numbers]
    """By name of the part (rows,) lengths; NaN is left out."""
    totals: Sequence[str]
    """(rows,) texts behind the bars."""
    tips: Mapping[str, Sequence[str]]
    """By name of the part (rows,) texts where the pointer rests."""
    title: str = ""


Chart = Curves | HeatMap | Bars


class Plotted(ABC):
    """Base of results that are drawn on matplotlib axes."""

    @abstractmethod
    def charts(self) -> Mapping[str, Chart]:
        """The charts by the name of their measure; the first is drawn by default."""

    def plot(self, ax: Axes | None = None, *, measure: str | None = None) -> Axes:
        """Draw one measure on matplotlib axes, with intervals where the result has them.

        Drawn on axes that hold another result's series, these stand beside them in the next
        colours.

        Args:
            ax: Axes to draw on; by default those of a new figure.
            measure: Name of one of `charts`; by default the first.

        Returns:
            The axes, to be changed further; ``ax.figure.savefig`` writes a PDF or PNG.

        Raises:
            UnknownNameError: the result has no such measure; names those it has.
            InputError: there is nothing to be drawn.
        """
        charts = self.charts()
        if not charts:
            raise InputError("nothing can be drawn: the result has no rows, or no scores in them")
        name = next(iter(charts)) if measure is None else measure
        if name not in charts:
            hint = did_you_mean(name, charts)
            raise UnknownNameError(f"measure {name!r}: {hint}there are {', '.join(charts)}")
        if ax is None:
            import matplotlib.pyplot as plt  # whose figures a notebook shows

            ax = plt.subplots(layout="constrained")[1]
        draw(charts[name], ax)
        _name_series(ax, charts[name])
        return ax


class Figure(str):
    """The text of an SVG file, which a notebook shows as a figure."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file; folders are made where they are missing.

        Raises:
            InputError: the path does not end in ``.svg``.
        """
        file = Path(path)
        check_suffix(file)
        write_text(file, self)


def check_suffix(path: Path) -> None:
    """Refuse a file that is not to be SVG.

    Raises:
        InputError: its name does not end in ``.svg``.
    """
    if path.suffix.lower() != ".svg":
        ends = f"ends in '{path.suffix}'" if path.suffix else "has no suffix"
        raise InputError(
            f"the plot {path} {ends}, and figures are written as SVG alone: give a file that ends "
            f"in .svg, such as {path.stem or 'figure'}.svg"
        )


# --- charts from rows -----------------------------------------------------------------------------


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
    title: str = "",
    names: Sequence[str] = (),
    looks: Mapping[str, Look] | None = None,
    tip: Callable[[Row], str] | None = None,
) -> Curves:
    """Lines over layers, or over another column of numbers, from rows.

    ``KEY_low`` and ``KEY_high``, or ``KEY_sd``, stand beside the value ``KEY`` of a row.

    Args:
        rows: Rows of a result; those without a place or without the key are left out.
        key: Column of the values.
        of_values: Name of the values with their unit.
        by: Columns whose values tell series apart; those that do not vary are not in the legend.
        places: Column of the places.
        of_places: Name of the axis of places.
        levels: Level lines by name; None and NaN are left out.
        over: Sample of a standard deviation, such as ``seeds``; it goes before an interval.
        title: Heading of the chart, where it stands beside others.
        names: Values of the first of ``by`` that have series, in order, so that panels give a
            series the same colour; without it all, in the order in which they come.
        looks: Looks of series other than lines, by name.
        tip: Text where the pointer rests on the point of a row.
    """
    shown = [row for row in rows if row.get(places) is not None and key in row]
    varying = [name for name in by if len({row[name] for row in shown}) > 1 and not names]
    by_name: dict[str, list[Row]] = {str(name): [] for name in names}
    for row in shown:
        name = ", ".join(str(row[column]) for column in varying or by[:1])
        if not names or name in by_name:
            by_name.setdefault(name, []).append(row)
    series = {}
    for name, own in by_name.items():
        ordered = sorted(own, key=lambda row: float(row[places]))
        made = _series(ordered, key, places, over)
        look: Look = (looks or {}).get(name, "line")
        series[name] = made._replace(look=look, tips=[tip(row) for row in ordered] if tip else ())
    bars = _ends(shown, key, over)[2]
    return Curves(of_places, of_values, series, _known(levels), bars, title=title)


def points(
    rows: Sequence[Row],
    series: Mapping[str, str],
    of_values: str,
    *,
    name: str,
    of_places: str = "",
    levels: Mapping[str, float | None] | None = None,
    over: str = "",
    title: str = "",
) -> Curves:
    """Points in rows that have names, from rows.

    Args:
        rows: Rows of a result, in their order from top to bottom.
        series: Columns of the values by the name of their series; a series of which no row has a
            value is left out.
        of_values: Name of the values with their unit.
        name: Column of the rows' names.
        of_places: Name of the axis of rows; often plain from their names.
        levels: Level lines by name; None and NaN are left out.
        over: Sample of a standard deviation; it goes before an interval.
        title: Heading of the chart, where it stands beside others.
    """
    names = list(dict.fromkeys(str(row[name]) for row in rows))
    placed = [{**row, "": names.index(str(row[name]))} for row in rows]
    drawn = {
        label: _series(own, key, "", over)._replace(look="points")
        for label, key in series.items()
        if (own := [row for row in placed if row.get(key) is not None])
    }
    bars = next((text for key in series.values() if (text := _ends(rows, key, over)[2])), "")
    return Curves(of_places, of_values, drawn, _known(levels), bars, names, title)


def _series(rows: Sequence[Row], key: str, places: str, over: str) -> Series:
    """A series of a column of rows, with its intervals or deviations."""
    low, high, _ = _ends(rows, key, over)
    return Series(_column(rows, places), _column(rows, key), low, high)


def _ends(rows: Sequence[Row], key: str, over: str) -> tuple[Numbers | None, Numbers | None, str]:
    """The lower and upper ends of bars, and their meaning; None where there are none."""
    values, sds = _column(rows, key), _column(rows, f"{key}_sd")
    ends = _column(rows, f"{key}_low"), _column(rows, f"{key}_high")
    deviates, has_ends = (any(map(math.isfinite, numbers)) for numbers in (sds, ends[0]))
    if has_ends and not (over and deviates):
        return *ends, INTERVAL
    if not deviates:
        return None, None, ""
    low, high = (
        [value + side * sd for value, sd in zip(values, sds, strict=True)] for side in (-1, 1)
    )
    return low, high, "± standard deviation" + (f" over {over}" if over else "")


def _column(rows: Sequence[Row], key: str) -> list[float]:
    values = [row.get(key) for row in rows]
    return [math.nan if value is None else float(value) for value in values]


def _known(levels: Mapping[str, float | None] | None) -> dict[str, float]:
    return {
        name: float(level)
        for name, level in (levels or {}).items()
        if level is not None and math.isfinite(level)
    }


# --- on axes --------------------------------------------------------------------------------------

Tips = dict[str, Sequence[str]]
"""By the group of an artist in the SVG, a text for each of its marks."""


def draw(chart: Chart, ax: Axes) -> Tips:
    """Draw a chart on axes, without a legend.

    Args:
        chart: Chart to be drawn.
        ax: Axes to draw on.

    Returns:
        Texts where the pointer rests.

    Raises:
        InputError: the axes have rows of another result.
    """
    if isinstance(chart, HeatMap):
        return _draw_map(ax, chart)
    if isinstance(chart, Bars):
        return _draw_bars(ax, chart)
    return _draw_curves(ax, chart)


def _draw_curves(ax: Axes, chart: Curves) -> Tips:
    import numpy as np

    first = len(ax.containers)  # series of other results that are on these axes
    if chart.names and first:
        raise InputError(
            "these axes have rows of another result, whose names would be lost: draw on axes of "
            "their own, such as those of `plt.subplots(1, 2)`"
        )
    tips: Tips = {}
    for i, (name, series) in enumerate(chart.series.items()):
        if not len(series.values):
            continue  # it keeps its colour in the panels where it has points
        aside = 0.0
        if chart.names and not chart.joined:  # points of a row stand beside each other
            aside = 0.5 * ((i + 0.5) / len(chart.series) - 0.5)
        _draw_series(ax, chart, name, series, first + i, aside)
        tips[f"series-{first + i}"] = list(_tips(chart, name, series))
    for row in range(len(chart.names)) if chart.joined else ():
        ends = [
            value
            for series in chart.series.values()
            for place, value in zip(series.places, series.values, strict=True)
            if place == row
        ]
        if ends:
            ax.hlines(row, min(ends), max(ends), color=_GREY, linewidth=1, zorder=1)
    there = [(str(line.get_label()), list(np.ravel(line.get_ydata()))) for line in ax.get_lines()]
    level_line = ax.axvline if chart.names else ax.axhline
    for k, (name, level) in enumerate(chart.levels.items()):
        if (name, [level, level]) not in there and abs(level) < _LARGEST:
            dots = (":", "--", "-.")[k % 3]
            style: dict[str, Any] = {"color": "black", "alpha": 0.7, "linewidth": 1.5, "zorder": 1}
            level_line(level, linestyle=dots, label=name, **style)
    if chart.names:
        ax.set(xlabel=chart.of_values, ylabel=chart.of_places)
        ax.set_yticks(range(len(chart.names)), chart.names)
        ax.set_ylim(len(chart.names) - 0.5, -0.5)
    else:
        _scale_places(ax, chart)
    if chart.span is not None:
        air = 0.02 * (chart.span[1] - chart.span[0])  # for the marks at the ends
        (ax.set_xlim if chart.names else ax.set_ylim)(chart.span[0] - air, chart.span[1] + air)
    _plain_frame(ax, "x" if chart.names else "y")
    return tips


def _plain_frame(ax: Axes, across: Literal["x", "y"]) -> None:
    """Grid lines of one axis, and no box."""
    ax.grid(axis=across, color="0.5", alpha=0.25, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _scale_places(ax: Axes, chart: Curves) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    ax.set(xlabel=chart.of_places, ylabel=chart.of_values)
    if chart.log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    elif chart.of_places == LAYER or all(
        float(place).is_integer() for series in chart.series.values() for place in series.places
    ):
        ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    low, high = ax.get_ylim()
    if high - low < 1e-8:  # what rounding leaves of nothing has no scale
        ax.set_ylim(low - 0.5, high + 0.5)


def _draw_series(
    ax: Axes, chart: Curves, name: str, series: Series, number: int, aside: float
) -> None:
    import numpy as np

    faint, dashed = series.look == "faint", series.look == "dashed"
    joined = (dashed or series.look == "line") and not chart.names
    style: dict[str, Any] = {
        "marker": "o" if faint else _SHAPES[number % len(_SHAPES)],
        # where points lie on each other, the first shows around the second
        "markersize": 8 if chart.joined and not number else 4 if faint or dashed else 5,
        "linewidth": 1.5 if joined else 0,
        "linestyle": "--" if dashed else "-",
        "elinewidth": 1,
        "capsize": 2,
        "color": _GREY if faint else COLOURS[number % SERIES],
        "alpha": 0.55 if faint else None,
        "label": name,
        "zorder": 1.5 if faint else 2,
    }
    bars, values = None, _drawable(series.values)
    if series.low is not None and series.high is not None:
        # the mean of resamples may lie outside of what is drawn by a last bit
        below, above = values - _drawable(series.low), _drawable(series.high) - values
        bars = np.maximum(np.stack([below, above]), 0)
    places = _drawable(series.places) + aside
    if chart.names:
        drawn = ax.errorbar(values, places, xerr=bars, **style)
    else:
        drawn = ax.errorbar(places, values, yerr=bars, **style)
    drawn[0].set_gid(f"series-{number}")


def _drawable(values: Numbers | NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Numbers with gaps for those that no axis holds, which only damaged files have."""
    import numpy as np

    numbers = np.array(values, np.float64)
    return np.where(np.abs(numbers) < _LARGEST, numbers, np.nan)


def _tips(chart: Curves, name: str, series: Series) -> Iterator[str]:
    """A text for each point that is drawn."""
    of_places = chart.of_places.partition(" (")[0]
    for i, (place, value) in enumerate(zip(series.places, series.values, strict=True)):
        if not abs(value) < _LARGEST:  # nor NaN
            continue
        if series.tips:
            yield series.tips[i]
            continue
        where = chart.names[round(place)] if chart.names else f"{of_places} {place:g}"
        ends = ""
        if series.low is not None and series.high is not None and math.isfinite(series.low[i]):
            ends = f" [{series.low[i]:.4g}, {series.high[i]:.4g}]"
        text = f"{where}: {value:.4g}" if chart.names else f"{where}, {value:.4g}"
        yield f"{name}{', ' if chart.names else ': '}{text}{ends}"


def _draw_map(ax: Axes, chart: HeatMap) -> Tips:
    import numpy as np
    from matplotlib.patches import Rectangle

    values, largest = _drawable(chart.values), 1.0
    if chart.signed:
        finite = np.abs(values[np.isfinite(values)])
        largest = chart.largest or (float(finite.max()) if finite.size and finite.any() else 1.0)
    texts = _cell_texts(chart)
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=_colours(chart.signed, 0.58 if texts else 0.96),
        vmin=-largest if chart.signed else 0.0,
        vmax=largest,
        edgecolors="none",
    )
    mesh.set_gid("cells")
    for i, j in chart.framed:
        ax.add_patch(Rectangle((j + 0.04, i + 0.04), 0.92, 0.92, fill=False, edgecolor=_GREY, lw=2))
    for (i, j), text in np.ndenumerate(np.array(texts)) if texts else ():
        small = "small" if "\n" in text or chart.cell[0] < 40 else "medium"
        ax.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=small, linespacing=1.05)
    names_on_top = bool(chart.rows) and isinstance(chart.rows[0], str)
    grey = "" if np.isfinite(chart.values).all() else f"\ngrey: {chart.missing}"
    ax.set(xlabel=chart.of_columns + grey, ylabel=chart.of_rows)
    for names, set_ticks in ((chart.columns, ax.set_xticks), (chart.rows, ax.set_yticks)):
        step = 1 if isinstance(names[0], str) else math.ceil(len(names) / _TICKS)
        set_ticks([k + 0.5 for k in range(0, len(names), step)], [str(n) for n in names[::step]])
    if names_on_top:
        ax.invert_yaxis()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(mesh, ax=ax, label=chart.of_values)
    bar.outline.set_visible(False)
    return {"cells": [tip for row in chart.tips for tip in row] if chart.tips else _at_cells(chart)}


def _cell_texts(chart: HeatMap) -> Sequence[Sequence[str]]:
    """The texts of cells; empty where there is no room."""
    if chart.texts is not None:
        return chart.texts
    if min(_side(chart), *chart.cell) < _NUMBERED or chart.signed:
        return ()
    return [
        [f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "" for value in row]
        for row in (_drawable(chart.values).round(2) + 0.0)
    ]


def _side(chart: HeatMap) -> float:
    """The side of a cell, px."""
    return min(chart.cell[0], _MAP / max(len(chart.rows), len(chart.columns)))


def _at_cells(chart: HeatMap) -> list[str]:
    return [
        f"{chart.of_rows} {row}, {chart.of_columns} {column}: "
        + (f"{value:.3f}" if math.isfinite(value) else chart.missing)
        for row, values in zip(chart.rows, chart.values, strict=True)
        for column, value in zip(chart.columns, values, strict=True)
    ]


def _colours(signed: bool, strongest: float) -> Any:
    """Blue, for differences from orange to blue, on whatever ground there is."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    blue, orange = (to_rgba(colour, strongest) for colour in COLOURS[:2])
    if signed:
        ends = [orange, (*orange[:3], 0.05), (*blue[:3], 0.05), blue]
        stops = list(zip((0.0, 0.5, 0.5, 1.0), ends, strict=True))
        made = LinearSegmentedColormap.from_list("differences", stops, N=48)
    else:
        made = LinearSegmentedColormap.from_list("shares", [(*blue[:3], 0.04), blue], N=48)
    return made.with_extremes(bad=to_rgba(_GREY, 0.4))


def _draw_bars(ax: Axes, chart: Bars) -> Tips:
    import numpy as np

    tips: Tips = {}
    left, rows = np.zeros(len(chart.names)), np.arange(len(chart.names))
    for k, (name, lengths) in enumerate(chart.parts.items()):
        known = np.nan_to_num(np.array(lengths, np.float64))
        drawn = ax.barh(rows, known, 0.72, left=left, color=COLOURS[k], label=name)
        for i, patch in enumerate(drawn.patches):
            patch.set_gid(f"part-{k}-{i}")
            tips[f"part-{k}-{i}"] = [chart.tips[name][i]]
        left = left + known
    for i, total in enumerate(chart.totals):
        at = (left[i], i)
        ax.annotate(total, at, (5, 0), textcoords="offset points", va="center", fontsize="small")
    ax.set(xlabel=chart.of_values)
    ax.set_yticks(rows, chart.names)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    _plain_frame(ax, "x")
    return tips


def _name_series(ax: Axes, chart: Chart) -> None:
    """A legend inside of axes that stand in somebody's own figure."""
    if isinstance(chart, HeatMap):
        return
    bars = f"bars: {chart.bars}" if isinstance(chart, Curves) and chart.bars else None
    entries = _entries(ax)
    if len(entries[0]) > 1 or bars:
        style: dict[str, Any] = {"frameon": False, "fontsize": "small", "title_fontsize": "small"}
        if isinstance(chart, Bars) or chart.names:  # rows leave no corner free
            style |= {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 2}
        ax.legend(*entries, title=bars, **style)


def _entries(ax: Axes) -> tuple[list[Any], list[str]]:
    """Entries of a legend: series, then level lines."""
    handles, labels = ax.get_legend_handles_labels()
    levels = {id(line) for line in ax.get_lines()}
    entries = sorted(zip(handles, labels, strict=True), key=lambda entry: id(entry[0]) in levels)
    return [handle for handle, _ in entries], [label for _, label in entries]


# --- as SVG ---------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """A chart as SVG of its own, to stand in a page."""

    svg: str
    width: float
    height: float


_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_THEME = """<style>
svg { color: #1b1d21; }
.paper { fill: #fff; }
@media (prefers-color-scheme: dark) { svg { color: #e6e8ec; } .paper { fill: #15171b; } }
</style>"""


def panels(ident: str, name: str, charts: Sequence[Chart]) -> list[Panel]:
    """Charts as SVG, to stand beside each other in a page.

    Args:
        ident: Name that is unique in the page.
        name: Name of the figure, for readers who do not see it.
        charts: Charts in order.
    """
    alone = len(charts) == 1
    with _style():
        return [
            _panel(f"{ident}-{k}", f"{name}: {chart.title}" if chart.title else name, chart, alone)
            for k, chart in enumerate(charts)
        ]


def figure(title: str, desc: str, charts: Sequence[Chart]) -> Figure:
    """An SVG file with a heading above charts.

    Args:
        title: Heading.
        desc: Description of what one should see.
        charts: Charts in order.
    """
    return composed("figure", title, desc, panels("figure", title, charts), heading=True)


def composed(
    ident: str, title: str, desc: str, parts: Sequence[Panel], *, heading: bool = False
) -> Figure:
    """An SVG file of panels, on paper that follows the reader's theme.

    Args:
        ident: Name of the figure.
        title: Name of the figure in words.
        desc: Description of what one should see.
        parts: Panels, as many in a row as there is room for.
        heading: Whether the title is written above them.
    """
    x, y, high, right = 0.0, 34.0 if heading else 0.0, 0.0, 8.7 * len(title) * heading
    drawn = []
    for part in parts:
        if x and x + part.width > _PAGE:
            x, y, high = 0.0, y + high + _GAP, 0.0
        drawn.append(part.svg.replace("<svg ", f'<svg x="{x:g}" y="{y:g}" ', 1))
        x, high = x + part.width + _GAP, max(high, part.height)
        right = max(right, x - _GAP)
    width, height, margin = right + 24, y + high + 24, 12
    box = f'viewBox="-{margin} -{margin} {width:g} {height:g}" width="{width:g}"'
    above = f'<text y="12" style="font-size: 14px; font-weight: 700">{escape(title)}</text>'
    return Figure(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{ident}-t {ident}-d" '
        f'{box} height="{height:g}" fill="currentColor" font-family="{_FONT}">'
        f'<title id="{ident}-t">{escape(title)}</title><desc id="{ident}-d">{escape(desc)}</desc>'
        f'{_THEME}<rect x="-{margin}" y="-{margin}" width="100%" height="100%" class="paper"/>'
        f"{above if heading else ''}{''.join(drawn)}</svg>\n"
    )


@contextmanager
def _style() -> Iterator[None]:
    """The same settings for every reader, whatever their matplotlibrc says."""
    import matplotlib

    own = ("backend", "interactive", "toolbar", "webagg", "tk.")
    plain: dict[Any, Any] = {
        k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(own)
    }
    style: dict[Any, Any] = {
        **{"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 12.0},
        **{"axes.titlesize": 12.0, "axes.labelsize": 12.0, "legend.fontsize": 12.0},
        **{"xtick.labelsize": 11.0, "ytick.labelsize": 11.0, "axes.formatter.useoffset": False},
        **{"axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none"},
        **{"legend.frameon": False, "text.parse_math": False, "path.simplify": False},
    }
    with matplotlib.rc_context({**plain, **style}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's fonts may have it
        yield


def _panel(ident: str, name: str, chart: Chart, alone: bool) -> Panel:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(dpi=72, layout="constrained")
    FigureCanvasAgg(drawing)
    ax = drawing.subplots()
    tips = draw(chart, ax)
    width, height = _size(chart, alone)
    height += _fit_texts(drawing, ax, chart, width, height)
    drawing.set_size_inches(width / 72, height / 72)
    if isinstance(chart, Curves) and any(series.labels for series in chart.series.values()):
        _write_labels(drawing, ax, chart)
    matplotlib.rcParams["svg.hashsalt"] = ident
    file = io.BytesIO()
    drawing.savefig(
        file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    root = _plain(ElementTree.fromstring(file.getvalue()), tips)
    root.attrib.clear()
    title = ElementTree.Element("title", id=f"{ident}-t")
    title.text = name
    root.insert(0, title)
    root.attrib |= {
        **{"role": "img", "aria-labelledby": f"{ident}-t", "viewBox": f"0 0 {width:g} {height:g}"},
        **{"width": f"{width:g}", "height": f"{height:g}", "fill": "currentColor"},
        **{"font-family": _FONT, "stroke-linejoin": "round"},
    }
    return Panel(ElementTree.tostring(root, encoding="unicode"), width, height)


def _size(chart: Chart, alone: bool) -> tuple[float, float]:
    """Width and height of a panel, px, without its legend and its title."""
    if isinstance(chart, HeatMap):
        longest = max(len(_shortened(str(row), 22)) for row in chart.rows)
        side, (_, high) = _side(chart), chart.cell
        wide = (
            side if isinstance(chart.rows[0], int) else min(chart.cell[0], 560 / len(chart.columns))
        )
        return (
            max(150 + 7 * longest + wide * len(chart.columns), min(9 * len(chart.title), _PANEL)),
            max(64 + min(side if side < high else high, high) * len(chart.rows), 130),
        )
    if isinstance(chart, Bars):
        return FULL, 56 + 25 * len(chart.names)
    if chart.names:
        return FULL, 56 + max(25 * len(chart.names), 8 * len(chart.of_places))
    return (_SINGLE, 300) if alone else (_PANEL, 250)


def _fit_texts(
    drawing: matplotlib.figure.Figure, ax: Axes, chart: Chart, width: float, height: float
) -> float:
    """Break or shorten texts that are too long for their panel, add a legend; its height, px."""
    letters = int(width / 7.4)
    title, more = textwrap.fill(chart.title, int(width / 9)), 0.0
    if title:
        ax.set_title(title, loc="left", fontweight="bold")
        more = 18.0 * (title.count("\n") + 1)
    ax.set_ylabel(textwrap.fill(ax.get_ylabel(), max(13, int((height - 68) / 7.3))))
    ax.set_xlabel("\n".join(textwrap.fill(line, letters) for line in ax.get_xlabel().split("\n")))
    more += 16 * ax.get_xlabel().count("\n")
    if isinstance(chart, HeatMap):
        names = [_shortened(label.get_text(), 22) for label in ax.get_yticklabels()]
        ax.set_yticks(ax.get_yticks(), names)
        scale = drawing.axes[1]
        scale.set_ylabel(textwrap.fill(scale.get_ylabel(), max(12, int((height - 64) / 8))))
        return more
    if isinstance(chart, Bars) or chart.names:
        ax.set_yticks(ax.get_yticks(), [_shortened(name, 40) for name in chart.names])
    handles, labels = _entries(ax)
    bars = f"bars: {chart.bars}" if isinstance(chart, Curves) and chart.bars else None
    if len(labels) < 2 and not bars:
        return more
    labels = [textwrap.fill(label, letters - 7) for label in labels]
    columns = max(1, int(width / (7.6 * max(map(len, labels)) + 46)))
    drawing.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=min(columns, len(labels)),
        title=bars,
        alignment="left",
        title_fontsize=11,
        borderaxespad=0,
        columnspacing=1.2,
        labelspacing=0.3,
    )
    lines = sum(label.count("\n") + 1 for label in labels)
    return more + 18 * math.ceil(lines / min(columns, len(labels))) + (24 if bars else 8)


def _shortened(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _write_labels(drawing: matplotlib.figure.Figure, ax: Axes, chart: Curves) -> None:
    """Labels beside points, each where it covers no point and no other label, else left out."""
    from matplotlib.transforms import Bbox

    drawing.draw_without_rendering()  # which puts the axes where they stay
    places = [
        ax.transData.transform(point)
        for series in chart.series.values()
        for point in zip(series.places, series.values, strict=True)
    ]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places]
    sides = [(8, -4, "left"), (-8, -4, "right"), (0, 7, "center"), (0, -16, "center")]
    sides += [(7, 5, "left"), (-7, 5, "right"), (7, -14, "left"), (-7, -14, "right")]
    for series in chart.series.values():
        for x, y, label in zip(series.places, series.values, series.labels, strict=False):
            text = ax.annotate(label, (x, y), (0, 0), textcoords="offset points", fontsize="small")
            text.set_in_layout(False)
            for dx, dy, side in sides:
                text.set(position=(dx, dy), horizontalalignment=side)
                box = text.get_window_extent()
                if ax.bbox.containsx(box.x0) and drawing.bbox.containsx(box.x1):
                    inside = ax.bbox.containsy(box.y0) and ax.bbox.containsy(box.y1)
                    if inside and not box.count_overlaps(taken):
                        taken.append(box)
                        break
            else:
                text.remove()


def _plain(root: ElementTree.Element, tips: Tips) -> ElementTree.Element:
    """Matplotlib's SVG without names of its own, fonts, clips and black; with tips."""
    for parent in list(root.iter()):
        for child in list(parent):
            inside = {element.tag for element in child.iter()} & {f"{_SVG}style", f"{_SVG}clipPath"}
            if child.tag == f"{_SVG}metadata" or (child.tag == f"{_SVG}defs" and inside):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib.pop("clip-path", None)
        if link := element.attrib.pop(_LINK, ""):
            element.set("href", link)
        if style := element.get("style"):
            element.set("style", _own_style(style))
        element.text = (element.text or "").strip() or None
        element.tail = None
    for group in root.iter("g"):
        if texts := tips.get(group.attrib.pop("id", ""), ()):
            marks = list(group.iter("use")) or list(group.iter("path"))
            for mark, tip in zip(marks, texts, strict=False):
                ElementTree.SubElement(mark, "title").text = tip
    return root


def _own_style(style: str) -> str:
    parts = [part.strip() for part in style.split(";")]
    return "; ".join(
        part.replace("#000000", "currentColor") for part in parts if not part.startswith("font-fam")
    )
