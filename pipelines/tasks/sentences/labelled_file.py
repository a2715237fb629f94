"""A file with named columns: its records, and the columns that are read of them.

Imports nothing heavy, so that a missing column is reported at once.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks.sentences.rows import RawSentence, SentenceRows, require_fields
from bertvision.pipelines.tasks.source import Line, read_text, text_lines

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
        path: of the file, in one of `FORMS`, perhaps with ``.gz``.
        columns: that are read.
        skip_bad: leave malformed rows out, and count them.

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
