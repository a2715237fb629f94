"""A user's own labelled sentences: ``--task csv [--text COLUMN --label COLUMN --pair COLUMN]``.

A source is a file, or a folder with ``train``, ``dev`` and perhaps ``test`` in one of the forms:

- ``.csv``: RFC 4180, with a header line; a field may be quoted, and then hold line breaks;
- ``.tsv``: a header line, fields between tabs as they stand; a quotation mark is text;
- ``.jsonl``: an object a line.

Each may also end with ``.gz``. A column ``id`` names the rows; those without one are named by
their lines, ``line 2``. The columns are ``text`` and ``label``, unless named otherwise.

**Classes or scores.** The labels of training are scores, to be told by regression, where every one
of them is a number and at least one of these is not whole (2.5). All others are names of classes,
whole numbers such as 0 and 1.0 too. Classes are those of the training data, in order: as numbers
where all are integers, else by their characters. A label that training has not is refused; where
training has scores, so is one that is no number.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.sentences.rows import (
    RawSentence,
    SentenceRows,
    require_fields,
    sorted_classes,
)
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.source import Line, find_file, read_text, splits_in, text_lines
from bertvision.pipelines.tasks.task import Task

FORMS = (".csv", ".tsv", ".jsonl")
SPLITS = ("train", "dev", "test")
_LONGEST_FIELD = (1 << 31) - 1  # what a C long holds everywhere


class LabelledTask(SentenceTask):
    """Sentences of a file with named columns."""

    def splits(self, source: str) -> tuple[str, ...]:
        """Those of `SPLITS` that a folder holds; ``all`` of a file.

        Raises:
            InputError: it is neither, or the folder holds none.
        """
        if Path(source).is_file():
            return ("all",)
        return splits_in(source, {split: _names(split) for split in SPLITS}, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a file, or the file of a split in a folder.

        The classes are those of ``config``. Where it names none, what is learned from (``train``,
        ``all``) says itself whether it has classes; of another split the folder's ``train`` does,
        and a file alone has scores: had its training data classes, ``config`` would name them.

        Raises:
            InputError: the file is missing or malformed, lacks a column, or has labels that
                training has not.
        """
        rows, digest = self._rows(source, split, config)
        classes = config.classes
        if not classes and split in ("train", "all"):
            classes = classes_of(rows)
        elif not classes and Path(source).is_dir():
            classes = classes_of(self._rows(source, "train", config)[0])
        return rows.classified(classes, digest) if classes else rows.scored(digest)

    def _rows(self, source: str, split: str, config: TaskConfig) -> tuple[SentenceRows, str]:
        path = find_file(source, _names(split), self.name)
        form = path.name.removesuffix(".gz")
        if not form.endswith(FORMS):
            raise InputError(
                f"{path}: its form is not known: name it {', '.join(FORMS)} or the same with .gz"
            )
        text, digest = read_text(path)
        rows = SentenceRows(str(path), skip_bad=config.skip_bad)
        if form.endswith(".jsonl"):
            return rows.add_lines(text_lines(text), _object_parser(_columns(config))), digest
        records = _csv(text, path) if form.endswith(".csv") else _tsv(text)
        header = next(records).fields
        return rows.add_lines(records, _record_parser(_columns(config), header, path)), digest


def with_columns(task: Task, config: TaskConfig) -> TaskConfig:
    """The settings of a task with the columns that are read, ``text`` and ``label`` by default.

    Raises:
        InputError: it is no task of labelled files, which has columns of its own, and one is named.
    """
    named = [name for name in ("text", "pair", "label") if getattr(config, name) is not None]
    if named and not isinstance(task, LabelledTask):
        raise InputError(
            f"--{named[0]} {getattr(config, named[0])}: names a column of a file of your own, "
            f"--task csv; the columns of {task.name} are known: leave it out"
        )
    if not isinstance(task, LabelledTask):
        return config
    columns = _columns(config)
    return config.model_copy(update={"text": columns.text, "label": columns.label})


def classes_of(rows: SentenceRows) -> tuple[str, ...]:
    """The classes that training data has, in order; () where its labels are scores.

    Raises:
        InputError: there is one class alone, or no label at all.
    """
    labels = rows.labels
    if all(_is_number(x) for x in labels) and any(float(x) % 1 > 0 for x in labels):
        return ()
    if len(labels) < 2:
        only = f"all rows have the label {min(labels)!r}" if labels else "no row has a label"
        raise InputError(
            f"{rows.source}: {only}, so that nothing can be learned from it: give data with at "
            "least two classes, and with --label the column that tells them apart"
        )
    return sorted_classes(labels)


class _Record(NamedTuple):
    number: int  # of the line it begins on
    fields: list[str]


class _Columns(NamedTuple):
    """Names of the columns, as the user gave them."""

    text: str
    pair: str | None
    label: str

    @property
    def named(self) -> list[str]:
        """Those there are."""
        return [self.text, *([] if self.pair is None else [self.pair]), self.label]


def _columns(config: TaskConfig) -> _Columns:
    return _Columns(config.text or "text", config.pair, config.label or "label")


def _record_parser(
    columns: _Columns, header: list[str], path: Path
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


def _object_parser(columns: _Columns) -> Callable[[Line], RawSentence]:
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


def _names(split: str) -> list[str]:
    return [f"{split}{form}" for form in FORMS]


def _is_number(label: str) -> bool:
    """Whether a label is a number, NaN and infinity included, which no score may be."""
    try:
        float(label)
    except ValueError:
        return False
    return True
