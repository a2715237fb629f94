"""SVG by hand: escaped elements, scales with round ticks, labels that do not collide.

Drawings carry no colours of their own: classes such as ``s0`` (first series) take theirs from the
page's style sheet, so that they follow its theme. Sizes are CSS pixels; text is 12 px high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

SERIES = 8
"""Classes ``s0`` to ``s7`` that the style sheet knows; a ninth series looks like the first."""
SHAPES = ("circle", "square", "diamond", "up", "down", "cross")
LINE = 15.0
"""Height of a line of text."""


@dataclass
class Canvas:
    """A drawing that grows by elements; `svg` closes it."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        """A straight line."""
        self.parts.append(
            f'<line class="{cls}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], cls: str) -> None:
        """A line through points."""
        d = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.parts.append(f'<path class="{cls}" d="{d}"/>')

    def rect(
        self, x: float, y: float, w: float, h: float, cls: str, *, tip: str = "", opacity: float = 1
    ) -> None:
        """A filled rectangle; ``tip`` shows where the pointer rests."""
        faint = "" if opacity == 1 else f' fill-opacity="{opacity:.3f}"'
        self.parts.append(
            f'<rect class="{cls}" x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"{faint}>'
            f"{_tip(tip)}</rect>"
        )

    def marker(self, shape: str, x: float, y: float, cls: str, *, r: float = 4, tip: str) -> None:
        """A point of a shape of `SHAPES`, about ``2 r`` wide."""
        if shape == "circle":
            start = f'<circle class="{cls}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}"'
            self.parts.append(f"{start}>{_tip(tip)}</circle>")
            return
        a, b, t = r * 0.9, r * 1.25, r * 0.5
        corners = {
            "square": [(-a, -a), (a, -a), (a, a), (-a, a)],
            "diamond": [(0, -b), (b, 0), (0, b), (-b, 0)],
            "up": [(0, -b), (b, a), (-b, a)],
            "down": [(0, b), (b, -a), (-b, -a)],
            "cross": [(-b, t - b), (t - b, -b), (0, -t), (b - t, -b), (b, t - b), (t, 0)]
            + [(b, b - t), (b - t, b), (0, t), (t - b, b), (-b, b - t), (-t, 0)],
        }[shape]
        d = "M" + "L".join(f"{_n(x + dx)} {_n(y + dy)}" for dx, dy in corners) + "Z"
        self.parts.append(f'<path class="{cls}" d="{d}">{_tip(tip)}</path>')

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", cls: str = "", turn: int = 0
    ) -> None:
        """Text with its baseline at y; ``anchor`` start, middle or end."""
        at = f'x="{_n(x)}" y="{_n(y)}"'
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        turned = f' transform="rotate({turn} {_n(x)} {_n(y)})"' if turn else ""
        named = f' class="{cls}"' if cls else ""
        self.parts.append(f"<text {at}{where}{turned}{named}>{escape(text)}</text>")

    def put(self, other: Canvas, x: float, y: float) -> None:
        """Another drawing, its upper left corner at (x, y)."""
        self.parts.append(f'<g transform="translate({x:g} {y:g})">{"".join(other.parts)}</g>')

    def svg(self, ident: str, title: str, desc: str, *, margin: float = 0) -> Markup:
        """The whole element.

        Args:
            ident: unique in the page.
            title: what it is, for readers that do not see it.
            desc: what one should see in it.
            margin: room around it, px.
        """
        width, height = _n(self.width + 2 * margin), _n(self.height + 2 * margin)
        size = f'viewBox="{_n(-margin)} {_n(-margin)} {width} {height}" width="{width}"'
        return Markup(
            f'<svg role="img" aria-labelledby="{ident}-t {ident}-d" {size} '
            f'height="{height}"><title id="{ident}-t">{escape(title)}</title>'
            f'<desc id="{ident}-d">{escape(desc)}</desc>{"".join(self.parts)}</svg>'
        )


@dataclass(frozen=True)
class Plot:
    """The rectangle of a canvas that data are drawn in, with its two scales."""

    canvas: Canvas
    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False

    def x(self, value: float) -> float:
        """Horizontal place of a value."""
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Vertical place of a value."""
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def axes(
        self,
        x_ticks: Sequence[tuple[float, str]],
        x_label: str,
        y_label: str,
        *,
        y_ticks: Sequence[float] | None = None,
        y_text: Callable[[float], str] = "{:g}".format,
    ) -> None:
        """Horizontal grid lines, ticks and both labels; the upper label stands above its axis."""
        c = self.canvas
        if y_ticks is None:
            y_ticks = ticks(*self.y_range)
        for value in y_ticks:
            c.line(self.left, self.y(value), self.right, self.y(value), "grid")
            c.text(self.left - 6, self.y(value) + 4, y_text(value), anchor="end", cls="tick")
        c.line(self.left, self.bottom, self.right, self.bottom, "axis")
        taken = -math.inf
        for value, name in x_ticks:
            place, half = self.x(value), text_width(name) / 2
            c.line(place, self.bottom, place, self.bottom + 4, "axis")
            if place - half > taken:
                c.text(place, self.bottom + 17, name, anchor="middle", cls="tick")
                taken = place + half + 4
        c.text((self.left + self.right) / 2, self.bottom + 34, x_label, anchor="middle")
        c.text(0, self.top - 10, y_label)


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten) within [low, high], at most ``most``."""
    span = high - low
    power = 10 ** math.floor(math.log10(span / most))
    step = next(f * power for f in (1, 2, 5, 10) if span / (f * power) <= most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def round_range(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    """A range that holds all values with some air, from one round value to another."""
    low, high = min(values), max(values)
    air = max((high - low) * margin, 0.5)
    power = 10 ** math.floor(math.log10((high - low + 2 * air) / 5))
    return math.floor((low - air) / power) * power, math.ceil((high + air) / power) * power


def text_width(text: str, *, bold: bool = False) -> float:
    """Width in px, rather too much: fonts differ by system, and the widest must fit."""
    width = sum(
        0.36 if letter in ".ijl|" else 0.42 if letter in "-rt,() " else 0.62 for letter in text
    )
    return width * (14 if bold else 12)


def shortened(text: str, room: float, *, bold: bool = False) -> str:
    """The text, with its end left out where it is wider than ``room`` px."""
    if text_width(text, bold=bold) <= room:
        return text
    while text and text_width(text + "…", bold=bold) > room:
        text = text[:-1]
    return text + "…"


class Labels:
    """Labels beside points, each where it covers no point and no other label, else left out."""

    def __init__(self, plot: Plot, points: Sequence[tuple[float, float]]) -> None:
        """Begin with the points that must stay free, as places in px."""
        self.plot = plot
        self.boxes = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]

    def add(self, x: float, y: float, text: str, cls: str = "") -> bool:
        """Write a label near (x, y) px; False where there is no room."""
        w = text_width(text, bold="strong" in cls)
        for dx, dy, anchor in (
            (8, 4, "start"),
            (-8, 4, "end"),
            (0, -9, "middle"),
            (0, 17, "middle"),
            (7, -7, "start"),
            (-7, -7, "end"),
            (7, 15, "start"),
            (-7, 15, "end"),
        ):
            left = x + dx - {"start": 0.0, "middle": w / 2, "end": w}[anchor]
            box = (left, y + dy - 11, left + w, y + dy + 3)
            p = self.plot
            inside = box[0] >= p.left and box[2] <= p.canvas.width and box[1] >= p.top - 2
            if inside and box[3] <= p.bottom and not any(_overlap(box, b) for b in self.boxes):
                self.boxes.append(box)
                p.canvas.text(x + dx, y + dy, text, anchor=anchor, cls=cls)
                return True
        return False


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _n(value: float) -> str:
    """A coordinate with at most one decimal: small files, and the same on every machine."""
    return f"{round(value, 1) + 0.0:g}"  # + 0.0: no "-0"
