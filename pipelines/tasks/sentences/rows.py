"""Rows of a source → sentences with labels, each row checked, an error naming its line.

A file with named columns is CSV, TSV or JSON lines. Nothing heavy is imported, so that a missing
column is reported at once.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskData
from bertvision.pipelines.tasks.source import Line, read_text, text_lines

MAX_CHARACTERS = 500_000
"""The longest sentence taken, in characters."""

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
        source: what messages begin with, such as the path of the file.
        skip_bad: Leave malformed rows out and list them, instead of refusing the source.
        empty: Whether a text may be empty.
    """

    def __init__(self, source: str, *, skip_bad: bool, empty: bool = False) -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.empty = empty
        self.skipped: list[str] = []
        self._rows: list[tuple[str, RawSentence]] = []
        self._first: dict[str, str] = {}  # id → place

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
            with self._row(place):
                raw = parse(row)
                if raw is None:
                    continue
                if first := self._first.get(raw.id):
                    raise InputError(f"the id {raw.id!r} is already that of {first}")
                checked = raw._replace(
                    text=self._text(raw.text, "text"),
                    pair=None if raw.pair is None else self._text(raw.pair, "second text"),
                    label=raw.label and raw.label.strip(),
                )
                self._first[raw.id] = place
                self._rows.append((place, checked))
        self._require(self._rows)
        return self

    def add_lines(
        self, lines: Iterable[_Numbered], parse: Callable[[_Numbered], RawSentence | None]
    ) -> SentenceRows:
        """As `add`, of the lines of a file, or of what begins on them.

        Args:
            lines: with ``number``.
            parse: As in `add`.

        Raises:
            InputError: as in `add`.
        """
        return self.add(((f"line {line.number}", line) for line in lines), parse)

    @property
    def labels(self) -> set[str]:
        """The distinct labels, as they are written."""
        return {raw.label for _, raw in self._rows if raw.label}

    @cached_property
    def extras(self) -> dict[str, Any]:
        """Further fields of the rows that were taken, by id."""
        return {raw.id: raw.extra for _, raw in self._rows}

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
        for place, raw in self._rows:
            with self._row(place):
                if not raw.label:
                    raise InputError("has no label")
                items.append(Sentence(raw.id, raw.text, raw.pair, value(raw.label)))
        self._require(items)
        return TaskData(items, digest or _digest(items), self.skipped, classes)

    @contextmanager
    def _row(self, place: str) -> Iterator[None]:
        """Put source and place in front of an error, or skip the row."""
        try:
            yield
        except InputError as error:
            message = f"{self.source}, {place}: {error}"
            if not self.skip_bad:
                raise InputError(f"{message}. --skip-bad leaves such rows out") from error.__cause__
            self.skipped.append(message)

    def _require(self, rows: Sequence[object]) -> None:
        if not rows:
            why = f" after skipping {len(self.skipped)}: {self.skipped[0]}" if self.skipped else ""
            raise InputError(f"{self.source}: holds no rows{why}")

    def _text(self, text: str, what: str) -> str:
        """A text without spaces around it, which some tokenizers would take for tokens."""
        text = text.strip()
        if not text and not self.empty:
            raise InputError(f"the {what} is empty")
        if len(text) > MAX_CHARACTERS:
            raise InputError(
                f"the {what} has {len(text):,} characters, but at most {MAX_CHARACTERS:,} are taken"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the {what} has the lone surrogate {text[error.start]!r} at character "
                f"{error.start}, which is no Unicode text"
            ) from error
        return text


def require_fields(fields: list[str], names: Sequence[str]) -> list[str]:
    """Return the fields of a row if there is one for each name.

    Raises:
        InputError: there are more or fewer.
    """
    if len(fields) != len(names):
        raise InputError(f"has {len(fields)} fields, expected are {len(names)}: {', '.join(names)}")
    return fields


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
_LONGEST_FIELD = (1 << 31) - 1  # what a C long holds everywhere


class Columns(NamedTuple):
    """Names of the columns, as the user gave them."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"

    @property
    def named(self) -> list[str]:
        """The columns that are named."""
        return [self.text, *([] if self.pair is None else [self.pair]), self.label]


def read_columns(path: Path, columns: Columns, *, skip_bad: bool) -> tuple[SentenceRows, str]:
    """Read a file.

    Args:
        path: Path of the file, in one of `FORMS`, perhaps with ``.gz``.
        columns: Columns that are read.
        skip_bad: Leave malformed rows out, and count them.

    Returns:
        The rows, and the SHA-256 of the file's bytes in hex.

    Raises:
        InputError: the file is malformed or lacks a column.
    """
    text, digest = read_text(_known(path))
    rows = SentenceRows(str(path), skip_bad=skip_bad)
    if _form(path) == ".jsonl":
        return rows.add_lines(text_lines(text), _object_parser(columns)), digest
    records = _records(text, path)
    header = next(records).fields
    return rows.add_lines(records, _record_parser(columns, header, path)), digest


def check_columns(path: Path, columns: Columns) -> None:
    """Refuse a file whose header lacks a column; of JSON lines, each has its own.

    Raises:
        InputError: it does, or it cannot be read.
    """
    text, _ = read_text(_known(path))
    if _form(path) != ".jsonl":
        _record_parser(columns, next(_records(text, path)).fields, path)


def _form(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _known(path: Path) -> Path:
    if _form(path) not in FORMS:
        raise InputError(
            f"{path}: its form is not known: name it {', '.join(FORMS)} or the same with .gz"
        )
    return path


def _records(text: str, path: Path) -> Iterator[_Record]:
    return _csv(text, path) if _form(path) == ".csv" else _tsv(text)


class _Record(NamedTuple):
    number: int  # of the line it begins on
    fields: list[str]


def _record_parser(
    columns: Columns, header: list[str], path: Path
) -> Callable[[_Record], RawSentence]:
    for column in columns.named:
        if header.count(column) != 1:
            times = "more than once" if column in header else "not"
            raise InputError(
                f"{path}, line 1: has the columns {header}, {column!r} {times} among them: name "
                "those of the text and of its label with --text and --label, where they are not "
                "'text' and 'label', and that of a second text with --pair"
            )

    def parse(record: _Record) -> RawSentence:
        row = dict(zip(header, require_fields(record.fields, header), strict=True))
        pair = None if columns.pair is None else row[columns.pair]
        name = row.get("id", "") if "id" not in columns.named else ""
        ident = name or _line_id(record.number)
        return RawSentence(ident, row[columns.text], pair, row[columns.label])

    return parse


def _object_parser(columns: Columns) -> Callable[[Line], RawSentence]:
    def parse(line: Line) -> RawSentence:
        try:
            row = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"is not JSON that can be read: {error}") from error
        if not isinstance(row, dict):
            raise InputError("is JSON, but no object")
        if missing := [column for column in columns.named if column not in row]:
            raise InputError(
                f"has the keys {list(row)}, but not {missing}: name those of the text and of its "
                "label with --text and --label, where they are not 'text' and 'label'"
            )
        texts = [row[column] for column in columns.named[:-1]]
        label = row[columns.label]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{' and '.join(columns.named[:-1])} must be strings: {texts}")
        if not isinstance(label, str | int | float | None):
            raise InputError(f"the label {label!r} must be a string or a number")
        name = row.get("id") if "id" not in columns.named else None
        if not isinstance(name, str | int | float | None):
            raise InputError(f"the id {name!r} must be a string or a number")
        return RawSentence(
            _line_id(line.number) if name in (None, "") else str(name),
            texts[0],
            texts[1] if texts[1:] else None,
            None if label is None else _written(label),
        )

    return parse


def _csv(text: str, path: Path) -> Iterator[_Record]:
    """The records of a file with the lines they begin on, the header first; blank ones left out."""
    # csv's own limit, 131,072 characters, is below that of a text, which is checked by row
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin = 1
    try:
        for record in reader:
            if record:
                yield _Record(begin, record)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}, line {begin}: is no CSV ({error}): write a quotation mark in a quoted field "
            "twice, or give the file as .tsv, where quotes are text"
        ) from error


def _tsv(text: str) -> Iterator[_Record]:
    for line in text_lines(text):
        yield _Record(line.number, line.text.split("\t"))


def _line_id(number: int) -> str:
    """The id of a row without one; not its number, which another row's own id may be."""
    return f"line {number}"


def _written(label: str | float) -> str:
    """A label as text: 1 and 1.0, which JSON does not tell apart, are one."""
    if isinstance(label, str):
        return label
    return str(int(label)) if isinstance(label, float) and label.is_integer() else json.dumps(label)
