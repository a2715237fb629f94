"""A section of the report: figures, tables and examples under one heading; parts of captions.

A section whose data are not in the workspace says in one line which command makes them. A table
declares its columns once; the page, the terminal, CSV and JSON come from these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.plotting import Chart, Panel, composed, panels
from bertvision.pipelines.results.columns import Column, footnotes, grouped, table_of
from bertvision.pipelines.results.rows import Results, Row
from bertvision.pipelines.text import csv_text, fill, signed
from bertvision.pipelines.workspace.workspace import Workspace

DIFFERENT = (
    "The workspaces have different data (the column says which): their scores are of other items "
    "and are not to be compared."
)
"""The remark below a table of workspaces whose data differ."""


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    name: str
    """Name of its files, ``tables/<name>.csv`` and ``.json``."""
    title: str
    """Caption in the page."""
    columns: Sequence[Column]
    """In order; the first one heads its row."""
    rows: Sequence[Mapping[str, Any]]
    """Values by the keys of the columns; what no column shows is left out."""
    source: str
    """The files that the values stand in; empty where each row names its own."""
    command: str
    """The command that makes these files."""
    group: str = ""
    """Key whose value stands above its rows as a heading; empty for none."""
    more: Sequence[str] = ()
    """Keys that only CSV and JSON have."""
    trace: bool = False
    """Whether rows have ``file`` and ``command`` of their own (in CSV and JSON)."""

    basis: str = ""
    """Foundation of its scores: items, seeds, intervals."""
    remarks: Sequence[str] = ()
    """Sentences below it."""
    joined: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]] | None = None
    """Function of its rows together with those of other workspaces; None leaves them."""

    @property
    def breadth(self) -> str:
        """Class by which print makes wide tables smaller, and turns the page for the widest."""
        letters = 0
        for column in self.columns:
            longest = max([len(column.text(row)) for row in self.rows], default=0)
            letters += 3 + (longest if column.is_number else min(longest, 14))
        sizes = (90, ""), (120, "many"), (200, "many huge")
        return next((name for most, name in sizes if letters < most), "many huge tiny")

    @property
    def notes(self) -> list[str]:
        """Its `footnotes`, then the remarks."""
        return [*footnotes(self.columns, self.rows), *self.remarks]

    def text(self) -> str:
        """The rows as people read them, for a terminal, with the caption above and notes below."""
        columns = [Column(self.group, "", "text")] * bool(self.group) + list(self.columns)
        table = table_of(columns, self.rows)
        above = [fill(text) for text in (self.title, self.basis) if text]
        return "\n".join([*above, "", table, *map(fill, self.notes)])

    def keys(self) -> list[str]:
        """The header of CSV and JSON."""
        keys = [self.group] if self.group else []
        for column in self.columns:
            keys += [column.key, f"{column.key}_sd"] if column.sd else [column.key]
            keys += [f"{column.key}_difference"] * column.gain
            ends = [f"{column.key}_{end}" for end in ("low", "high")] if column.sd else []
            keys += [end for end in ends if any(row.get(end) is not None for row in self.rows)]
        return [*keys, *self.more, *(["file", "command"] if self.trace else [])]

    def csv(self) -> str:
        """The rows as CSV; see `csv_text`."""
        return csv_text(self.rows, self.keys())

    def json(self) -> str:
        """Title, what it rests on, origin, columns with their labels, and rows."""
        keys = self.keys()
        value = {
            "title": self.title,
            "basis": self.basis,
            "source": self.source,
            "command": self.command,
            "columns": {c.key: c.label for c in self.columns},
            "rows": [{key: row.get(key) for key in keys} for row in self.rows],
        }
        return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def beside(parts: Sequence[tuple[Path, str, Table]]) -> Table:
    """The same table of several workspaces, their rows below each other.

    Rows of one group (a data set, a pair of snapshots) stand together.

    Args:
        parts: Folder, digest of the data, and table of each workspace.
    """
    labels, tables = _labels([root for root, _, _ in parts]), [table for _, _, table in parts]
    rows = [
        {"workspace": label, "data": data, **row}
        for label, (_, data, table) in zip(labels, parts, strict=True)
        for row in table.rows
    ]
    first = tables[0]
    if first.group:
        groups = list(dict.fromkeys(row[first.group] for row in rows))
        rows.sort(key=lambda row: groups.index(row[first.group]))
    rows = rows if first.joined is None else [dict(row) for row in first.joined(rows)]
    differ = _differ(rows, first)
    own = [Column("workspace", "workspace", "text")] + [Column("data", "data", "text")] * differ
    return replace(
        first,
        title=f"{first.title}; of several workspaces",
        basis="",
        columns=[*own, *columns_of_all(tables)],
        rows=rows,
        more=list(dict.fromkeys(key for table in tables for key in table.more))
        + ["data"] * (not differ),
        remarks=[DIFFERENT] if differ else [],
    )


def columns_of_all(tables: Sequence[Table]) -> list[Column]:
    """The columns of several tables; one that is called otherwise in another has both names.

    So it is with the score, which is another metric where the task is another.
    """
    columns_of_table = (column for table in tables for column in table.columns)
    return [
        replace(columns[0], label=" / ".join(dict.fromkeys(column.label for column in columns)))
        for columns in grouped(columns_of_table, attrgetter("key")).values()
    ]


def _differ(rows: Sequence[Mapping[str, Any]], table: Table) -> bool:
    """Whether rows that stand for the same in several workspaces are of different data.

    They are those of one group. A group that holds several data sets of a workspace (a snapshot's
    probes) is parted by its first column, which names them.
    """
    of_one: dict[tuple[Any, Any], set[Any]] = {}
    for row in rows:
        of_one.setdefault((row.get(table.group), row["workspace"]), set()).add(row["data"])
    several = {group for (group, _), data in of_one.items() if len(data) > 1}
    same: dict[tuple[Any, Any], set[Any]] = {}
    for row in rows:
        group = row.get(table.group)
        part = row.get(table.columns[0].key) if group in several else None
        same.setdefault((group, part), set()).add(row["data"])
    return any(len(data) > 1 for data in same.values())


def _labels(roots: Sequence[Path]) -> list[str]:
    """Names of folders, with as much of the path as tells them apart."""
    names = [root.name for root in roots]
    return [
        name if names.count(name) == 1 else str(root)
        for name, root in zip(names, roots, strict=True)
    ]


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
