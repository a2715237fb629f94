"""Rows of points on one scale: what several systems score in each of some groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bertvision.pipelines.drawing.figures import legend
from bertvision.pipelines.drawing.svg import SHAPES, Canvas, Plot, shortened, text_width, ticks


class Dot(NamedTuple):
    """A point of a row."""

    system: int
    """Number of its system, which is its colour and its shape."""
    value: float
    low: float | None = None
    """Lower end of its interval; None where it has none."""
    high: float | None = None
    """Upper end of its interval."""


class DotRow(NamedTuple):
    """A row of points, a group of questions."""

    title: str
    dots: Sequence[Dot]


def dot_rows(
    rows: Mapping[str, Sequence[DotRow]],
    systems: Sequence[str],
    label: str,
    width: float,
    *,
    top: float = 100,
    digits: int = 1,
) -> Canvas:
    """A row of points for each group, from 0 on; the legend stands above.

    Args:
        rows: by heading; an empty one is not written.
        systems: names of the systems, of which those with a point are in the legend; the first is
            drawn larger, so that it shows where another lies on it.
        label: of the values, with their unit.
        width: px.
        top: largest value.
        digits: decimals of values where the pointer rests.
    """
    wide = width > 500
    titles = [row.title for of in rows.values() for row in of]
    left = min(260.0, max(map(text_width, titles)) + 12) if wide else 8.0
    step, head = (24.0 if wide else 38.0), 30.0
    c = Canvas(width, 0)
    drawn = {dot.system for of in rows.values() for row in of for dot in row.dots}
    entries = [(name, f"s{i}", SHAPES[i]) for i, name in enumerate(systems) if i in drawn]
    y = legend(c, entries, 0, width, lines=False) + (0 if all(rows) else 10)
    bottom = y + 12 + step * len(titles) + head * sum(map(bool, rows))
    c.height = bottom + 40
    p = Plot(c, left, y, width - 14, bottom, (0, top), (0, 1))
    for value in ticks(0, top):
        c.line(p.x(value), y + 4, p.x(value), bottom, "grid")
        c.text(p.x(value), bottom + 16, f"{value:g}", anchor="middle", cls="tick")
    c.text((left + p.right) / 2, bottom + 34, label, anchor="middle")
    for heading, of in rows.items():
        if heading:
            y += head
            c.text(0, y - 8, heading, cls="strong halo")
        for row in of:
            c.text(0, y + 13, shortened(row.title, left if wide else width), cls="halo")
            _row(p, row, y + (9 if wide else 26), systems, digits)
            y += step
    return c


def _row(p: Plot, row: DotRow, y: float, systems: Sequence[str], digits: int) -> None:
    c = p.canvas
    if len(row.dots) > 1:
        ends = [p.x(dot.value) for dot in row.dots]
        c.line(min(ends), y, max(ends), y, "axis")
    for dot in row.dots:
        if dot.low is not None and dot.high is not None:
            c.path([(p.x(dot.low), y), (p.x(dot.high), y)], f"line s{dot.system}")
    for dot in row.dots:
        text = f"{systems[dot.system]}, {row.title}: {dot.value:.{digits}f}"
        r = 4 if dot.system else 6
        c.marker(SHAPES[dot.system], p.x(dot.value), y, f"point s{dot.system}", r=r, tip=text)
