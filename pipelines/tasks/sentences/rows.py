"""Rows of a source → sentences with labels, each row checked, an error naming its line.

How files become rows is in `tables`. Nothing heavy is imported, so that a missing column is
reported at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskData
from bertvision.pipelines.tasks.tables import (
    ID,
    MAX_CHARACTERS,
    Collector,
    Column,
    Layout,
    Row,
    Table,
    check_text,
    read_table,
)

_Row = TypeVar("_Row")


class _HasNumber(Protocol):
    @property
    def number(self) -> int: ...


_Numbered = TypeVar("_Numbered", bound=_HasNumber)


class RawSentence(NamedTuple):
    """A row as it was written, before its label is looked up."""

    id: str
    text: str
    pair: str | None
    label: str | None
    extra: Any = None
    """Further fields that a task reads of the row (see `SentenceRows.extras`)."""


class SentenceRows:
    """Collects the sentences of one split of one source, and what was skipped.

    Args:
        source: Beginning of messages, such as the path of the file.
        skip_bad: Leave malformed rows out and list them, instead of refusing the source.
        empty: Whether a text may be empty.
    """

    def __init__(self, source: str, *, skip_bad: bool, empty: bool = False) -> None:
        self.source = source
        self.empty = empty
        self._found = Collector(source, skip_bad=skip_bad)
        self.skipped = self._found.skipped

    def add(
        self, rows: Iterable[tuple[str, _Row]], parse: Callable[[_Row], RawSentence | None]
    ) -> SentenceRows:
        """Parse rows and check their texts and ids.

        Args:
            rows: (place, such as ``line 3``; row).
            parse: makes a sentence of a row, or None of a row that is of another split; raises
                `InputError` where it cannot.

        Raises:
            InputError: a row is malformed, and is not to be skipped; or no row is left.
        """
        for place, row in rows:
            with self._found.part(place):
                if (raw := parse(row)) is not None:
                    text, pair = self._text(raw.text, "text"), raw.pair
                    pair = None if pair is None else self._text(pair, "second text")
                    label = raw.label and raw.label.strip()
                    self._found.take(raw._replace(text=text, pair=pair, label=label), place)
        self._found.require(self._found.items)
        return self

    def add_lines(
        self, lines: Iterable[_Numbered], parse: Callable[[_Numbered], RawSentence | None]
    ) -> SentenceRows:
        """As `add`, of the lines of a file, or of what begins on them.

        Args:
            lines: Lines with ``number``.
            parse: As in `add`.

        Raises:
            InputError: as in `add`.
        """
        return self.add(((f"line {line.number}", line) for line in lines), parse)

    @property
    def labels(self) -> set[str]:
        """The distinct labels, as they are written."""
        return {raw.label for raw in self._found.items if raw.label}

    @cached_property
    def extras(self) -> dict[str, Any]:
        """Further fields of the rows that were taken, by id."""
        return {raw.id: raw.extra for raw in self._found.items}

    def classified(
        self, classes: Sequence[str], digest: str | None, also: Mapping[str, int] | None = None
    ) -> TaskData:
        """The sentences, labelled by the index of their class.

        Args:
            classes: names, in the order of their indices.
            digest: Digest of the source's bytes; None takes that of the rows.
            also: other ways in which a source may write a class → its index.

        Raises:
            InputError: a label is missing or no class, and is not to be skipped; or no row is left.
        """
        known = {**(also or {}), **{name: i for i, name in enumerate(classes)}}

        def index(label: str) -> int:
            if label not in known:
                named = ", ".join(classes[:10]) + (", …" if len(classes) > 10 else "")
                raise InputError(
                    f"the label {label!r} is none of the {len(classes)} classes: {named}"
                )
            return known[label]

        return self._labelled(index, digest, tuple(classes))

    def scored(self, digest: str | None) -> TaskData:
        """The sentences, labelled by a score.

        Args:
            digest: Digest of the source's bytes; None takes that of the rows.

        Raises:
            InputError: a score is missing or no finite number, and is not to be skipped; or no row
                is left.
        """
        return self._labelled(_number, digest, ())

    def _labelled(
        self, value: Callable[[str], int | float], digest: str | None, classes: tuple[str, ...]
    ) -> TaskData:
        items = []
        for raw in self._found.items:
            with self._found.part(self._found.places[raw.id]):
                if not raw.label:
                    raise InputError("has no label")
                items.append(Sentence(raw.id, raw.text, raw.pair, value(raw.label)))
        self._found.require(items)
        return TaskData(items, digest or _digest(items), self.skipped, classes)

    def _text(self, text: str, what: str) -> str:
        """A text without spaces around it, which some tokenizers would take for tokens."""
        text = text.strip()
        if not text and not self.empty:
            raise InputError(f"the {what} is empty")
        return check_text(text, f"the {what}", MAX_CHARACTERS)


def sentence_rows(
    table: Table,
    *,
    numbered: bool = False,
    skip_bad: bool,
    empty: bool = False,
    check: Callable[[RawSentence], RawSentence | None] | None = None,
) -> SentenceRows:
    """The sentences of a table with the columns ``text`` and ``label``, and perhaps ``pair``.

    Args:
        table: Its other columns are the sentences' ``extra``.
        numbered: Whether rows have their number as id, which tells them apart where none has a name
            of its own; else they are named by their place.
        skip_bad: Leave malformed rows out and list them, instead of refusing the source.
        empty: Whether a text may be empty.
        check: As ``parse`` of `SentenceRows.add`, of a sentence.

    Raises:
        InputError: as `SentenceRows.add`.
    """

    def parse(row: Row) -> RawSentence | None:
        fields = row.fields
        ident = fields.pop("id", None) or (str(row.number) if numbered else row.place)
        texts = fields.pop("text"), fields.pop("pair", None)
        raw = RawSentence(ident, *texts, fields.pop("label"), fields)
        return check(raw) if check else raw

    rows = SentenceRows(table.source, skip_bad=skip_bad, empty=empty)
    return rows.add(((row.place, row) for row in table.rows), parse)


def sorted_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: as numbers where all of them are integers, else by their characters."""
    distinct = set(labels)
    try:
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(distinct))


def _number(label: str) -> float:
    try:
        score = float(label)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise InputError(f"the score {label!r} is no finite number")
    return score


def _digest(items: Sequence[Sentence]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item, separators=(",", ":")).encode())
    return digest.hexdigest()


FORMS = (".csv", ".tsv", ".jsonl")
"""Forms of files of labelled sentences with named columns."""


class Columns(NamedTuple):
    """Names of the columns, as the user gave them."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    other: str | None = None
    """A further column, whose values are any."""

    @property
    def layout(self) -> Layout:
        """The layout of a file with these columns."""
        columns = {"text": Column((self.text,)), "label": Column((self.label,), "label")}
        if self.pair is not None:
            columns["pair"] = Column((self.pair,))
        if self.other is not None:
            columns["other"] = Column((self.other,), "json")
        if "id" not in self:
            columns["id"] = ID
        hint = (
            "name those of the text and of its label with --text and --label, where they are not "
            "'text' and 'label', and that of a second text with --pair"
            if self.other is None
            else "name a column that every row has"
        )
        return Layout(columns, hint=hint)


def check_columns(path: Path, columns: Columns) -> None:
    """Refuse a file whose header lacks a column; of JSON lines, each has its own.

    Raises:
        InputError: it does, or it cannot be read.
    """
    read_table(path, columns.layout, forms=FORMS)
