"""SVG files, taken apart: their texts, the room these take, what covers what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from bertvision.pipelines.drawing.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"


class Text(NamedTuple):
    """A text and the room it takes at most: left, top, right, bottom, px."""

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

    def marks(self, name: str) -> list[ElementTree.Element]:
        """The elements of a class."""
        return [e for e in self.root.iter() if name in e.get("class", "").split()]

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
        if moved := re.fullmatch(r"translate\((\S+) (\S+)\)", element.get("transform", "")):
            x, y = x + float(moved[1]), y + float(moved[2])
        if element.tag == f"{SVG}text":
            names, text = element.get("class", "").split(), element.text or ""
            size = 14 / 12 if "title" in names else 11 / 12 if "small" in names else 1.0
            width = size * text_width(text, bold="strong" in names)
            before = {"middle": 0.5, "end": 1.0}.get(element.get("text-anchor", "start"), 0.0)
            left = x + float(element.attrib["x"]) - before * width
            base = y + float(element.attrib["y"])
            self.boxes.append(Text(text, left, base - 11 * size, left + width, base + 3 * size))
        for child in element:
            self._collect(child, x, y)
