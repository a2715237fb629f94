"""Charts on matplotlib axes, and `Plotted`, the base of results that have some."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bertvision.errors import InputError, UnknownNameError, did_you_mean
from bertvision.pipelines.plotting.charts import Chart, Curves, HeatMap, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito (2008), as the figures of the report have them; shapes say the same without colour
COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b05a8e", "#b98300", "#2f8fc4", "#6a6f78", "#7a4fb5")
SHAPES = "osD^vP"
_SIGNED, _SHARES = "PuOr", "cividis"  # both told apart by the colour-blind, the second in grey too
_MISSING = "0.85"
_TICKS = 13
"""Layers or attention heads that a heat map names at most."""


class Plotted(ABC):
    """Base of results that are drawn on matplotlib axes."""

    @abstractmethod
    def charts(self) -> Mapping[str, Chart]:
        """What can be drawn, by the name of its measure; the first is drawn by default."""

    def plot(self, ax: Axes | None = None, *, measure: str | None = None) -> Axes:
        """Draw one measure on matplotlib axes, with intervals where the result has them.

        Drawn on axes that hold another result's series, these stand beside them in the next
        colours. Needs matplotlib: ``pip install 'bertvision[plot]'``.

        Args:
            ax: to draw on; by default those of a new figure.
            measure: which of `charts`; by default the first.

        Returns:
            The axes, to be changed further; ``ax.figure.savefig`` writes a PDF or PNG.

        Raises:
            UnknownNameError: the result has no such measure; names those it has.
            InputError: matplotlib is not installed, or there is nothing to be drawn.
        """
        charts = self.charts()
        if not charts:
            raise InputError("nothing can be drawn: the result has no rows, or no scores in them")
        name = next(iter(charts)) if measure is None else measure
        if name not in charts:
            hint = did_you_mean(name, charts)
            raise UnknownNameError(f"measure {name!r}: {hint}there are {', '.join(charts)}")
        return draw(charts[name], ax)


def draw(chart: Chart, ax: Axes | None = None) -> Axes:
    """A chart on axes.

    Args:
        chart: what is drawn.
        ax: to draw on; by default those of a new figure.

    Raises:
        InputError: matplotlib is not installed.
    """
    if ax is None:
        ax = _new_axes()
    if isinstance(chart, HeatMap):
        _draw_map(ax, chart)
    else:
        _draw_curves(ax, chart)
    return ax


def _new_axes() -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise InputError(
            "plot() draws with matplotlib, which is not installed: `pip install "
            "'bertvision[plot]'`; figure() draws SVG without it, where a result has one"
        ) from error
    return plt.subplots(layout="constrained")[1]


def _draw_curves(ax: Axes, chart: Curves) -> None:
    import numpy as np

    first = len(ax.containers)  # series of other results that are on these axes
    if chart.names and first:
        raise InputError(
            "these axes have rows of another result, whose names would be lost: draw on axes of "
            "their own, such as those of `plt.subplots(1, 2)`"
        )
    for i, (name, series) in enumerate(chart.series.items()):
        aside = 0.0
        if chart.names:  # points of a row stand beside each other
            aside = 0.5 * ((i + 0.5) / len(chart.series) - 0.5)
        _draw_series(ax, chart, name, series, first + i, aside)
    there = [(str(line.get_label()), list(np.ravel(line.get_ydata()))) for line in ax.get_lines()]
    level_line = ax.axvline if chart.names else ax.axhline
    for k, (name, level) in enumerate(chart.levels.items()):
        if (name, [level, level]) not in there:
            dots = (":", "--", "-.")[k % 3]
            level_line(level, color="0.4", linestyle=dots, linewidth=1, label=name, zorder=1)
    if chart.names:
        ax.set(xlabel=chart.of_values, ylabel=chart.of_places)
        ax.set_yticks(range(len(chart.names)), chart.names)
        ax.set_ylim(len(chart.names) - 0.5, -0.5)
    else:
        from matplotlib.ticker import MaxNLocator

        ax.set(xlabel=chart.of_places, ylabel=chart.of_values)
        if all(float(place).is_integer() for s in chart.series.values() for place in s.places):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x" if chart.names else "y", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if len(ax.get_legend_handles_labels()[0]) > 1 or chart.bars:
        bars = f"bars: {chart.bars}" if chart.bars else None
        # above rows, which leave no corner free
        place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 2}
        ax.legend(
            frameon=False,
            fontsize="small",
            title=bars,
            title_fontsize="small",
            **(place if chart.names else {}),
        )


def _draw_series(
    ax: Axes, chart: Curves, name: str, series: Series, number: int, aside: float
) -> None:
    import numpy as np

    colour = COLOURS[number % len(COLOURS)]
    style: dict[str, Any] = {
        "marker": SHAPES[number % len(SHAPES)],
        "markersize": 4,
        "linewidth": 0 if chart.names else 1.2,
        "elinewidth": 1,
        "capsize": 2,
        "color": colour,
        "label": name,
    }
    bars, values = None, np.array(series.values)
    if series.low is not None and series.high is not None:
        # the mean of resamples may lie outside of what is drawn by a last bit
        below, above = values - np.array(series.low), np.array(series.high) - values
        bars = np.maximum(np.stack([below, above]), 0)
    places = np.array(series.places) + aside
    if chart.names:
        ax.errorbar(values, places, xerr=bars, **style)
    else:
        ax.errorbar(places, values, yerr=bars, **style)


def _draw_map(ax: Axes, chart: HeatMap) -> None:
    import numpy as np
    from matplotlib import colormaps

    colours = colormaps[_SIGNED if chart.signed else _SHARES].with_extremes(bad=_MISSING)
    largest = 1.0
    if chart.signed:
        finite = np.abs(chart.values[np.isfinite(chart.values)])
        largest = float(finite.max()) if finite.size and finite.any() else 1.0
    image = ax.imshow(
        np.ma.masked_invalid(chart.values),
        origin="lower",
        interpolation="nearest",
        cmap=colours,
        vmin=-largest if chart.signed else 0.0,
        vmax=largest,
    )
    ax.set(xlabel=chart.of_columns, ylabel=chart.of_rows)
    for numbers, set_ticks in ((chart.columns, ax.set_xticks), (chart.rows, ax.set_yticks)):
        step = math.ceil(len(numbers) / _TICKS)
        set_ticks(range(0, len(numbers), step), [str(n) for n in numbers[::step]])
    ax.figure.colorbar(image, ax=ax, label=chart.of_values)
