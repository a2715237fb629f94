"""SQuAD's questions over paragraphs, taken out of its JSON (v1.1, v2.0) or of rows of a data set.

Everything a source says is checked before it is used, and an error names the place and the
reason. Answers are character offsets into the context, so a single wrong offset would train the
model on noise without any other sign.

Format: Rajpurkar et al. 2016 (arXiv:1606.05250) and 2018 (arXiv:1806.03822).

Where SQuAD's questions come from: a file, or a split of a data set on the hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bertvision.errors import InputError
from bertvision.pipelines.tasks.source import read_text
from bertvision.pipelines.tasks.tables import (
    MAX_CHARACTERS,
    Collector,
    Column,
    Layout,
    Row,
    check_text,
    hub_table,
    json_rows,
    parse_json,
    read_object,
    read_table,
)

LAYOUT = Layout(
    {
        **{name: Column((name,), "json") for name in ("id", "question", "context", "answers")},
        "is_impossible": Column(("is_impossible",), "json", optional=True),
    },
    quoted=True,
    ragged=True,
)
"""Columns of files with a row for each question."""


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


class SquadReader(Collector):
    """Collects validated questions, and what was skipped, of one source."""

    def __init__(self, source: str, skip_bad: bool, *, labelled: bool = True) -> None:
        super().__init__(source, skip_bad=skip_bad, noun="question")
        self.labelled = labelled
        self._contexts: dict[str, str] = {}  # so that equal contexts are one object

    def document(self, document: Any) -> str | None:
        """All articles of a file; returns the version that it states."""
        try:
            articles = _field(_typed(document, "the document", dict), "data", list)
            if not articles:
                raise InputError("data: holds no articles")
            version: str | None = None
            if type(document.get("version")) in (int, float):  # as annotation tools write it
                version = str(document["version"])
            elif "version" in document:
                version = _field(document, "version", str)
        except InputError as error:
            raise InputError(f"{self.source}: {error}") from error
        for i, article in enumerate(articles):
            paragraphs: list[Any] = []
            with self.part(place := f"data[{i}]"):
                paragraphs = _field(_typed(article, "the article", dict), "paragraphs", list)
                if not paragraphs:
                    raise InputError("paragraphs: holds no paragraphs")
            for k, paragraph in enumerate(paragraphs):
                self._paragraph(paragraph, f"{place}.paragraphs[{k}]")
        return version

    def _paragraph(self, paragraph: Any, place: str) -> None:
        context, questions = "", list[Any]()
        with self.part(place):
            context = _text(_typed(paragraph, "the paragraph", dict), "context")
            questions = _field(paragraph, "qas", list)
        for i, qa in enumerate(questions):
            with self.part(at := f"{place}.qas[{i}]"):
                self.take(self._question(_typed(qa, "the question", dict), context), at)

    def rows(self, rows: Iterable[Row]) -> None:
        """Rows of a data set: answers are two lists, or objects as in SQuAD's own files.

        A row without answers is an unanswerable question.
        """
        for row in rows:
            with self.part(row.place):
                qa = row.fields
                answers = _row_answers(qa["answers"])
                told = qa.get("is_impossible") in (True, "true", "True", "1")
                qa |= {"answers": answers, "is_impossible": told or not answers}
                self.take(self._question(qa, _text(qa, "context")), row.place)

    def _question(self, qa: dict[str, Any], context: str) -> Question:
        if type(qa.get("id")) is int:  # as annotation tools number them
            qa = {**qa, "id": str(qa["id"])}
        if not self.labelled:
            qa = {**qa, "answers": [], "is_impossible": True}
        question_id, question = _text(qa, "id"), _text(qa, "question")
        if not question_id:
            raise InputError("id: is empty")
        answers = tuple(
            _answer(_typed(answer, f"answers[{i}]", dict), context, f"answers[{i}].")
            for i, answer in enumerate(_field(qa, "answers", list))
        )
        impossible = _field(qa, "is_impossible", bool) if "is_impossible" in qa else not answers
        if impossible and answers:
            raise InputError(
                f"answers: holds {len(answers)}, but is_impossible is true: an unanswerable "
                "question has answers []"
            )
        if not impossible and not answers:
            raise InputError(
                "answers: is empty, but is_impossible is false: an answerable question has at "
                "least one answer"
            )
        context = self._contexts.setdefault(context, context)
        return Question(question_id, question, context, answers, impossible)

    def finish(self, version: str | None, digest: str | None) -> SquadData:
        """Data that were read; what is None is made from the questions."""
        self.require(self.items)
        if version is None:
            version = "v2.0" if any(q.is_impossible for q in self.items) else "v1.1"
        return SquadData(self.items, version, self.skipped, digest or _digest(self.items))


def _row_answers(answers: Any) -> list[Any]:
    """The answers of a row, an object each; of a table of texts they are written as JSON."""
    if isinstance(answers, str):
        try:
            answers = json.loads(answers) if answers.strip() else []
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"answers: {_short(answers)} is no JSON ({error}): write answers as "
                '{"text": ["Anna"], "answer_start": [0]}, with nothing between [ and ] where there '
                "is no answer"
            ) from error
    if answers is None:
        return []
    if isinstance(answers, list):
        return answers
    columns = _typed(answers, "answers", dict)
    texts = _field(columns, "text", list, "answers.")
    starts = _field(columns, "answer_start", list, "answers.")
    if len(texts) != len(starts):
        raise InputError(f"answers: has {len(texts)} texts but {len(starts)} answer_starts")
    pairs = zip(texts, starts, strict=True)
    return [{"text": text, "answer_start": start} for text, start in pairs]


def _answer(answer: dict[str, Any], context: str, at: str) -> Answer:
    text, start = _text(answer, "text", at), _field(answer, "answer_start", int, at)
    if not text:
        raise InputError(f"{at}text: is empty")
    if start < 0 or not context.startswith(text, start):
        text_there = context[start : start + len(text)] if start >= 0 else ""
        raise InputError(
            f"{at}answer_start: {start} does not match: the context has {_short(text_there)} "
            f"there, not the answer {_short(text)}"
        )
    return Answer(text, start)


_Json = TypeVar("_Json", dict[str, Any], list[Any], str, int, bool)
_NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "a boolean"}


def _typed(value: Any, name: str, kind: type[_Json]) -> _Json:
    if type(value) is not kind:  # isinstance would take true for an integer
        type_name = _NAMES.get(type(value)) or json.dumps(value)
        raise InputError(f"{name}: expected {_NAMES[kind]}, found {type_name}")
    return value


def _field(holder: dict[str, Any], key: str, kind: type[_Json], at: str = "") -> _Json:
    if key not in holder:
        raise InputError(f"{at}{key}: is missing")
    return _typed(holder[key], f"{at}{key}", kind)


def _text(holder: dict[str, Any], key: str, at: str = "") -> str:
    return check_text(_field(holder, key, str, at), f"{at}{key}:", MAX_CHARACTERS)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _digest(questions: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for q in questions:
        fields = [q.id, q.question, q.context, q.answers, q.is_impossible]
        digest.update(json.dumps(fields, separators=(",", ":")).encode())
    return digest.hexdigest()


_ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
FORMS = (".json", *_ROWS)
"""Ends of the names of files with questions."""


def read_squad(path: Path, *, skip_bad: bool = False, labelled: bool = True) -> SquadData:
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
        labelled: Whether questions must have answers; otherwise those there are are not read.

    Raises:
        InputError: the file or a part of it is malformed; names the file, the JSON path and why.
    """
    path = Path(path)
    reader = SquadReader(str(path), skip_bad, labelled=labelled)
    if path.name.removesuffix(".gz").endswith(_ROWS):
        table = read_table(path, LAYOUT, forms=_ROWS)
        reader.rows(table.rows)
        return reader.finish(None, table.sha256)
    text, digest = read_text(path)
    if _is_lines(text):
        reader.rows(json_rows(text, [LAYOUT]))
        return reader.finish(None, digest)
    document = parse_json(text, path)
    rows = document.get("data") if isinstance(document, dict) else document
    if isinstance(rows, list) and rows and isinstance(rows[0], dict) and "context" in rows[0]:
        reader.rows(Row(i, partial(read_object, x, [LAYOUT]), "row") for i, x in enumerate(rows))
        return reader.finish(None, digest)
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
    table = hub_table(source, hub_split, LAYOUT)
    reader = SquadReader(table.source, skip_bad)
    reader.rows(table.rows)
    return reader.finish(None, None)


def _is_lines(text: str) -> bool:
    """Whether a text of JSON has an object in each line, as some write it under ``.json``."""
    first, _, rest = text.lstrip().partition("\n")
    if not rest.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False
