"""SQuAD's questions over paragraphs, taken out of its JSON (v1.1, v2.0) or of rows of a data set.

Everything a source says is checked before it is used, and an error names the place and the
reason. Answers are character offsets into the context, so a single wrong offset would train the
model on noise without any other sign.

Format: Rajpurkar et al. 2016 (arXiv:1606.05250) and 2018 (arXiv:1806.03822).

Where SQuAD's questions come from: a file, or a split of a data set on the hub.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bertvision.errors import InputError
from bertvision.pipelines.files import check_regular, sha256_of_files
from bertvision.pipelines.tasks.source import load_hub, read_text, text_lines

MAX_CHARACTERS = 500_000
"""The longest context or question taken, in characters (SQuAD's longest context has 4,063)."""


class Answer(NamedTuple):
    """One gold answer: a span of the context."""

    text: str
    """The answer, equal to ``context[answer_start : answer_start + len(text)]``."""
    answer_start: int
    """Offset of its first character in the context."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question over one context; questions of a paragraph share the context object."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """The gold answers, the first of which training uses; empty exactly if ``is_impossible``."""
    is_impossible: bool
    """The context does not answer the question (SQuAD 2.0)."""


class SquadData(NamedTuple):
    """The questions of one file or hub split."""

    questions: list[Question]
    """In the order of the source."""
    version: str
    """As the file states it (``v2.0``, ``1.1``); of a file or data set that states none, ``v2.0``
    if it has unanswerable questions and else ``v1.1``."""
    skipped: list[str]
    """One message (file, JSON path, reason) per malformed part left out; empty unless asked for."""
    sha256: str
    """Digest of the file's bytes, or of the canonical JSON of a hub split's questions."""


class SquadReader:
    """Collects validated questions, and what was skipped, of one source."""

    def __init__(self, source: str, skip_bad: bool) -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.questions: list[Question] = []
        self.skipped: list[str] = []
        self._where: dict[str, str] = {}  # question id → JSON path
        self._contexts: dict[str, str] = {}  # so that equal contexts are one object

    @contextmanager
    def _part(self) -> Iterator[None]:
        """A part that `skip_bad` may leave out."""
        try:
            yield
        except InputError as error:
            if not self.skip_bad:
                raise
            self.skipped.append(f"{self.source}: {error}")

    def document(self, document: Any) -> str | None:
        """All articles of a file; returns the version that it states."""
        articles = _field(_typed(document, "the document", dict), "data", "", list)
        if not articles:
            raise InputError("data: holds no articles")
        version: str | None = None
        if type(document.get("version")) in (int, float):  # as annotation tools write it
            version = str(document["version"])
        elif "version" in document:
            version = _field(document, "version", "", str)
        for i, article in enumerate(articles):
            self._article(article, f"data[{i}]")
        return version

    def _article(self, article: Any, at: str) -> None:
        with self._part():
            paragraphs = _field(_typed(article, at, dict), "paragraphs", at, list)
            if not paragraphs:
                raise InputError(f"{at}.paragraphs: holds no paragraphs")
            for i, paragraph in enumerate(paragraphs):
                with self._part():
                    self._paragraph(paragraph, f"{at}.paragraphs[{i}]")

    def _paragraph(self, paragraph: Any, at: str) -> None:
        context = _text(_typed(paragraph, at, dict), "context", at)
        for i, qa in enumerate(_field(paragraph, "qas", at, list)):
            with self._part():
                self._question(qa, context, f"{at}.qas[{i}]")

    def row(self, row: dict[str, Any], at: str) -> None:
        """A row of a data set: answers are two lists, or objects as in SQuAD's own files.

        A row without answers is an unanswerable question.
        """
        with self._part():
            answers = _row_answers(_typed(row, at, dict), at)
            told = row.get("is_impossible") in (True, "true", "True", "1")
            qa = {**row, "answers": answers, "is_impossible": told or not answers}
            self._question(qa, _text(row, "context", at), at)

    def _question(self, qa: Any, context: str, at: str) -> None:
        if type(_typed(qa, at, dict).get("id")) is int:  # as annotation tools number them
            qa = {**qa, "id": str(qa["id"])}
        question_id = _text(qa, "id", at)
        question = _text(qa, "question", at)
        if not question_id:
            raise InputError(f"{at}.id: is empty")
        if first := self._where.get(question_id):
            raise InputError(f"{at}.id: {question_id!r} is already the id of {first}")
        impossible = "is_impossible" in qa and _field(qa, "is_impossible", at, bool)
        answers = tuple(
            _answer(answer, context, f"{at}.answers[{i}]")
            for i, answer in enumerate(_field(qa, "answers", at, list))
        )
        if impossible and answers:
            raise InputError(
                f"{at}.answers: holds {len(answers)}, but is_impossible is true: an unanswerable "
                "question has answers []"
            )
        if "is_impossible" not in qa:
            impossible = not answers
        if not impossible and not answers:
            raise InputError(
                f"{at}.answers: is empty, but is_impossible is false: an answerable question "
                "has at least one answer"
            )
        self._where[question_id] = at
        context = self._contexts.setdefault(context, context)
        self.questions.append(Question(question_id, question, context, answers, impossible))

    def finish(self, version: str | None, digest: str | None) -> SquadData:
        """Data that were read; what is None is made from the questions."""
        if not self.questions:
            why = f" after skipping {len(self.skipped)}: {self.skipped[0]}" if self.skipped else ""
            raise InputError(f"holds no questions{why}")
        if version is None:
            version = "v2.0" if any(q.is_impossible for q in self.questions) else "v1.1"
        return SquadData(self.questions, version, self.skipped, digest or _digest(self.questions))


def _row_answers(row: dict[str, Any], at: str) -> list[Any]:
    """The answers of a row, an object each; of a table of texts they are written as JSON."""
    place, answers = f"{at}.answers", row.get("answers", ())
    if isinstance(answers, str):
        try:
            answers = json.loads(answers) if answers.strip() else []
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{place}: {_short(answers)} is no JSON ({error}): write answers as "
                '{"text": ["Anna"], "answer_start": [0]}, with nothing between [ and ] where there '
                "is no answer"
            ) from error
    if answers is None:
        return []
    if isinstance(answers, list):
        return answers
    columns = _field({"answers": answers} if "answers" in row else {}, "answers", at, dict)
    texts = _field(columns, "text", place, list)
    starts = _field(columns, "answer_start", place, list)
    if len(texts) != len(starts):
        raise InputError(f"{place}: has {len(texts)} texts but {len(starts)} answer_starts")
    return [
        {"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)
    ]


def _answer(answer: Any, context: str, at: str) -> Answer:
    text = _text(_typed(answer, at, dict), "text", at)
    start = _field(answer, "answer_start", at, int)
    if not text:
        raise InputError(f"{at}.text: is empty")
    if start < 0 or not context.startswith(text, start):
        text_there = context[start : start + len(text)] if start >= 0 else ""
        raise InputError(
            f"{at}.answer_start: {start} does not match: the context has {_short(text_there)} "
            f"there, not the answer {_short(text)}"
        )
    return Answer(text, start)


_Json = TypeVar("_Json", dict[str, Any], list[Any], str, int, bool)
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "a boolean"}


def _typed(value: Any, at: str, kind: type[_Json]) -> _Json:
    if type(value) is not kind:  # isinstance would take true for an integer
        type_name = _NAMES.get(type(value)) or json.dumps(value)
        raise InputError(f"{at}: expected {_NAMES[kind]}, found {type_name}")
    return value


def _field(holder: dict[str, Any], key: str, at: str, kind: type[_Json]) -> _Json:
    place = f"{at}.{key}" if at else key
    if key not in holder:
        raise InputError(f"{place}: is missing")
    return _typed(holder[key], place, kind)


def _text(holder: dict[str, Any], key: str, at: str) -> str:
    value = _field(holder, key, at, str)
    if len(value) > MAX_CHARACTERS:
        raise InputError(
            f"{at}.{key}: has {len(value):,} characters, but at most {MAX_CHARACTERS:,} are taken: "
            "split it into paragraphs"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{at}.{key}: has the lone surrogate {value[error.start]!r} at character "
            f"{error.start}, which is no Unicode text"
        ) from error
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _digest(questions: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for q in questions:
        fields = [q.id, q.question, q.context, q.answers, q.is_impossible]
        digest.update(json.dumps(fields, separators=(",", ":")).encode())
    return digest.hexdigest()


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
        skip_bad: Leave out malformed articles, paragraphs and questions and report them in
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
        skip_bad: As in `read_squad`.

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
