"""Where SQuAD's questions come from: a file, or a split of a data set on the hub."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertvision.errors import InputError
from bertvision.pipelines.files import check_regular, sha256_of_files
from bertvision.pipelines.tasks.source import load_hub, read_text, text_lines
from bertvision.pipelines.tasks.squad.read import SquadData, SquadReader

FORMS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
"""Ends of the names of files with questions."""
_COLUMNS = ("id", "question", "context", "answers")


def read_squad(path: Path, *, skip_bad: bool = False) -> SquadData:
    """Read a file of questions: in SQuAD's form, or with a row for each question.

    Rows have id, question, context and answers, ``{"text": […], "answer_start": […]}`` or a list of
    ``{"text": …, "answer_start": …}``; in CSV that is written as JSON.

    Args:
        path: a ``.json`` file in the form of SQuAD v1.1 or v2.0 or with a list of rows, a
            ``.jsonl``, ``.csv`` or ``.tsv`` file of rows, each perhaps with ``.gz``, or a
            ``.parquet`` file of rows.
        skip_bad: leave out malformed articles, paragraphs and questions and report them in
            ``skipped``. A file that cannot be read at all, or of which no question is left, is an
            error all the same.

    Raises:
        InputError: the file or a part of it is malformed; names the file, the JSON path and why.
    """
    path = Path(path)
    form = Path(path.name.removesuffix(".gz")).suffix
    reader = SquadReader(str(path), skip_bad)
    if form != ".parquet":
        text, digest = read_text(path)
    with _at(str(path)):
        if form == ".parquet":
            return _of_rows(reader, _parquet(path), sha256_of_files([path]))
        if form in (".csv", ".tsv"):
            return _of_rows(reader, _table(text, form), digest)
        if form in (".jsonl", ".ndjson") or _is_lines(text):
            return _of_rows(reader, _json_lines(text), digest)
        document = _parsed(text, "")
        rows = document.get("data") if isinstance(document, dict) else document
        if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "context" in rows[0]:
            return _of_rows(reader, ((f"[{i}]", row) for i, row in enumerate(rows)), digest)
        return reader.finish(reader.document(document), digest)


def load_squad(source: str, split: str, *, skip_bad: bool = False) -> SquadData:
    """Read a SQuAD file or, through ``datasets``, a split of a hub data set.

    Args:
        source: a file, as of `read_squad`; or a data set with the columns id, question,
            context and answers {text, answer_start} (``squad_v2``, ``squad``), by its hub name or
            as a folder.
        split: the hub split; ``dev`` means the hub's ``validation``. A file is one split.
        skip_bad: as in `read_squad`.

    Raises:
        InputError: the source cannot be loaded, or holds malformed questions.
    """
    path = Path(source)
    if path.is_file() or source.endswith((".gz", *FORMS)):
        return read_squad(path, skip_bad=skip_bad)
    hub_split = "validation" if split == "dev" else split
    rows = load_hub(source, hub_split, ["answers", "context", "id", "question"])
    where = f"{source} ({hub_split})"
    with _at(where):
        reader = SquadReader(where, skip_bad)
        for i, row in enumerate(rows):
            reader.row(row, f"[{i}]")
        return reader.finish(None, None)


def read_json(path: Path) -> tuple[Any, str]:
    """Parse a ``.json`` or ``.json.gz`` file of UTF-8.

    Returns:
        (what it holds, SHA-256 of the file's bytes in hex).

    Raises:
        InputError: the file cannot be read, decompressed, decoded or parsed.
    """
    text, digest = read_text(path)
    return _parsed(text, f"{path}: "), digest


def _of_rows(reader: SquadReader, rows: Iterable[tuple[str, Any]], digest: str) -> SquadData:
    """The questions of rows, each with its place in the file."""
    for place, row in rows:
        reader.row(row, place)
    return reader.finish(None, digest)


def _is_lines(text: str) -> bool:
    """Whether a text of JSON has an object in each line, as some write it under ``.json``."""
    first, _, rest = text.lstrip().partition("\n")
    if not rest.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(text: str) -> Iterator[tuple[str, Any]]:
    for line in text_lines(text):
        yield f"line {line.number}", _parsed(line.text, f"line {line.number}: ")


def _table(text: str, form: str) -> Iterator[tuple[str, Any]]:
    """The rows of CSV, or of values between tabs."""
    csv.field_size_limit((1 << 31) - 1)  # contexts are checked by their own length
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, strict=True, delimiter="," if form == ".csv" else "\t")
    try:
        columns = reader.fieldnames or []
        if missing := [name for name in _COLUMNS if name not in columns]:
            raise InputError(f"line 1: has the columns {list(columns)}, but not {missing}")
        for row in reader:
            yield f"line {reader.line_num}", {k: v for k, v in row.items() if v is not None}
    except csv.Error as error:
        raise InputError(
            f"line {reader.line_num}: is no CSV ({error}): write a quotation mark in a quoted "
            "field twice"
        ) from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(check_regular(path)) as file:
            if missing := [name for name in _COLUMNS if name not in file.schema_arrow.names]:
                raise InputError(f"has the columns {file.schema_arrow.names}, but not {missing}")
            columns = [*_COLUMNS, *({"is_impossible"} & set(file.schema_arrow.names))]
            batches = file.iter_batches(columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            for i, row in enumerate(rows):
                yield f"[{i}]", {k: v for k, v in row.items() if v is not None}
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"is no whole Parquet file: {error}") from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}is not JSON that can be read: {error}") from error


@contextmanager
def _at(source: str) -> Iterator[None]:
    """Put the source in front of the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from error.__cause__
