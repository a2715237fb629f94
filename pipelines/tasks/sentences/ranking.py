"""Answer ranking: questions, candidate passages, and which of them answer.

Queries and passages are encoded by themselves, so the splits for extraction are ``queries`` and
``passages``: every distinct text of train, dev and test once, in the order first seen. Which query
stands beside which passage, in which part of the data, is kept apart, as pairs.

Two forms are read, plain or gzip. A folder with ``train/``, ``dev/`` and ``test/``, each with
line-aligned ``a.toks`` (question), ``b.toks`` (passage), ``sim.txt`` (label) and ``id.txt``
(question id); or a folder with ``train.tsv``, ``dev.tsv`` and ``test.tsv`` (or csv) of a query, a
passage, a label and perhaps a query id, among them the files of WikiQA itself (Yang, Yih & Meek
2015, EMNLP).

Answer ranking in the manner of WikiQA, as data for extraction and for fine-tuning.

To extract, a question and its candidate passages are encoded by themselves, so the splits are
``queries`` and ``passages``: every distinct text of train, dev and test once. Which passage stands
beside which question, and whether it answers, is in the pairs of `read_ranking`;
`bertvision.pipelines.readouts.rank` ranks by them. To fine-tune, a question and a passage are one
window and the label is the pair's, with the splits of the data.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.source import read_text

PARTS = ("train", "dev", "test")
"""The parts of the data, each of which may be absent; an extraction knows nothing of them."""

_COLUMNS = {
    "query": ("query", "question"),
    "passage": ("passage", "sentence", "answer"),
    "label": ("label",),
    "id": ("query_id", "queryid", "question_id", "questionid", "qid"),
}
"""Names that a header may give, the last two those of WikiQA's own files, in lower case."""

_ALIGNED = ("a.toks", "b.toks", "sim.txt", "id.txt")
"""In the order of `_COLUMNS`."""


class RankingPair(NamedTuple):
    """A candidate passage of a question."""

    part: str
    """train, dev or test."""
    question: str
    """Id of the question, unique inside its part."""
    query: int
    """Index among the distinct queries."""
    passage: int
    """Index among the distinct passages."""
    label: int
    """1 where the passage answers the question, else 0."""


class RankingData(NamedTuple):
    """Everything of a source."""

    queries: list[Sentence]
    """Each distinct text once, with its `text_id`."""
    passages: list[Sentence]
    pairs: list[RankingPair]
    """In the order of the files."""
    sha256: str
    """Digest of the names of all files and the digests of their bytes."""
    skipped: list[str]
    """Candidates that a question lists again, each named by file and line."""


class _Row(NamedTuple):
    """A line of a source, before it is checked."""

    files: tuple[Path, Path, Path, Path]
    """Where query, passage, label and question stand."""
    line: int
    query: str
    passage: str
    label: str
    question: str

    def at(self, column: int) -> str:
        """Where a column stands, for a message."""
        return f"{self.files[column]}, line {self.line}"


def text_id(text: str) -> str:
    """Id of a query or passage: 16 hex digits of its SHA-256, whatever the order of the files."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_ranking(source: str) -> RankingData:
    """Read a folder of either form.

    Raises:
        InputError: the folder or a file cannot be read, is empty or misaligned, or a line holds
            no text, another label than 0 or 1, or contradicts an earlier one. Names file and line.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise InputError(
            f"{source} is no folder: give one that holds train/, dev/ and test/, each with a.toks, "
            "b.toks, sim.txt and id.txt, or train.tsv, dev.tsv and test.tsv"
        )
    reader = _Reader()
    for part in PARTS:
        reader.part(folder, part)
    if not reader.pairs:
        raise InputError(
            f"{source}: has none of train/a.toks, dev/a.toks, test/a.toks, train.tsv, dev.tsv, "
            "test.tsv (or csv, or with .gz)"
        )
    return RankingData(
        _sentences(reader.queries),
        _sentences(reader.passages),
        reader.pairs,
        reader.digest.hexdigest(),
        reader.skipped,
    )


class _Reader:
    """Collects the pairs of all parts."""

    def __init__(self) -> None:
        self.queries: dict[str, int] = {}
        self.passages: dict[str, int] = {}
        self.pairs: list[RankingPair] = []
        self.skipped: list[str] = []
        self.digest = hashlib.sha256()

    def part(self, folder: Path, part: str) -> None:
        """Read a part, if it is there."""
        if file := _find(folder / part, _ALIGNED[0]):
            rows = self._aligned(file, part)
        elif file := _find(
            folder, f"{part}.tsv", f"{part}.csv", f"WikiQA-{part}.tsv", f"WikiQA-{part}.csv"
        ):
            rows = _table(file, self._lines(file, part))
        else:
            return
        texts: dict[str, _Row] = {}
        seen: dict[tuple[str, str], _Row] = {}
        for row in rows:
            self._pair(part, row, texts, seen)

    def _pair(
        self,
        part: str,
        row: _Row,
        texts: dict[str, _Row],
        seen: dict[tuple[str, str], _Row],
    ) -> None:
        for column, text in enumerate((row.query, row.passage, row.label, row.question)):
            if not text.strip():
                raise InputError(f"{row.at(column)}: the {tuple(_COLUMNS)[column]} is empty")
        if row.label not in ("0", "1"):
            raise InputError(
                f"{row.at(2)}: the label is {row.label!r}; it must be 1 (the passage answers) or 0"
            )
        if row.question.split() != [row.question]:
            raise InputError(f"{row.at(3)}: the id {row.question!r} holds white space")
        first = texts.setdefault(row.question, row)
        if first.query != row.query:
            raise InputError(
                f"{row.at(3)}: question {row.question!r} reads {row.query!r}, but {first.query!r} "
                f"on line {first.line}: an id stands for one question"
            )
        again = seen.setdefault((row.question, row.passage), row)
        if again.label != row.label:
            raise InputError(
                f"{row.at(2)}: the passage is labelled {row.label} for question {row.question!r}, "
                f"but {again.label} on line {again.line}: remove one of them"
            )
        if again is not row:
            self.skipped.append(
                f"{row.at(1)}: the same question and passage as on line {again.line}"
            )
            return
        query = self.queries.setdefault(row.query, len(self.queries))
        passage = self.passages.setdefault(row.passage, len(self.passages))
        self.pairs.append(RankingPair(part, row.question, query, passage, int(row.label)))

    def _aligned(self, first: Path, part: str) -> Iterator[_Row]:
        """Rows of four files, line by line."""
        files = [first]
        for name in _ALIGNED[1:]:
            if not (file := _find(first.parent, name)):
                raise InputError(f"{first.parent / name}: is missing beside {first.name}")
            files.append(file)
        columns = [self._lines(file, part) for file in files]
        for file, column in zip(files, columns, strict=True):
            if len(column) != len(columns[0]):
                raise InputError(
                    f"{file}: has {len(column):,} lines, but {first} has {len(columns[0]):,}: line "
                    "n of each must be of the same pair"
                )
        where = (files[0], files[1], files[2], files[3])
        for line, (query, passage, label, question) in enumerate(zip(*columns, strict=True), 1):
            yield _Row(where, line, query, passage, label.strip(), question.strip())

    def _lines(self, file: Path, part: str) -> list[str]:
        """All lines of a file, blank ones too, whose digest goes into that of the source."""
        text, digest = read_text(file)
        self.digest.update(f"{part}/{file.name} {digest}\n".encode())
        return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _table(file: Path, lines: list[str]) -> Iterator[_Row]:
    """Rows of a tsv (without quoting) or csv, with a header or in the order of `_COLUMNS`."""
    texts = (f"{line}\n" for line in lines)
    reader = (
        csv.reader(texts, delimiter="\t", quoting=csv.QUOTE_NONE)
        if ".tsv" in file.name
        else csv.reader(texts, strict=True)
    )
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise InputError(f"{file}, line {reader.line_num}: is no csv ({error})") from error
    _, head = rows[0]
    if columns := _header(head):
        del rows[0]
    elif len(head) in (3, 4) and head[2].strip() in ("0", "1"):
        columns = {name: i for i, name in enumerate(_COLUMNS) if i < len(head)}
    else:
        raise InputError(
            f"{file}, line 1: has the columns {head}; name query, passage, label and, if there is "
            "one, query_id in a header, or give them in this order without one"
        )
    for line, row in rows:
        if len(row) != len(head):
            raise InputError(f"{file}, line {line}: has {len(row)} columns, not {len(head)}")
        query, passage, label = (row[columns[name]] for name in ("query", "passage", "label"))
        question = row[columns["id"]].strip() if "id" in columns else text_id(query)
        yield _Row((file,) * 4, line, query, passage, label.strip(), question)


def _header(names: list[str]) -> dict[str, int] | None:
    """Where each column stands, of a line that names at least query, passage and label."""
    lowered = [name.strip().lower() for name in names]
    places = {
        column: lowered.index(alias)
        for column, aliases in _COLUMNS.items()
        for alias in aliases
        if alias in lowered
    }
    return places if {"query", "passage", "label"} <= set(places) else None


def _find(folder: Path, *names: str) -> Path | None:
    """The first of these files that is there, plain or gzip."""
    files = (folder / f"{name}{end}" for name in names for end in ("", ".gz"))
    return next((file for file in files if file.is_file()), None)


def _sentences(texts: dict[str, int]) -> list[Sentence]:
    """The distinct texts as items."""
    return [Sentence(text_id(text), text) for text in texts]


SPLITS = ("queries", "passages")
ANSWERS = ("no answer", "answer")
"""Classes of a pair."""


class WikiqaTask(SentenceTask):
    """Queries and passages, unlabelled: the label is that of a pair."""

    def splits(self, source: str) -> tuple[str, ...]:
        """Queries and passages, whichever of train, dev and test there are."""
        return SPLITS

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """The distinct queries or passages of a folder, in the order first seen.

        Raises:
            InputError: the folder is malformed, or has no such split.
        """
        if split not in SPLITS:
            raise InputError(f"{self.name} has no split {split!r}: {' and '.join(SPLITS)}")
        data = read_ranking(source)
        items = data.queries if split == "queries" else data.passages
        return TaskData(items, data.sha256, data.skipped)

    def check_data(self, items: Sequence[Sentence], source: str) -> NoReturn:
        """Refuse to be trained on.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"no encoder can be fine-tuned on {self.name}, whose labels are of pairs of texts that "
            f"are encoded by themselves: fine-tune it on wikiqa_pairs, or use `bertvision rank "
            f"{self.name} --data {source}`"
        )


class WikiqaPairsTask(SentenceTask):
    """Questions with a candidate passage each, in one window: whether the passage answers."""

    positive = 1

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits of train, dev and test that there are."""
        there = {pair.part for pair in read_ranking(source).pairs}
        return tuple(part for part in PARTS if part in there)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """The pairs of a part of a folder, in their order.

        Raises:
            InputError: the folder is malformed, or has no such part.
        """
        data = read_ranking(source)
        items = pairs_of(data, split)
        if not items:
            raise InputError(f"{source}: has no part {split}: add {split}/ or {split}.tsv")
        return TaskData(items, data.sha256, data.skipped, ANSWERS)

    def inputs(self, config: TaskConfig) -> tuple[str, ...]:
        """A question and a passage."""
        return ("question", "passage")


def pairs_of(data: RankingData, part: str) -> list[Sentence]:
    """The pairs of train, dev or test, each question beside a passage, in their order."""
    return [
        Sentence(
            f"{pair.question} {data.passages[pair.passage].id}",
            data.queries[pair.query].text,
            data.passages[pair.passage].text,
            pair.label,
        )
        for pair in data.pairs
        if pair.part == part
    ]
