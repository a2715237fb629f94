"""Heat maps: cells in rows and columns, their titles, and the scale of their colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bertvision.pipelines.drawing.svg import LINE, Canvas, text_width


class Cell(NamedTuple):
    """A cell of a heat map."""

    cls: str
    """Colour: a class of a series, such as ``s0``, or ``none`` for grey."""
    strength: float
    """How much of that colour, from 0 (paper) to 1."""
    texts: Sequence[str]
    """What is written in it, at most two lines; none where there is no room."""
    tip: str
    """What shows where the pointer rests on it."""


def heat_map(
    c: Canvas,
    origin: tuple[float, float],
    size: tuple[float, float],
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[int, int], Cell],
    *,
    below: bool = False,
) -> None:
    """Cells with the titles of their rows and columns, as many of these as there is room for.

    Args:
        c: where to draw.
        origin: (x, y) of the upper left corner of the first cell, px.
        size: (width, height) of a cell, px.
        rows: titles, from top to bottom; they end left of the cells.
        columns: titles, from left to right.
        cells: (row, column) → what is there.
        below: the titles of the columns stand below the cells, not above them.
    """
    (x0, y0), (w, h) = origin, size
    for i in range(0, len(rows), math.ceil(LINE / h)):
        c.text(x0 - 6, y0 + h * (i + 0.5) + 4, rows[i], anchor="end", cls="tick")
    at = y0 + h * len(rows) + 16 if below else y0 - 6
    for j in range(0, len(columns), math.ceil((max(map(text_width, columns)) + 3) / w)):
        c.text(x0 + w * (j + 0.5), at, columns[j], anchor="middle", cls="tick")
    rim = 1.0 if w > 12 else 0.0  # narrow cells would be little but rim
    for (i, j), (cls, strength, texts, tip) in cells.items():
        x, y = x0 + w * j, y0 + h * i
        inner = x + rim, y + rim, w - 2 * rim, h - 2 * rim
        c.rect(*inner, f"cell {cls}", tip=tip, opacity=strength)
        places = [4] if len(texts) == 1 else [-3, 13]
        for k, (text, dy) in enumerate(zip(texts, places, strict=False)):
            small = "small" if k or w < 44 else ""
            c.text(x + w / 2, y + h / 2 + dy, text, anchor="middle", cls=small)
