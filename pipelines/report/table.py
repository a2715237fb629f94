"""Tables of the report: rows of plain values, shown in the page and written as CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertvision.pipelines.results.columns import FOOTNOTE, MARK, ORACLE_NOTE, Column, lack_oracle
from bertvision.pipelines.text import csv_text, fill, format_table


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
    """What its scores rest on: items, seeds, intervals."""
    remarks: Sequence[str] = ()
    """What is to be said below it."""
    joined: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]] | None = None
    """What becomes of its rows with those of other workspaces below them; None leaves them."""

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
        """What the mark behind a system's name says, and a missing score, where there are any."""
        cells = (row.get(column.key) for row in self.rows for column in self.columns)
        found = [FOOTNOTE] if any(str(cell).endswith(MARK) for cell in cells) else []
        found += self.remarks
        shown = any(column.key == "best_f1" for column in self.columns)
        return [*found, ORACLE_NOTE] if shown and lack_oracle(self.rows) else found

    def text(self) -> str:
        """The rows as people read them, for a terminal, with the caption above and notes below."""
        columns = [Column(self.group, "", "text")] * bool(self.group) + list(self.columns)
        lines = [[column.text(row) for column in columns] for row in self.rows]
        table = format_table([column.label for column in columns], lines)
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
