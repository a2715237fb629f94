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

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.source import find_in
from bertvision.pipelines.tasks.tables import Column, Layout, aligned_table, read_table

PARTS = ("train", "dev", "test")
"""The parts of the data, each of which may be absent; an extraction knows nothing of them."""

FORMS = (".tsv", ".csv")
_NAMED = Layout(
    {
        "query": Column(("query", "question"), filled=True),
        "passage": Column(("passage", "sentence", "answer"), filled=True),
        "label": Column(("label",), among=("0", "1")),
        "id": Column(
            ("query_id", "queryid", "question_id", "questionid", "qid"), filled=True, optional=True
        ),
    },
    any_case=True,  # those of WikiQA's own files
    hint="name query, passage, label and, if there is one, query_id in a header, or give them in "
    "this order without one",
)
_HEADER = ("query", "passage", "label", "query_id")
LAYOUTS = (_NAMED, replace(_NAMED, header=_HEADER), replace(_NAMED, header=_HEADER[:3]))
"""With a header, or in this order without one."""
_FILES = ("a.toks", "b.toks", "sim.txt", "id.txt")
ALIGNED = {
    file: replace(_NAMED, header=(name,), separator="\n")
    for file, name in zip(_FILES, _HEADER, strict=True)
}
"""The line-aligned files, a column each."""


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
    """A candidate, to which later ones are compared."""

    line: int
    query: str
    label: str


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
        tables = [f"{name}{form}" for name in (part, f"WikiQA-{part}") for form in FORMS]
        if find_in(folder / part, _FILES[:1]):
            table = aligned_table(folder / part, ALIGNED)
        elif file := find_in(folder, tables):
            table = read_table(file, *LAYOUTS, forms=FORMS)
        else:
            return
        for name, digest in table.files.items():
            self.digest.update(f"{part}/{name} {digest}\n".encode())
        questions: dict[str, _Row] = {}
        seen: dict[tuple[str, str], _Row] = {}
        for number, fields in table.checked():
            query, passage, label = (fields[name] for name in ("query", "passage", "label"))
            question = fields["id"].strip() if "id" in fields else text_id(query)
            row = _Row(number, query, label)
            if question.split() != [question]:
                raise InputError(f"{table.at('id', number)}: the id {question!r} holds white space")
            first = questions.setdefault(question, row)
            if first.query != query:
                raise InputError(
                    f"{table.at('id', number)}: question {question!r} reads {query!r}, but "
                    f"{first.query!r} on line {first.line}: an id stands for one question"
                )
            again = seen.setdefault((question, passage), row)
            if again.label != label:
                raise InputError(
                    f"{table.at('label', number)}: the passage is labelled {label} for question "
                    f"{question!r}, but {again.label} on line {again.line}: remove one of them"
                )
            if again is not row:
                same = f"the same question and passage as on line {again.line}"
                self.skipped.append(f"{table.at('passage', number)}: {same}")
                continue
            at = self.queries.setdefault(query, len(self.queries))
            candidate = self.passages.setdefault(passage, len(self.passages))
            self.pairs.append(RankingPair(part, question, at, candidate, int(label)))


def _sentences(texts: dict[str, int]) -> list[Sentence]:
    """The distinct texts as items."""
    return [Sentence(text_id(text), text) for text in texts]


SPLITS = ("queries", "passages")
ANSWERS = ("no answer", "answer")
"""Classes of a pair."""


class WikiqaTask(SentenceTask):
    """Queries and passages, unlabelled: the label is that of a pair."""

    refusal = (
        "no encoder can be fine-tuned on {name}, whose labels are of pairs of texts that are "
        "encoded by themselves: fine-tune it on wikiqa_pairs, or use `bertvision rank {name} "
        "--data {data}`"
    )

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

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """A question and a passage."""
        return {"text": Column(("question",)), "pair": Column(("passage",))}


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
