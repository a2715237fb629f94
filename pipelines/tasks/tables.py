"""Rows of tabular data, whatever the form of their file, and the declaration of their columns.

A data set declares a `Layout`: its columns, the names that files give them, and whether they may be
missing. `read_table` reads CSV, TSV, JSON lines and Parquet by it, `hub_table` a data set of the
hub, and `aligned_table` files that say line by line what belongs together. Every row knows where it
stands, and a `Collector` puts that in front of what is wrong with it, or leaves the row out.

Nothing heavy is imported, so that a missing column is reported at once.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.source import (
    all_lines,
    find_file,
    find_in,
    hub_splits,
    load_hub,
    on_hub,
    read_text,
    split_files,
    splits_in,
    text_lines,
)

log = logging.getLogger(__name__)

MAX_CHARACTERS = 500_000
"""The longest sentence, question or context taken, in characters."""
JSON_LINES = (".jsonl", ".ndjson")
_LONGEST_FIELD = (1 << 31) - 1  # what a C long holds everywhere
_HUB_NAMES = {"dev": "validation"}


class Column(NamedTuple):
    """A column of a data set, and the values that it may have."""

    names: tuple[str, ...]
    """Names that files give it, in order of preference."""
    kind: Literal["text", "label", "id", "score", "json"] = "text"
    """A string; a string or a number, which is written as a string; likewise; a number in a range,
    or None where it is blank; or any value of JSON, which whoever reads the row checks."""
    optional: bool = False
    filled: bool = False
    """Whether a text must have characters other than spaces."""
    among: tuple[str, ...] = ()
    """The texts that it may be; empty allows any."""
    range: tuple[int, int] = (0, 1)
    """The lowest and the highest score."""

    def value(self, value: Any, name: str) -> Any:
        """A value of the column, checked.

        Args:
            value: Value as the file has it.
            name: Name of the column in the file.

        Raises:
            InputError: the value is none that the column may have.
        """
        if self.kind == "text":
            return self._text(value, name)
        if self.kind == "score":
            return self._score(value, name)
        if self.kind == "json":
            return value
        if not isinstance(value, str | int | float | None):
            raise InputError(f"the {self.kind} {value!r} must be a string or a number")
        if value is None:
            return None
        written = str(value) if self.kind == "id" else _written(value)
        return check_text(written, f"the {self.kind}")

    def _text(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise InputError(f"{name} must be a string: {value!r:.80}")
        if self.filled and not value.strip():
            raise InputError(f"the {name} is empty")
        if self.among and value.strip() not in self.among:
            raise InputError(f"the {name} is {value!r}; it must be one of {', '.join(self.among)}")
        return value.strip() if self.among else check_text(value, name)

    def _score(self, value: str, name: str) -> float | None:
        if not value.strip():
            return None
        low, high = self.range
        try:
            score = float(value)
        except ValueError:
            score = math.nan
        if not low <= score <= high:
            raise InputError(f"the {name} is {value!r}; it must be a number from {low} to {high}")
        return score


ID = Column(("id",), "id", optional=True)
"""The column that names the rows; those without a name are named by their place."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a data set, and how its files are written."""

    columns: Mapping[str, Column]
    """By the name that a reader of the rows uses."""
    header: tuple[str, ...] = ()
    """Names of the columns of files without a header line, in their order."""
    separator: str = ""
    """Separator of fields, each of which is taken as it stands; of a space the first; a line
    break where a line is one field. Empty is a comma in ``.csv``, where fields may be quoted, and
    else a tab."""
    quoted: bool = False
    """Whether fields between tabs may be quoted, as those of CSV."""
    ragged: bool = False
    """Whether rows may have more fields than the header."""
    any_case: bool = False
    """Whether names of columns are compared without regard to case."""
    hint: str = ""
    """Advice where a column is missing."""

    def present(self, names: Iterable[str]) -> dict[str, str]:
        """The name of each column among the names of a file; absent columns are left out."""
        known = {name.strip().lower() if self.any_case else name: name for name in names}
        return {
            column: next(known[name] for name in spec.names if name in known)
            for column, spec in self.columns.items()
            if any(name in known for name in spec.names)
        }

    def missing(self, names: Iterable[str]) -> list[str]:
        """The columns that must be there and are not, by their first name."""
        present = self.present(names)
        return [
            spec.names[0]
            for column, spec in self.columns.items()
            if not spec.optional and column not in present
        ]

    def is_row(self, fields: list[str]) -> bool:
        """Whether a first line is a row already, of a file without a header line."""
        try:
            _read_fields(self, self.present(self.header), self.header, fields)
        except InputError:
            return False
        return True

    def read(self, present: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a row by column, each checked.

        Args:
            present: Columns that are read, as `present` gives them.
            fields: Values by the names of the file.

        Raises:
            InputError: a value is none that its column may have.
        """
        return {
            column: self.columns[column].value(fields[name], name)
            for column, name in present.items()
        }


Layouts = Sequence[Layout]
"""Layouts that a file may have: the first whose columns are there is that of the file."""


class Row(NamedTuple):
    """A row of a source."""

    number: int
    """Number of a line, from 1, or of a row, from 0."""
    parse: Callable[[], dict[str, Any]]
    """Reads the fields, or raises `InputError`."""
    unit: str = "line"

    @property
    def place(self) -> str:
        """Where it stands, such as ``line 3``: the name of an item that has no ``id``."""
        return f"{self.unit} {self.number}"

    @property
    def fields(self) -> dict[str, Any]:
        """The values by column.

        Raises:
            InputError: the row is malformed.
        """
        return self.parse()


class Table(NamedTuple):
    """The rows of a source."""

    source: str
    """Name that messages begin with."""
    rows: Iterator[Row]
    files: Mapping[str, str] = {}
    """The digest of the bytes of each file, by its name; of a data set of the hub that of the
    values that are read, where one was asked for."""
    aligned: Mapping[str, Path] = {}
    """The file that each column stands in, where there are several."""

    @property
    def sha256(self) -> str | None:
        """Digest of the first file."""
        return next(iter(self.files.values()), None)

    def at(self, column: str, number: int) -> str:
        """File and line where a column of a row stands, for a message."""
        return f"{self.aligned.get(column, self.source)}, line {number}"

    def checked(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The number of each row and its fields.

        Raises:
            InputError: a row is malformed. Names file and line.
        """
        for row in self.rows:
            try:
                fields = row.fields
            except InputError as error:
                if self.aligned:  # which say their files themselves
                    raise
                raise InputError(f"{self.source}, {row.place}: {error}") from error
            yield row.number, fields


def read_table(
    path: Path, *layouts: Layout, forms: Sequence[str] = (), fallback: str | None = None
) -> Table:
    """Open a file of rows.

    Args:
        path: Path of the file, perhaps with ``.gz``.
        layouts: see `Layouts`.
        forms: Forms that the file may have, which its name tells; a single one needs no name. None
            where the layout says the separator.
        fallback: Encoding of a text that is not UTF-8; None refuses it.

    Raises:
        InputError: the file cannot be read, is of another form or lacks a column. Malformed rows
            are reported when their fields are read.
    """
    form = forms[0] if len(forms) == 1 else Path(path.name.removesuffix(".gz")).suffix
    if forms and form not in forms:
        raise InputError(
            f"{path}: its form is not known: name it {' or '.join(forms)}, perhaps with .gz"
        )
    if form == ".parquet" and forms:
        from bertvision.pipelines.files import check_regular, sha256_of_files

        rows = _parquet_rows(check_regular(path), layouts)
        return Table(str(path), rows, {path.name: sha256_of_files([path])})
    content, digest = read_text(path, fallback=fallback)
    if form in JSON_LINES and forms:
        rows = json_rows(content, layouts)
    else:
        rows = _delimited_rows(path, content, form, layouts)
    return Table(str(path), rows, {path.name: digest})


def json_rows(content: str, layouts: Layouts) -> Iterator[Row]:
    """The rows of JSON lines, an object each."""
    for line in text_lines(content):
        yield Row(line.number, partial(_read_line, line.text, layouts))


def hub_table(
    source: str,
    split: str,
    *layouts: Layout,
    classes: Sequence[str] | None = None,
    digest: bool = False,
) -> Table:
    """Open a split of a data set of the hub.

    Labels that the data set has as numbers of classes are taken by their names; −1 is none.

    Args:
        source: As in `load_hub`.
        split: Name of the split on the hub.
        layouts: see `Layouts`.
        classes: Classes that its label must have; None does not look.
        digest: Whether the values are read for a digest of them.

    Raises:
        InputError: it cannot be loaded, lacks a column or has other classes.
    """
    where = f"{source} ({split})"
    data = load_hub(source, split)
    layout = _layout_of(data.column_names, layouts, f"{where}: ")
    present = layout.present(data.column_names)
    name = present.get("label", "")
    names = getattr(data.features[name], "names", None) if name else None
    if names and classes is not None and sorted(names) != sorted(classes):
        raise InputError(
            f"{where}: has the classes {names}, but those of the task are {list(classes)}: give "
            "the data set of this task"
        )
    chosen = data.select_columns([*present.values()])
    sha256 = hashlib.sha256()
    for fields in chosen if digest else ():
        sha256.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
    rows = (
        Row(i, partial(layout.read, present, _with_class(fields, name, names)), "row")
        for i, fields in enumerate(chosen)
    )
    return Table(where, rows, {split: sha256.hexdigest()} if digest else {})


def parse_json(content: str, source: Path | None = None) -> Any:
    """A value of JSON.

    Args:
        content: Text of it.
        source: File that the message names.

    Raises:
        InputError: it is none, or nested too deep.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        where = f"{source}: " if source else ""
        raise InputError(f"{where}is not JSON that can be read: {error}") from error


def check_text(content: str, name: str, most: int | None = None) -> str:
    """Return a text that is Unicode, and no longer than it may be.

    Args:
        content: The text.
        name: Name of it, for the message.
        most: Characters that it may have; None is any number.

    Raises:
        InputError: it has a lone surrogate, or more characters.
    """
    if most is not None and len(content) > most:
        raise InputError(
            f"{name} has {len(content):,} characters, but at most {most:,} are taken: split it"
        )
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} has the lone surrogate {content[error.start]!r} at character {error.start}, "
            "which is no Unicode text"
        ) from error
    return content


class Collector:
    """Collects the items of one source, and what was skipped.

    Args:
        source: Name that messages begin with, such as the path of the file.
        skip_bad: Leave malformed rows out and list them, instead of refusing the source.
        noun: Name of a row.
    """

    def __init__(self, source: str, *, skip_bad: bool, noun: str = "row") -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.noun = noun
        self.items: list[Any] = []
        self.skipped: list[str] = []
        self.empty = 0
        """Rows that were left out because they hold nothing."""
        self.places: dict[str, str] = {}
        """By the id of an item, where it stands."""

    def take(self, item: Any, place: str) -> None:
        """Take an item, whose ``id`` must be its own.

        Raises:
            InputError: an earlier item has it.
        """
        if first := self.places.get(item.id):
            raise InputError(f"the id {item.id!r} is already that of {first}")
        self.places[item.id] = place
        self.items.append(item)

    @contextmanager
    def part(self, place: str) -> Iterator[None]:
        """Put source and place in front of an error, or skip the row.

        Args:
            place: Place of the row; empty where errors begin with their own.
        """
        try:
            yield
        except InputError as error:
            message = f"{self.source}, {place}: {error}" if place else f"{self.source}, {error}"
            if not self.skip_bad:
                hint = f"--skip-bad leaves such {self.noun}s out"
                raise InputError(f"{message}. {hint}") from error.__cause__
            self.skipped.append(message)

    def require(self, items: Sequence[object]) -> None:
        """Refuse a source of which no row is left.

        Raises:
            InputError: there is none.
        """
        if not items:
            what = "nothing but empty" if self.empty else "no"
            why = f" after skipping {len(self.skipped)}: {self.skipped[0]}" if self.skipped else ""
            raise InputError(f"{self.source}: holds {what} {self.noun}s{why}")

    def data(self, sha256: str) -> TaskData:
        """The items; says how many rows were empty, and how many malformed.

        Args:
            sha256: Digest of the source's bytes.

        Raises:
            InputError: there is none.
        """
        self.require(self.items)
        if self.empty:
            log.info("%s: %s left out", self.source, counted(self.empty, f"empty {self.noun}"))
        if self.skipped:
            malformed = counted(len(self.skipped), f"malformed {self.noun}")
            log.warning("%s left out: %s", malformed, self.skipped[0])
        return TaskData(self.items, sha256, self.skipped)


FORMS = (".jsonl", ".parquet")
"""Forms of files of rows with named fields that are not labelled."""


def offered_splits(source: str, task: str, forms: Sequence[str] = FORMS) -> tuple[str, ...]:
    """The splits that a source offers; ``all`` of a file.

    A source is a file, a folder with ``train``, ``dev`` and perhaps ``test`` in one of the forms,
    or what ``datasets`` reads: a name on the hub, or a folder of Parquet files of other names.

    Args:
        source: path of a file or folder, or a name on the hub.
        task: Task that it is read for.
        forms: Forms of its files.

    Raises:
        InputError: it is nothing of this kind.
    """
    if Path(source).is_file():
        return ("all",)
    if _by_datasets(source, forms):
        ours = {hub: name for name, hub in _HUB_NAMES.items()}
        return tuple(ours.get(name, name) for name in hub_splits(source))
    return splits_in(source, split_files(forms), task)


def find_rows(source: str, split: str, task: str, forms: Sequence[str] = FORMS) -> Path | None:
    """The file that holds a split; None where ``datasets`` reads it.

    Raises:
        InputError: there is none.
    """
    if not Path(source).is_file() and _by_datasets(source, forms):
        return None
    return find_file(source, split_files(forms).get(split, ()), task)


def read_items(
    source: str,
    split: str,
    task: str,
    parse: Callable[[dict[str, Any], str], Any],
    *layouts: Layout,
    skip_bad: bool,
) -> TaskData:
    """Read the rows of a split, each as an item.

    Args:
        source: As in `offered_splits`.
        split: Split of it.
        task: Task that it is read for.
        parse: makes an item of a row's fields and its name; None of one that holds nothing, and
            `InputError` of one that is malformed.
        layouts: see `Layouts`.
        skip_bad: Leave malformed rows out, and count them.

    Raises:
        InputError: a row is malformed, two have one ``id``, or none is left.
    """
    if (path := find_rows(source, split, task)) is not None:
        table = read_table(path, *layouts, forms=FORMS)
    else:
        named = _HUB_NAMES.get(split, split)
        named = named if named in hub_splits(source) else split
        table = hub_table(source, named, *layouts, digest=True)
    found = Collector(table.source, skip_bad=skip_bad)
    for row in table.rows:
        with found.part(row.place):
            fields = row.fields
            item = parse(fields, fields.pop("id", None) or row.place)
            if item is None:
                found.empty += 1
            else:
                found.take(item, row.place)
    return found.data(str(table.sha256))


def _by_datasets(source: str, forms: Sequence[str]) -> bool:
    """Whether ``datasets`` is to read it: no folder that holds a file of a split by its name."""
    named = [name for names in split_files(forms).values() for name in names]
    return on_hub(source) and not (Path(source).is_dir() and find_in(Path(source), named))


def _layout_of(names: Sequence[str], layouts: Layouts, where: str, what: str = "columns") -> Layout:
    """The first layout whose columns are there.

    Raises:
        InputError: there is none, or one of its columns is there twice.
    """
    fitting = (layout for layout in layouts if not layout.missing(names))
    layout = next(fitting, None) or max(layouts, key=lambda one: len(one.present(names)))
    twice = [x for x in layout.present(names).values() if list(names).count(x) > 1]
    wrong = [f"but not {missing}"] if (missing := layout.missing(names)) else []
    wrong += [f"{name!r} more than once" for name in twice]
    if wrong:
        hint = layout.hint and f": {layout.hint}"
        raise InputError(f"{where}has the {what} {list(names)}, {wrong[0]}{hint}")
    return layout


def read_object(fields: Any, layouts: Layouts) -> dict[str, Any]:
    """The values of an object of JSON by column.

    Raises:
        InputError: it is no object, lacks a column, or has a value that a column may not have.
    """
    if not isinstance(fields, dict):
        names = [column.names[0] for column in layouts[0].columns.values() if not column.optional]
        raise InputError(f"is JSON, but no object with {', '.join(names)}")
    layout = _layout_of([*fields], layouts, "", "fields")
    return layout.read(layout.present(fields), fields)


def _read_line(line: str, layouts: Layouts) -> dict[str, Any]:
    return read_object(parse_json(line), layouts)


def _delimited_rows(path: Path, content: str, form: str, layouts: Layouts) -> Iterator[Row]:
    """The rows of a text with fields between separators; looks at the first line at once."""
    records = _records(path, content, form, layouts[0])
    layout, first = layouts[0], None
    if len(layouts) > 1 or not layout.header:
        first = next(records)
        bare = (one for one in layouts if one.header and one.is_row(first[1]))
        named = [one for one in layouts if not one.header]
        layout = next(bare, None) or _layout_of(first[1], named, f"{path}, line 1: ")
    header = layout.header
    if first is not None:
        records = itertools.chain([first] if header else [], records)
        header = header or tuple(first[1])
    present = layout.present(header)
    return (Row(n, partial(_read_fields, layout, present, header, x)) for n, x in records)


def _records(
    path: Path, content: str, form: str, layout: Layout
) -> Iterator[tuple[int, list[str]]]:
    """The records of a text with the lines that they begin on; blank ones are left out."""
    separator = layout.separator or ("," if form == ".csv" else "\t")
    if layout.separator or not (layout.quoted or separator == ","):
        for line in text_lines(content):
            fields = (
                line.text.split("\t") if separator == "\t" else line.text.partition(separator)[::2]
            )
            yield line.number, [*fields]
        return
    # csv's own limit, 131,072 characters, is below that of a text, which is checked by row
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(content, newline=""), strict=True, delimiter=separator)
    begin = 1
    try:
        for record in reader:
            if record:
                yield begin, record
            begin = reader.line_num + 1
    except csv.Error as error:
        other = "" if layout.quoted else ", or give the file as .tsv, where quotes are text"
        raise InputError(
            f"{path}, line {begin}: is no CSV ({error}): write a quotation mark in a quoted field "
            f"twice{other}"
        ) from error


def _read_fields(
    layout: Layout, present: Mapping[str, str], header: Sequence[str], fields: list[str]
) -> dict[str, Any]:
    if layout.ragged:
        fields = fields[: len(header)]
    return layout.read(present, dict(zip(header, require_fields(fields, header), strict=True)))


def require_fields(fields: list[str], names: Sequence[str]) -> list[str]:
    """Return the fields of a row if there is one for each name.

    Raises:
        InputError: there are more or fewer.
    """
    if len(fields) != len(names):
        raise InputError(f"has {len(fields)} fields, expected are {len(names)}: {', '.join(names)}")
    return fields


def _parquet_rows(path: Path, layouts: Layouts) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names, number = file.schema_arrow.names, 0
            layout = _layout_of(names, layouts, f"{path}: ")
            present = layout.present(names)
            for batch in file.iter_batches(1024, columns=[*present.values()]):
                for fields in batch.to_pylist():
                    yield Row(number, partial(layout.read, present, fields), "row")
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: is no Parquet file that can be read: {error}") from error


def aligned_table(folder: Path, files: Mapping[str, Layout]) -> Table:
    """Open files of which line n of each is of the same row; blank lines count.

    Args:
        folder: Folder that holds them.
        files: Layout of each file, with its header, by its name, which may also end with ``.gz``.

    Raises:
        InputError: a file is missing, or has another number of lines.
    """
    first, *_ = files
    layouts: dict[Path, Layout] = {}
    for name, layout in files.items():
        if (file := find_in(folder, [name])) is None:
            raise InputError(f"{folder / name}: is missing beside {first}")
        layouts[file] = layout
    read = {file: read_text(file) for file in layouts}
    lines = {file: all_lines(content) for file, (content, _) in read.items()}
    first_file, count = next((file, len(own)) for file, own in lines.items())
    for file, own in lines.items():
        if len(own) != count:
            raise InputError(
                f"{file}: has {len(own):,} lines, but {first_file} has {count:,}: line n of each "
                "must be of the same pair"
            )

    def parse(number: int, row: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for (file, layout), line in zip(layouts.items(), row, strict=True):
            present, fields = layout.present(layout.header), line.split(layout.separator)
            try:
                values |= _read_fields(layout, present, layout.header, fields)
            except InputError as error:
                raise InputError(f"{file}, line {number}: {error}") from error
        return values

    rows = enumerate(zip(*lines.values(), strict=True), 1)
    return Table(
        str(first_file),
        (Row(n, partial(parse, n, row)) for n, row in rows),
        {file.name: digest for file, (_, digest) in read.items()},
        {name: file for file, layout in layouts.items() for name in layout.present(layout.header)},
    )


def _with_class(
    fields: Mapping[str, Any], name: str, classes: Sequence[str] | None
) -> dict[str, Any]:
    """The fields of a row of the hub with the name of its class; the hub writes −1 for none."""
    number = fields.get(name)
    if number == -1:
        return {**fields, name: None}
    return {**fields, name: classes[number]} if classes and isinstance(number, int) else {**fields}


def _written(label: str | float) -> str:
    """A label as text: 1 and 1.0, which JSON does not tell apart, are one."""
    if isinstance(label, str):
        return label
    return str(int(label)) if isinstance(label, float) and label.is_integer() else json.dumps(label)
