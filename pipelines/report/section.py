"""A section of the report: figures, tables and examples under one heading; parts of captions.

A section whose data are not in the workspace says in one line which command makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.plotting import Chart, Panel, composed, panels
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.rows import Results, Row
from bertvision.pipelines.text import signed
from bertvision.pipelines.workspace.workspace import Workspace

HEADS = "heads/<trained on>/<head>/eval/<evaluated on>/metrics.json"

BERT = "bert/<snapshot>/metrics.json"

NO_SYSTEM = "without any system"
"""Heading of the row of never answering, or of the largest class."""

EVALUATE = "bertvision evaluate HEAD… --trained-on TAG --checkpoint TAG"

OF_HEADS = (HEADS, EVALUATE)
"""Origin of the scores of heads: the files, and the command that makes them."""
SEEDS = Column("seeds", "seeds", "count")
PERCENT = Column("percent", "% of the encoder", digits=3)
RETENTION = Column("retention", "retention (%)")
SPEED_UP = Column("speed_up", "speed-up (×)", digits=2)

ENDS = ("sd", "low", "high")
"""Ends of the keys of a score's deviation over seeds and of the ends of its interval."""


@dataclass(frozen=True, eq=False)
class Figure:
    """Charts with their caption and their origin."""

    ident: str
    """Name that is unique in the page, and the name of its file."""
    name: str
    """Name in words, for readers that do not see it."""
    caption: str
    """Description of what one should see."""
    source: str
    """The files its numbers stand in."""
    command: str
    """The command that makes them."""
    charts: Sequence[Chart]

    @cached_property
    def panels(self) -> list[Panel]:
        """The charts as SVG, which is drawn once."""
        return panels(self.ident, self.name, self.charts)

    @property
    def file(self) -> str:
        """The figure as an SVG file of its own."""
        return composed(self.ident, self.name, self.caption, self.panels)


@dataclass(frozen=True)
class Example:
    """A question with its answers, to be read."""

    heading: str
    """Kind of example."""
    question: str
    context: str
    """The paragraph, or what is kept of it."""
    answers: Sequence[tuple[str, str]]
    """Pairs of who answers (gold, BERT, a head), and the answer."""


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    ident: str
    """Its anchor."""
    title: str
    """Its heading."""
    lead: str = ""
    """Advice for reading it; words between backticks are code."""
    notes: Sequence[str] = ()
    """Remarks, item by item, likewise."""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    examples: Sequence[Example] = ()
    missing: str = ""
    """Instead of all these: what makes the data."""


class Reading(NamedTuple):
    """A workspace as a section reads it."""

    workspace: Workspace
    results: Results
    """Rows of everything that was scored."""
    left_out: list[str]
    """Gets a message for each file that is damaged, or of other weights than there are now."""
    methods: Section | None = None
    """The section of methods with several seeds, where some were named."""


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


def floor_of(results: Results) -> str:
    """The name of the trivial answer inside a sentence; empty where it has no score."""
    return results.trivial[0]["name"].strip("()") if results.trivial else ""


def tip(r: Mapping[str, Any]) -> str:
    """The text where the pointer rests on a system's mark."""
    where = r["checkpoint"]
    if r["trained_on"] != where:
        where = f"{where}, trained on {r['trained_on']}"
    sd = f" ± {r['score_sd']:.1f} (n = {r['seeds']})" if r["score_sd"] else ""
    against = "" if r["difference"] is None else f", {signed(r['difference'])} against BERT"
    return f"{r['name']} at {where}: {r['score']:.1f}{sd}{against}"


def scored(r: Row, key: str, metric: str = "score") -> Row:
    """A score under another key, with its deviation and its interval.

    Args:
        r: Row of a system.
        key: The new key.
        metric: Key of the score.
    """
    return {key: r.get(metric), **{f"{key}_{end}": r.get(f"{metric}_{end}") for end in ENDS}}


def of_bert(results: Results, r: Row) -> Row:
    """BERT's score that a row is compared with, under ``bert``, with its interval.

    Args:
        results: Rows of the workspace.
        r: Row of a system.
    """
    there = (b for b in results.bert if b["checkpoint"] == r["checkpoint"])
    return scored({} if r["bert"] is None else next(there), "bert")


def basis(results: Results, rows: Sequence[Row], *, shown: bool = False) -> str:
    """A caption's sentence on what scores rest on: items, seeds, and what an interval covers.

    Args:
        results: Rows of the workspace.
        rows: Rows that are shown, of heads among others.
        shown: Whether intervals stand in the cells, not in the files alone.
    """
    several = any(r["seeds"] > 1 for r in rows if r["system"] != "bert")
    text = counts(results, rows) + (", mean ± standard deviation" if several else "")
    if any(r.get("score_low") is not None for r in rows):
        where = "in brackets" if shown else "in the files"
        text += f"; {where} 95 % intervals over {results.items}, those of one text drawn together"
        if several:
            n = min(r["seeds"] for r in rows if r["system"] != "bert" and r["seeds"] > 1)
            text += (
                ", and over seeds where there are several (too narrow for few seeds: of "
                f"{n} drawn again {100 * ((n - 1) / n) ** 0.5:.0f} % of their spread is left)"
            )
        elif any(r["system"] != "bert" for r in rows):
            text += ": they do not cover the choice of the seed"
    return text and f"{text[0].upper()}{text[1:]}."


def counts(results: Results, rows: Sequence[Row]) -> str:
    """The numbers of items and of seeds: ``450 questions, one seed``.

    Args:
        results: Rows of the workspace.
        rows: Rows that are shown, of heads among others.
    """
    seeds = sorted({r["seeds"] for r in rows if r["system"] != "bert"})
    parts = [f"{results.questions:,} {results.items}"] if results.questions else []
    if seeds:
        most = "one seed" if seeds == [1] else f"{seeds[-1]} seeds"
        parts.append(f"{seeds[0]} to {most}" if len(seeds) > 1 else most)
    return ", ".join(parts)
