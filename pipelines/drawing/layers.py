"""Figures over the layers of an encoder: heat maps, lines, sets of channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertvision.pipelines.drawing.figures import NARROW, Box, legend, sample, series
from bertvision.pipelines.drawing.heat import Cell, heat_map
from bertvision.pipelines.drawing.svg import Canvas, Plot, shortened, text_width

Array = NDArray[np.floating[Any]]

LAYER = "layer (0 = embedding output)"
"""What axes of layers are called."""
_MAP, _LARGEST, _NUMBERED = 440.0, 64.0, 31.0
"""Sides in px: of a heat map, of a cell at most, of a cell that has room for a number."""
_TOP, _BELOW, _GAP, _ROW = 46.0, 40.0, 30.0, 56.0
_NAMED_CHANNELS = 12


def layer_maps(
    quantity: str,
    maps: Mapping[str, Array],
    rows: tuple[str, Sequence[int]],
    columns: tuple[str, Sequence[int]],
    width: float,
) -> Canvas:
    """Heat maps of layer × layer on a scale of 0 to 1, layer 0 at the lower left.

    Args:
        quantity: name of the values.
        maps: title → (rows, columns) values; NaN is a layer that does not vary.
        rows: what the layers of the rows are layers of, and their numbers.
        columns: the same of the columns.
        width: px that there are.
    """
    (of_rows, down), (of_columns, across) = rows, columns
    named = (f"layer of {of_rows}", down), (f"layer of {of_columns}", across)
    return value_maps(quantity, maps, *named, width, missing="layer does not vary")


def value_maps(
    quantity: str,
    maps: Mapping[str, Array],
    rows: tuple[str, Sequence[int]],
    columns: tuple[str, Sequence[int]],
    width: float,
    *,
    largest: float = _MAP,
    missing: str = "no value",
) -> Canvas:
    """Heat maps on a scale of 0 to 1, the first row at the bottom.

    As many stand side by side as there is room for. Cells carry their numbers while there is room
    for them. NaN is grey.

    Args:
        quantity: name of the values.
        maps: title → (rows, columns) values.
        rows: name of the axis, and its numbers.
        columns: the same of the columns.
        width: px that there are.
        largest: px that a map may be wide and high.
        missing: what NaN is.
    """
    (y_name, down), (x_name, across) = rows, columns
    left = max(text_width(str(number)) for number in down) + 6
    side = min(_LARGEST, min(largest, width - left) / max(len(down), len(across)))
    numbered = side >= _NUMBERED
    names = {title: shortened(title, width, bold=True) for title in maps}
    widest = max(text_width(name, bold=True) for name in names.values())
    widest = max(widest, text_width(x_name), text_width(y_name), left + side * len(across))
    beside = min(len(maps), max(1, int((width + _GAP) / (widest + _GAP))))
    c = Canvas((widest + _GAP) * beside - _GAP, 0)
    for k, (title, values) in enumerate(maps.items()):
        x, top = (widest + _GAP) * (k % beside), (_TOP + side * len(down) + _ROW) * (k // beside)
        bottom = top + _TOP + side * len(down)
        c.text(x, top + 12, names[title], cls="strong")
        c.text(x, top + _TOP - 12, y_name)
        cells = {
            (len(down) - 1 - i, j): _cell(
                float(value), f"{y_name} {down[i]}, {x_name} {across[j]}", numbered, missing
            )
            for (i, j), value in np.ndenumerate(values)
        }
        titles = [str(number) for number in reversed(down)], [str(number) for number in across]
        heat_map(c, (x + left, top + _TOP), (side, side), *titles, cells, below=True)
        middle = max(left + side * len(across) / 2, text_width(x_name) / 2)
        c.text(x + middle, bottom + 34, x_name, anchor="middle")
    gaps = any(not np.isfinite(values).all() for values in maps.values())
    c.height = _scale(c, quantity, bottom + _BELOW + 12, numbered, missing if gaps else None)
    return c


def layer_plot(
    c: Canvas,
    box: Box,
    layers: Sequence[int],
    y_range: tuple[float, float],
    label: str,
    *,
    names: Sequence[str] | None = None,
) -> Plot:
    """Axes over layers, for what is drawn between them.

    Args:
        c: where to draw.
        box: (left, top, right, bottom) of the plot, px.
        layers: their numbers, ascending.
        y_range: lowest and highest value.
        label: of the values, with their unit.
        names: of the values 0, 1, …, where they are no numbers to be measured.
    """
    p = Plot(c, *box, (layers[0] - 0.3, layers[-1] + 0.3), y_range)
    room = (text_width(str(layers[-1])) + 4) / (box[2] - box[0])
    ticks = [(layer, f"{layer}") for layer in layers[:: math.ceil(room * len(layers))]]
    if names is None:
        p.axes(ticks, LAYER, label)
    else:
        p.axes(ticks, LAYER, label, y_ticks=range(len(names)), y_text=lambda i: names[int(i)])
    return p


def layer_lines(
    c: Canvas,
    box: Box,
    layers: Sequence[int],
    lines: Mapping[str, Array],
    label: str,
    *,
    top: float | None = None,
    named: bool = True,
) -> None:
    """Lines over layers, from zero or from the smallest value below it.

    Args:
        c: where to draw.
        box: (left, top, right, bottom) of the plot, px.
        layers: their numbers, ascending.
        lines: name → (layers,) values; where there are several, a legend stands below the plot.
        label: of the values, with their unit.
        top: upper end of the axis; None fits the values.
        named: whether there is a legend.
    """
    values = np.concatenate([*lines.values(), [0.0]])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if high - low < 1e-9:  # what rounding leaves of nothing has no scale
        low = high = 0.0
    end = top or 1.1 * high or (0.0 if low < 0 else 1.0)
    p = layer_plot(c, box, layers, (1.1 * low, end), label)
    for i, (name, line) in enumerate(lines.items()):
        points = list(zip(layers, map(float, line), strict=True))
        series(p, i, points, [f"{name}: layer {layer}, {value:.4g}" for layer, value in points])
    if named and len(lines) > 1:
        entries = [sample(i, name) for i, name in enumerate(lines)]
        c.height = max(c.height, legend(c, entries, box[3] + 46, c.width) + 20)


def layer_channels(
    c: Canvas,
    box: Box,
    layers: Sequence[int],
    channels: Mapping[str, Sequence[Sequence[int]]],
) -> None:
    """A point for every channel of a set per layer; a channel that recurs makes a horizontal row.

    Points of several series stand beside each other.

    Args:
        c: where to draw.
        box: (left, top, right, bottom) of the plot, px.
        layers: their numbers, ascending.
        channels: name of a series → the set of each layer. While there are few, each has a row with
            its number; where there are more, the rows lie as far apart as their numbers.
    """
    found = sorted({channel for of in channels.values() for layer in of for channel in layer})
    if len(found) <= _NAMED_CHANNELS:
        rows = {channel: float(i) for i, channel in enumerate(found)}
        names = [str(channel) for channel in found]
        p = layer_plot(c, box, layers, (-0.6, max(len(found), 1) - 0.4), "channel", names=names)
    else:
        rows = {channel: float(channel) for channel in found}
        p = layer_plot(c, box, layers, (0, found[-1] * 1.05), "channel")
    if not found:
        c.text((p.left + p.right) / 2, (p.top + p.bottom) / 2, "none", anchor="middle", cls="tick")
    step = min(0.2, 0.5 / len(channels))
    for i, (name, of) in enumerate(channels.items()):
        aside = step * (i - (len(channels) - 1) / 2)
        told = f", {name}" if len(channels) > 1 else ""
        for channel, row in rows.items():
            at = [n for n, layer in zip(layers, of, strict=True) if channel in layer]
            tips = [f"channel {channel} in layer {layer}{told}" for layer in at]
            points = [(layer + aside, row) for layer in at]
            series(p, i, points, tips, cls="dashed")


def _cell(value: float, where: str, numbered: bool, missing: str) -> Cell:
    if not np.isfinite(value):
        return Cell("none", 0.4, (), f"{where}: {missing}")
    texts = (f"{round(value, 2) + 0.0:.2f}".replace("-", "−"),) if numbered else ()
    return Cell("s0", _strength(value, numbered), texts, f"{where}: {value:.3f}")


def _strength(value: float, numbered: bool) -> float:
    """Part of the full colour; less of it where a number must be readable on it."""
    return 0.04 + (0.54 if numbered else 0.96) * min(max(value, 0.0), 1.0)


def _scale(c: Canvas, quantity: str, y: float, numbered: bool, missing: str | None) -> float:
    """The scale of the colour, and grey where there is some; makes room; returns the lower end."""
    x, step, steps = text_width(quantity) + 10, 8.0, 25
    c.text(0, y + 10, quantity)
    if x + step * steps > max(c.width, NARROW):  # a long name stands above
        x, y = 0.0, y + 20
    for k in range(steps):
        c.rect(x + step * k, y, step, 13, "cell s0", opacity=_strength(k / (steps - 1), numbered))
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        at = x + step * (0.5 + value * (steps - 1))
        c.text(at, y + 28, f"{value:g}", anchor="middle", cls="tick")
    x += step * steps + 10
    if missing is not None:
        c.rect(x + 20, y, 20, 13, "cell none", opacity=0.4)
        c.text(x + 48, y + 10, missing)
        x += 48 + text_width(missing)
    c.width = max(c.width, x)
    return y + 34
