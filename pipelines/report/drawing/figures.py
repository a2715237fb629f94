"""What the report's figures share: two widths, panels, legends, tips.

Every figure is drawn twice, for a wide and for a narrow page; the style sheet shows the one that
fits, so that text keeps its size on a phone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from bertvision.pipelines.report.drawing.svg import LINE, Canvas, Plot, shortened, text_width
from bertvision.pipelines.results.columns import signed

Row = Mapping[str, Any]
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


def standalone(ident: str, title: str, desc: str, draw: Callable[[float], Canvas]) -> str:
    """A figure as an SVG file of its own, on paper that follows the reader's theme.

    Args:
        ident: of the figure.
        title: what it is.
        desc: what one should see.
        draw: width in px → the drawing.
    """
    style = THEME.read_text(encoding="utf-8")
    drawn = str(draw(WIDE).svg(ident, title, desc))
    opening, content = drawn.split("</desc>", 1)
    opening = opening.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    # the page has room around a drawing: marks may stand on its edge
    box = re.search(r'viewBox="0 0 (\S+) (\S+)" width="\S+" height="\S+"', opening)
    assert box is not None
    width, height = (float(side) + 2 * _MARGIN for side in box.groups())
    size = f'viewBox="{-_MARGIN} {-_MARGIN} {width:g} {height:g}" width="{width:g}" '
    opening = opening.replace(box[0], f'{size}height="{height:g}"')
    paper = f'<rect x="{-_MARGIN}" y="{-_MARGIN}" width="100%" height="100%" class="paper"/>'
    return f"{opening}</desc>\n<style>\n{style}</style>\n{paper}{content}\n"


def panels(
    titles: Sequence[tuple[Any, str]],
    draw: Callable[[Canvas, Any, tuple[float, float, float, float]], None],
    entries: Sequence[tuple[str, str, str]],
    width: float,
    *,
    lines: bool = True,
) -> Canvas:
    """Panels of one size in two columns where the page is wide, one legend below them.

    Args:
        titles: key and title of each panel.
        draw: canvas of the panel, its key, and the box (left, top, right, bottom) of its plot.
        entries: of the legend.
        width: px.
        lines: as for `legend`.
    """
    columns = 2 if width > 500 and len(titles) > 1 else 1
    panel_w, panel_h = width / columns, 300.0
    c = Canvas(width, 0)
    for k, (key, title) in enumerate(titles):
        x, y = panel_w * (k % columns), panel_h * (k // columns)
        inner = Canvas(panel_w - (16 if columns == 2 and k % 2 == 0 else 0), panel_h)
        inner.text(0, 12, shortened(title, inner.width, bold=True), cls="strong")
        draw(inner, key, (40, 48, inner.width - 10, panel_h - 52))
        c.parts.append(f'<g transform="translate({x:g} {y:g})">{"".join(inner.parts)}</g>')
    below = panel_h * math.ceil(len(titles) / columns) + 8
    c.height = legend(c, entries, below, width, lines=lines)
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


def whisker(p: Plot, x: float, r: Row, cls: str) -> None:
    """One standard deviation up and down."""
    if sd := r["score_sd"]:
        p.canvas.line(x, p.y(r["score"] - sd), x, p.y(r["score"] + sd), f"line {cls}")


def ends(rows: Sequence[Row]) -> list[float]:
    """All that is drawn of scores: one standard deviation below to one above."""
    return [r["score"] + side * (r["score_sd"] or 0) for r in rows for side in (-1, 1)]


def best_names(rows: Sequence[Row], most: int) -> list[str]:
    """Names of at most so many systems, by their highest score."""
    best: dict[str, float] = {}
    for r in rows:
        best[r["name"]] = max(best.get(r["name"], -math.inf), r["score"])
    return sorted(best, key=lambda name: (-best[name], name))[:most]


def tip(r: Row) -> str:
    """What shows where the pointer rests on a system's mark."""
    where = r["checkpoint"]
    if r["trained_on"] != where:
        where = f"{where}, trained on {r['trained_on']}"
    sd = f" ± {r['score_sd']:.1f} (n = {r['seeds']})" if r["score_sd"] else ""
    against = "" if r["difference"] is None else f", {signed(r['difference'])} against BERT"
    return f"{r['name']} at {where}: {r['score']:.1f}{sd}{against}"
