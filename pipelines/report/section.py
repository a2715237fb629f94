"""A section of the report: figures, tables and examples under one heading.

A section whose data are not in the workspace says in one line which command makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.drawing.figures import WIDE, both, standalone
from bertvision.pipelines.drawing.svg import Canvas
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.rows import Row

HEADS = "heads/<trained on>/<head>/eval/<evaluated on>/metrics.json"

BERT = "bert/<snapshot>/metrics.json"

NO_SYSTEM = "without any system"
"""Heading of the row of never answering, or of the largest class."""

EVALUATE = "bertvision evaluate HEAD… --trained-on TAG --checkpoint TAG"


@dataclass(frozen=True)
class Figure:
    """A drawing with what belongs to it."""

    ident: str
    """Unique in the page, and the name of its file."""
    svg: Markup
    """For wide and narrow pages."""
    file: str
    """The drawing as an SVG file of its own."""
    caption: str
    """What one should see."""
    source: str
    """The files its numbers stand in."""
    command: str
    """The command that makes them."""


@dataclass(frozen=True)
class Example:
    """A question with its answers, to be read."""

    heading: str
    """What kind of example it is."""
    question: str
    """The question."""
    context: str
    """The paragraph, or what is kept of it."""
    answers: Sequence[tuple[str, str]]
    """Who answers (gold, BERT, a head), and what."""


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    ident: str
    """Its anchor."""
    title: str
    """Its heading."""
    lead: str = ""
    """How to read it; words between backticks are code."""
    notes: Sequence[str] = ()
    """What else is to be said, item by item, likewise."""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    examples: Sequence[Example] = ()
    missing: str = ""
    """Instead of all these: what makes the data."""


def make_figure(
    ident: str,
    name: str,
    caption: str,
    source: str,
    command: str,
    draw: Callable[[float], Canvas],
) -> Figure:
    """A figure for wide and narrow pages.

    Args:
        ident: unique in the page.
        name: what it is, for readers that do not see it.
        caption: what one should see.
        source: the files its numbers stand in.
        command: what makes them.
        draw: width in px → the drawing.
    """
    return Figure(
        ident,
        both(ident, name, caption, draw),
        standalone(ident, name, caption, draw(WIDE)),
        caption,
        source,
        command,
    )


def pair(r: Mapping[str, Any]) -> tuple[SnapshotTag, SnapshotTag]:
    """Snapshot trained on and snapshot evaluated on, to sort by."""
    return SnapshotTag(r["trained_on"]), SnapshotTag(r["checkpoint"])


def order(r: Row) -> tuple[Any, ...]:
    """BERT, also in 8 bits, heads, ensembles; by name, more data first, then by seed."""
    system = ("bert", "quantised", "head", "ensemble").index(r["system"])
    return system, r["name"], -r["fraction"], r.get("seed")


def heading(r: Row) -> str:
    """The pair of snapshots in words."""
    if r["trained_on"] == r["checkpoint"]:
        return f"trained and evaluated on {r['checkpoint']}"
    return f"trained on {r['trained_on']}, evaluated on {r['checkpoint']}"
