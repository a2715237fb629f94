"""What figures share: two widths, files, panels, legends, lines with points.

In a page every figure is drawn twice, for a wide and for a narrow one; the style sheet shows the
one that fits, so that text keeps its size on a phone. A file of its own holds the wide one.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bertvision.errors import InputError
from bertvision.pipelines.drawing.svg import (
    LINE,
    SERIES,
    SHAPES,
    Canvas,
    Plot,
    shortened,
    text_width,
)
from bertvision.pipelines.files import write_text

Box = tuple[float, float, float, float]
"""Left, top, right, bottom of a plot, px."""
THEME = Path(__file__).parent / "theme.css"
"""Colours and strokes of the figures."""
WIDE, NARROW = 800.0, 330.0
_MARGIN = 12
MOST_PANELS = 6
"""In one figure, so that it fits a printed page."""


def both(ident: str, title: str, desc: str, draw: Callable[[float], Canvas]) -> Markup:
    """A figure for wide and for narrow pages.

    Args:
        ident: unique in the page.
        title: what it is.
        desc: what one should see.
        draw: width in px → the drawing.
    """
    drawn = [
        Markup('<div class="{0}">{1}</div>').format(
            name, draw(width).svg(f"{ident}-{name}", title, desc)
        )
        for name, width in (("wide", WIDE), ("narrow", NARROW))
    ]
    return Markup("").join(drawn)


def standalone(ident: str, title: str, desc: str, drawing: Canvas) -> str:
    """A figure as an SVG file of its own, on paper that follows the reader's theme.

    Args:
        ident: of the figure.
        title: what it is.
        desc: what one should see.
        drawing: what is on it.
    """
    style = THEME.read_text(encoding="utf-8")
    # the page has room around a drawing: marks may stand on its edge
    drawn = str(drawing.svg(ident, title, desc, margin=_MARGIN))
    drawn = drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    paper = f'<rect x="{-_MARGIN}" y="{-_MARGIN}" width="100%" height="100%" class="paper"/>'
    return drawn.replace("</desc>", f"</desc>\n<style>\n{style}</style>\n{paper}", 1) + "\n"


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


class Figure(str):
    """The text of an SVG file, which a notebook shows as the figure that it is."""

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


def titled(title: str, desc: str, drawing: Canvas) -> Figure:
    """A figure with its title above it.

    Args:
        title: what it is.
        desc: what one should see.
        drawing: what is on it.
    """
    # the style sheet makes it a sixth larger than other text
    canvas = Canvas(max(drawing.width, 7 / 6 * text_width(title, bold=True)), drawing.height + 34)
    canvas.text(0, 12, title, cls="strong title")
    canvas.put(drawing, 0, 34)
    return Figure(standalone("figure", title, desc, canvas))


def panels(
    titles: Sequence[tuple[Any, str]],
    draw: Callable[[Canvas, Any, Box], None],
    entries: Sequence[tuple[str, str, str]],
    width: float,
    *,
    lines: bool = True,
) -> Canvas:
    """Panels in two columns where the page is wide, one legend below them.

    A row of panels is as high as the highest of them, whose canvas ``draw`` may have made higher.

    Args:
        titles: key and title of each panel.
        draw: canvas of the panel, its key, and the box of its plot.
        entries: of the legend.
        width: px.
        lines: as for `legend`.
    """
    columns = 2 if width > 500 and len(titles) > 1 else 1
    panel_w = width / columns
    c = Canvas(width, 0)
    top = 0.0
    for k, (key, title) in enumerate(titles):
        if k % columns == 0:
            top = c.height
        inner = Canvas(panel_w - (16 if columns == 2 and k % 2 == 0 else 0), 300)
        inner.text(0, 12, shortened(title, inner.width, bold=True), cls="strong")
        draw(inner, key, (40, 48, inner.width - 10, inner.height - 52))
        c.put(inner, panel_w * (k % columns), top)
        c.height = max(c.height, top + inner.height)
    if entries:
        c.height = legend(c, entries, c.height + 8, width, lines=lines)
    return c


def legend(
    c: Canvas,
    entries: Sequence[tuple[str, str, str]],
    y: float,
    width: float,
    *,
    lines: bool = True,
) -> float:
    """Samples with their names, as many in a line as fit.

    Args:
        c: where to draw.
        entries: name, class and shape (one of `svg.SHAPES`, or ``bar``) of each series.
        y: px, upper end.
        width: px.
        lines: whether series are lines with points, not points alone.

    Returns:
        The height of the canvas with the legend.
    """
    at = 0.0
    for name, cls, shape in entries:
        name = shortened(name, width - 34)
        room = 30 + text_width(name) + 14
        if at > 0 and at + room - 14 > width:
            at, y = 0.0, y + LINE + 4
        if shape == "bar":
            c.rect(at + 2, y, 20, 11, f"bar {cls}")
        elif cls == "reference":
            c.line(at, y + 6, at + 24, y + 6, cls)
        else:
            if cls != "faint" and lines:
                c.path([(at, y + 6), (at + 24, y + 6)], f"line {cls}")
            point = cls if cls == "faint" else f"point {cls.split()[0]}"
            c.marker(shape, at + 12, y + 6, point, tip="")
        c.text(at + 30, y + 10, name)
        at += room
    return y + LINE + 4


def sample(i: int, name: str, cls: str = "") -> tuple[str, str, str]:
    """The legend's entry of a series: its name, class and shape.

    Args:
        i: number of the series.
        name: what it is called.
        cls: another class of its line, such as ``dashed``.
    """
    return name, f"s{i % SERIES} {cls}".rstrip(), SHAPES[i % len(SHAPES)]


def series(
    p: Plot,
    i: int,
    points: Sequence[tuple[float, float]],
    tips: Sequence[str],
    *,
    cls: str = "",
    r: float = 4,
) -> None:
    """A line with points, broken where a value is NaN.

    Args:
        p: where to draw.
        i: number of the series, which is its colour and its shape.
        points: x and value of each point.
        tips: what shows where the pointer rests on each.
        cls: another class of the line, such as ``dashed``.
        r: half the width of a point, px.
    """
    _, name, shape = sample(i, "", cls)
    places = [(p.x(x), p.y(value)) for x, value in points]
    for drawn, run in itertools.groupby(places, lambda place: math.isfinite(place[1])):
        line = list(run)
        if drawn and len(line) > 1:
            p.canvas.path(line, f"line {name}")
    for (x, y), tip in zip(places, tips, strict=True):
        if math.isfinite(y):
            p.canvas.marker(shape, x, y, f"point {name.split()[0]}", r=r, tip=tip)
