"""Rows with named fields, of JSON lines, Parquet, or a data set on the hub.

A source is a file, a folder with ``train``, ``dev`` and perhaps ``test`` in one of `FORMS`, or what
``datasets`` reads: a name on the hub, or a folder of Parquet files of other names.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from bertvision.errors import InputError, counted
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.source import (
    find_file,
    find_in,
    hub_splits,
    load_hub,
    on_hub,
    read_text,
    splits_in,
    text_lines,
)

log = logging.getLogger(__name__)

FORMS = (".jsonl", ".parquet")
SPLITS = ("train", "dev", "test")
_HUB_NAMES = {"validation": "dev"}
_Item = TypeVar("_Item")


class Row(NamedTuple):
    """A row of a source."""

    place: str
    """Where it stands, such as ``line 3``: the name of an item that has no ``id``."""
    fields: dict[str, Any] | InputError
    """By name; or why they cannot be read."""


def offered_splits(source: str, task: str, forms: Sequence[str] = FORMS) -> tuple[str, ...]:
    """The splits that a source offers; ``all`` of a file.

    Args:
        source: path of a file or folder, or a name on the hub.
        task: what it is read for.
        forms: of its files.

    Raises:
        InputError: it is nothing of this kind.
    """
    if Path(source).is_file():
        return ("all",)
    if _by_datasets(source, forms):
        return tuple(_HUB_NAMES.get(name, name) for name in hub_splits(source))
    return splits_in(source, {split: _names(split, forms) for split in SPLITS}, task)


def find_rows(source: str, split: str, task: str, forms: Sequence[str] = FORMS) -> Path | None:
    """The file that holds a split; None where ``datasets`` reads it.

    Raises:
        InputError: there is none.
    """
    if not Path(source).is_file() and _by_datasets(source, forms):
        return None
    return find_file(source, _names(split, forms), task)


def read_items(
    source: str,
    split: str,
    path: Path | None,
    columns: Sequence[Sequence[str]],
    parse: Callable[[dict[str, Any], str], _Item | None],
    *,
    skip_bad: bool,
) -> TaskData:
    """Read the rows of a split, each as an item.

    Args:
        source: that `find_rows` was asked for.
        split: of it.
        path: of its file; None asks ``datasets``.
        columns: that are read of a table: the first of these which it has all of. JSON lines have
            each its own.
        parse: makes an item of a row's fields and its name; None of one that holds nothing, and
            `InputError` of one that is malformed.
        skip_bad: leave malformed rows out, and count them.

    Raises:
        InputError: a row is malformed, two have one ``id``, or none is left.
    """
    rows, digest = _hub(source, split, columns) if path is None else _file(path, columns)
    where = str(path or f"{source} ({split})")
    items: list[Any] = []
    skipped: list[str] = []
    empty, places = 0, dict[str, str]()
    for row in rows:
        try:
            if isinstance(row.fields, InputError):
                raise row.fields
            name = _name(row.fields, row.place)
            if name in places:
                raise InputError(f"the id {name!r} is already that of {places[name]}")
            item = parse(row.fields, name)
        except InputError as error:
            message = f"{where}, {row.place}: {error}"
            if not skip_bad:
                raise InputError(f"{message}. --skip-bad leaves such rows out") from error
            skipped.append(message)
            continue
        if item is None:
            empty += 1
            continue
        places[name] = row.place
        items.append(item)
    if not items:
        why = f" after skipping {len(skipped)}: {skipped[0]}" if skipped else ""
        raise InputError(f"{where}: holds nothing but empty rows{why}")
    if empty:
        log.info("%s: %s left out", where, counted(empty, "empty row"))
    if skipped:
        log.warning("%s left out: %s", counted(len(skipped), "malformed row"), skipped[0])
    return TaskData(items, digest, skipped)


def text_field(fields: dict[str, Any], name: str, option: str = "") -> str:
    """A field that must be there, and be a string of Unicode.

    Raises:
        InputError: it is not.
    """
    if name not in fields:
        raise InputError(f"has the fields {list(fields)}, but not {name!r}{option}")
    if not isinstance(fields[name], str):
        raise InputError(f"{name} must be a string: {str(fields[name])[:80]!r}")
    text = str(fields[name])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} has the lone surrogate {text[error.start]!r} at character {error.start}, "
            "which is no Unicode text"
        ) from error
    return text


def _name(fields: dict[str, Any], place: str) -> str:
    name = fields.get("id")
    if not isinstance(name, str | int | None):
        raise InputError(f"the id {name!r} must be a string or a whole number")
    return place if name in (None, "") else str(name)


def _file(path: Path, columns: Sequence[Sequence[str]]) -> tuple[Iterator[Row], str]:
    form = Path(path.name.removesuffix(".gz")).suffix
    if form == ".jsonl":
        text, digest = read_text(path)
        return _lines(text), digest
    if path.suffix != ".parquet":
        raise InputError(
            f"{path}: its form is not known: name it {' or '.join(FORMS)}, as what it is"
        )
    return _parquet(path, columns), sha256_of_files([path])


def _lines(text: str) -> Iterator[Row]:
    for line in text_lines(text):
        place = f"line {line.number}"
        try:
            fields = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            yield Row(place, InputError(f"is not JSON that can be read: {error}"))
            continue
        good = isinstance(fields, dict)
        yield Row(place, fields if good else InputError("is JSON, but no object"))


def _parquet(path: Path, columns: Sequence[Sequence[str]]) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            wanted, number = _wanted(file.schema_arrow.names, columns, str(path)), 0
            for batch in file.iter_batches(1024, columns=wanted):
                for fields in batch.to_pylist():
                    yield Row(f"row {number}", fields)
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: is no Parquet file that can be read: {error}") from error


def _hub(source: str, split: str, columns: Sequence[Sequence[str]]) -> tuple[Iterator[Row], str]:
    """The rows of a data set, and the digest of what is read of them."""
    named = next((name for name, ours in _HUB_NAMES.items() if ours == split), split)
    data = load_hub(source, named if named in hub_splits(source) else split, ())
    chosen = data.select_columns(_wanted(data.column_names, columns, source))
    digest = hashlib.sha256()
    for fields in chosen:
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
    return (Row(f"row {i}", fields) for i, fields in enumerate(chosen)), digest.hexdigest()


def _wanted(held: Sequence[str], columns: Sequence[Sequence[str]], where: str) -> list[str]:
    """The first of ``columns`` that a table has, and its names of rows.

    Raises:
        InputError: it has none.
    """
    for wanted in columns:
        if set(wanted) <= set(held):
            return [*wanted, *(["id"] if "id" in held and "id" not in wanted else [])]
    raise InputError(f"{where}: has the columns {list(held)}, but not {list(columns[0])}")


def _by_datasets(source: str, forms: Sequence[str]) -> bool:
    """Whether ``datasets`` is to read it: no folder that holds a file of a split by its name."""
    named = [name for split in SPLITS for name in _names(split, forms)]
    return on_hub(source) and not (Path(source).is_dir() and find_in(Path(source), named))


def _names(split: str, forms: Sequence[str]) -> list[str]:
    return [f"{split}{form}" for form in forms]
