"""SVG files, taken apart: their texts, the room these take, what covers what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

SVG = "{http://www.w3.org/2000/svg}"
_MEASURE = TextToPath()


class Text(NamedTuple):
    """A text and the room it takes: left, top, right, bottom, px."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


class Drawing:
    """A figure's file."""

    def __init__(self, path: Path) -> None:
        self.root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert self.root.tag == f"{SVG}svg"
        self.boxes: list[Text] = []
        self._collect(self.root, 0.0, 0.0)

    @property
    def texts(self) -> list[str]:
        """All texts, as they are drawn."""
        return [box.text for box in self.boxes]

    @property
    def tips(self) -> list[str]:
        """The texts where the pointer rests on a mark."""
        marks = [*self.root.iter(f"{SVG}use"), *self.root.iter(f"{SVG}path")]
        return [str(title.text) for mark in marks for title in mark.iter(f"{SVG}title")]

    def faults(self) -> list[str]:
        """Texts that leave the figure or cover another text."""
        x, y, width, height = map(float, self.root.attrib["viewBox"].split())
        found = [
            f"{box.text} leaves the figure"
            for box in self.boxes
            if box.left < x or box.top < y or box.right > x + width or box.bottom > y + height
        ]
        for i, a in enumerate(self.boxes):
            for b in self.boxes[:i]:
                across = min(a.right, b.right) - max(a.left, b.left)
                if across > 1 and min(a.bottom, b.bottom) - max(a.top, b.top) > 4:
                    found.append(f"{a.text} | {b.text}")
        return found

    def _collect(self, element: ElementTree.Element, x: float, y: float) -> None:
        if element.tag == f"{SVG}svg" and element is not self.root:
            x, y = x + float(element.get("x", 0)), y + float(element.get("y", 0))
        if element.tag == f"{SVG}text":
            self.boxes.append(_box(element, x, y))
        for child in element:
            self._collect(child, x, y)


def _box(element: ElementTree.Element, x: float, y: float) -> Text:
    text, style, turn = element.text or "", element.get("style", ""), element.get("transform", "")
    size = float(re.search(r"font-size: ([\d.]+)px", style)[1])  # type: ignore[index]
    font = FontProperties(
        family="DejaVu Sans", size=size, weight=700 if "weight: 700" in style else 400
    )
    width, _, _ = _MEASURE.get_text_width_height_descent(text, font, False)
    moved = re.search(r"translate\(([\d.-]+)[ ,]+([\d.-]+)\)", turn)
    x += float(moved[1] if moved else element.get("x", 0))
    y += float(moved[2] if moved else element.get("y", 0))
    anchor = re.search(r"text-anchor: (\w+)", style)
    before = {"middle": 0.5, "end": 1.0}.get(anchor[1] if anchor else "start", 0.0) * width
    if "rotate(-90" in turn:  # upwards
        return Text(text, x - 0.8 * size, y - width + before, x + 0.2 * size, y + before)
    return Text(text, x - before, y - 0.8 * size, x - before + width, y + 0.2 * size)
