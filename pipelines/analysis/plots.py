"""Figures as PNG files: heat maps of layer × layer and lines over layers.

Figures are made with matplotlib's object interface, without pyplot: no display is needed, and no
state is shared with a program that draws its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

# Okabe & Ito (2008): told apart with every common colour blindness
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ANNOTATED_CELLS = 14 * 14
"""Heat maps with more cells than this carry no numbers: they could not be read."""
LABELLED_CHANNELS = 12


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure in inches with its title, laid out so that nothing overlaps."""
    figure = Figure(figsize=(width, height), layout="compressed")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG of 150 dots per inch; folders are made where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


def heat_map(
    ax: Axes,
    values: NDArray[np.floating[Any]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    columns: Sequence[int],
    rows: Sequence[int],
) -> Any:
    """A layer × layer heat map on a scale of 0 to 1, layer 0 at the lower left.

    Args:
        ax: where to draw.
        values: (rows, columns); NaN stays grey.
        title: of this panel.
        xlabel: what the columns are.
        ylabel: what the rows are.
        columns: layer number of each column.
        rows: layer number of each row.

    Returns:
        The mappable, for a colour bar.
    """
    ax.set_facecolor("0.85")
    image = ax.imshow(values, origin="lower", cmap="viridis", vmin=0, vmax=1, aspect="equal")
    for axis, labels in ((ax.xaxis, columns), (ax.yaxis, rows)):
        step = 1 if len(labels) <= 14 else 2 if len(labels) <= 28 else 4
        ticks = list(range(0, len(labels), step))
        axis.set_ticks(ticks, [str(labels[i]) for i in ticks])
    ax.set_title(title, fontsize=11)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if values.size <= ANNOTATED_CELLS:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ax.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=9 if max(values.shape) <= 8 else 7,
                    color="black" if value > 0.6 else "white",
                )
    return image


def layer_lines(
    ax: Axes,
    layers: Sequence[int],
    lines: Mapping[str, NDArray[np.floating[Any]]],
    *,
    title: str,
    ylabel: str,
    top: float | None = None,
) -> None:
    """Lines over layers, from zero (or the smallest value below it) up.

    Args:
        ax: where to draw.
        layers: layer number of each point.
        lines: label → (layers,) values; a legend is drawn where there is more than one.
        title: of this panel.
        ylabel: the quantity, with its unit.
        top: upper end of the axis; None fits the values.
    """
    for i, (label, values) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        marker = "osD^v<"[i % 6]
        ax.plot(layers, values, color=colour, marker=marker, markersize=4.5, label=label)
    _layer_axes(ax, layers, title, ylabel)
    lowest = min((float(np.nanmin(v)) for v in lines.values() if np.isfinite(v).any()), default=0.0)
    ax.set_ylim(bottom=min(0.0, 1.1 * lowest), top=top)
    if len(lines) > 1:
        ax.legend(frameon=False, fontsize=9)


def layer_channels(
    ax: Axes, layers: Sequence[int], channels: Sequence[Sequence[int]], *, title: str
) -> None:
    """A dot for every channel of a set per layer; a channel that recurs makes a horizontal row.

    Args:
        ax: where to draw.
        layers: layer number of each set.
        channels: the set of each layer; the numbers are written beside the dots while they are few.
        title: of this panel.
    """
    distinct = sorted({channel for row in channels for channel in row})
    for channel in distinct:
        where = [layer for layer, row in zip(layers, channels, strict=True) if channel in row]
        ax.plot(where, [channel] * len(where), "o:", color=COLOURS[0], markersize=4.5, linewidth=1)
        if len(distinct) <= LABELLED_CHANNELS:
            ax.annotate(
                str(channel),
                (where[-1], channel),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
    if not distinct:
        ax.text(0.5, 0.5, "none", transform=ax.transAxes, ha="center", va="center", color="0.4")
        ax.set_yticks([])
    _layer_axes(ax, layers, title, "channel")
    ax.set_xlim(min(layers) - 0.4, max(layers) + 0.6)
    ax.margins(y=0.15)


def _layer_axes(ax: Axes, layers: Sequence[int], title: str, ylabel: str) -> None:
    ax.set_title(title, fontsize=11)
    ax.set_xlabel("layer (0 = embedding output)")
    ax.set_ylabel(ylabel)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=min(14, len(layers)), integer=True))
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
