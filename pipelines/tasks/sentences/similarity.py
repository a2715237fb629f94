"""Similarity of sentences, as data for extraction.

A sentence is encoded by itself, so that there is one split, ``texts``: every distinct text of a
scored pair once. The pairs are those of `read_similarity`; `bertvision.pipelines.readouts` scores
them.

Pairs of sentences with graded similarity: SICK, the STS Benchmark, STS12 to STS16.

Sentences are encoded by themselves, each distinct text once; which stands beside which, in which
part and sub-set, and how alike people found them, is kept apart, as pairs.

SICK (Marelli et al. 2014, LREC) is read of its three files, with the relatedness from 1 to 5 and
the judgement of entailment; the STS Benchmark (Cer et al. 2017, SemEval) of GLUE's ``train.tsv``
and ``dev.tsv``, or of ``sts-train.csv``, ``sts-dev.csv`` and ``sts-test.csv``. STS12 to STS16
(Agirre et al. 2012–2016, SemEval) have sub-sets, all of them test data: a file
``NAME.test.tsv`` of score, sentence and sentence, or SentEval's ``STS.input.NAME.txt`` beside
``STS.gs.NAME.txt``. A pair without a score was not judged; it is left out and counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.ranking import text_id
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.source import find_in, read_text

ENTAILMENT = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
"""The judgements of SICK, in the order of their indices."""


class SimilaritySpec(NamedTuple):
    """How a data set is written."""

    folders: tuple[str, ...]
    """Where its files may be, inside of the folder that is named."""
    low: int
    """Score of what is not alike."""
    files: dict[str, tuple[str, ...]] = {}
    """Names of the files of each part; empty where there are sub-sets."""
    subsets: tuple[str, ...] = ()
    """Names of the sub-sets, in SentEval's order."""


HIGH = 5
"""Score of what means the same, in all data sets."""


def _year(year: int, *subsets: str) -> SimilaritySpec:
    name = f"STS{year % 100}"
    folders = (f"STS/{name}-en-test", f"{name}-en-test", name, str(year))
    return SimilaritySpec(folders, 0, {}, subsets)


SIMILARITY: dict[str, SimilaritySpec] = {
    "sick": SimilaritySpec(
        ("SICK",),
        1,
        {
            "train": ("SICK_train.txt",),
            "dev": ("SICK_trial.txt",),
            "test": ("SICK_test_annotated.txt",),
        },
    ),
    "sts_benchmark": SimilaritySpec(
        ("STS/STSBenchmark", "STSBenchmark", "STS-B"),
        0,
        {
            "train": ("sts-train.csv", "train.tsv"),
            "dev": ("sts-dev.csv", "dev.tsv"),
            "test": ("sts-test.csv",),
        },
    ),
    "sts12": _year(2012, "MSRpar", "MSRvid", "SMTeuroparl", "OnWN", "SMTnews"),
    "sts13": _year(2013, "FNWN", "headlines", "OnWN"),
    "sts14": _year(2014, "deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "sts15": _year(2015, "answers-forums", "answers-students", "belief", "headlines", "images"),
    "sts16": _year(
        2016, "answer-answer", "headlines", "plagiarism", "postediting", "question-question"
    ),
}
"""The data sets by the names of their tasks."""


class SimilarityPair(NamedTuple):
    """Two sentences and what people said of them."""

    part: str
    """train, dev or test."""
    subset: str
    """Name of the sub-set; that of the data set where it has none."""
    first: int
    """Index among the distinct texts."""
    second: int
    score: float
    """From the spec's ``low`` to `HIGH`."""
    label: int | None = None
    """Index in `ENTAILMENT`; None where nobody was asked."""


class SimilarityData(NamedTuple):
    """Everything of a source."""

    texts: list[Sentence]
    """Each distinct text of a scored pair once, with its `text_id`."""
    pairs: list[SimilarityPair]
    """In the order of the files."""
    sha256: str
    """Digest of the names of all files and the digests of their bytes."""
    unscored: dict[str, int]
    """Pairs without a score that were left out, by sub-set, where there are any."""
    missing: tuple[str, ...]
    """Sub-sets whose files are not there."""


class _Row(NamedTuple):
    line: int
    first: str
    second: str
    score: str
    label: str | None = None


def read_similarity(name: str, source: str) -> SimilarityData:
    """Read a data set.

    Args:
        name: a key of `SIMILARITY`.
        source: the folder of its files, or one that holds it.

    Raises:
        InputError: there are no such files, or a line is malformed. Names file and line.
    """
    folder = _folder(name, source)
    reader = _Reader(name)
    if SIMILARITY[name].subsets:
        reader.subsets(folder)
    else:
        reader.parts(folder)
    if not reader.pairs:
        raise InputError(f"{folder}: no pair of {name} has a score: give the files with scores")
    return SimilarityData(
        [Sentence(text_id(text), text) for text in reader.texts],
        reader.pairs,
        reader.digest.hexdigest(),
        reader.unscored,
        tuple(reader.missing),
    )


def _folder(name: str, source: str) -> Path:
    """The folder of the data set's files: one of its names in the source, or the source."""
    spec, root = SIMILARITY[name], Path(source)
    named = [file for files in spec.files.values() for file in files]
    named += [file for subset in spec.subsets for file in _names_of(subset)]
    for folder in (*(root / inside for inside in spec.folders), root):
        if folder.is_dir() and find_in(folder, named) is not None:
            return folder
    raise InputError(
        f"{source}: holds none of the files of {name} ({', '.join(named[:4])}, …, or the same with "
        f".gz), nor does a folder {' or '.join(spec.folders)} in it: name the folder that has them"
    )


def _names_of(subset: str) -> list[str]:
    given = [f"STS.input.{subset}.txt", f"STS.input.surprise.{subset}.txt"]
    return [f"{subset}.test.tsv", f"{subset}.tsv", *given]


class _Reader:
    """Collects the pairs of all files."""

    def __init__(self, name: str) -> None:
        self.name, self.spec = name, SIMILARITY[name]
        self.texts: dict[str, int] = {}
        self.pairs: list[SimilarityPair] = []
        self.unscored: dict[str, int] = {}
        self.missing: list[str] = []
        self.digest = hashlib.sha256()

    def parts(self, folder: Path) -> None:
        """Read the files of train, dev and test that are there."""
        for part, names in self.spec.files.items():
            if (file := find_in(folder, names)) is not None:
                rows = self._columns(file)
                for row in rows:
                    self._pair(file, part, self.name, row)
        there = {pair.part for pair in self.pairs}
        if not there & {"dev", "test"}:
            raise InputError(
                f"{folder}: has neither dev nor test of {self.name}, so that nothing can be scored"
            )

    def subsets(self, folder: Path) -> None:
        """Read the sub-sets that are there; another sub-set's file is another data set's."""
        known = {name.lower() for subset in self.spec.subsets for name in _names_of(subset)}
        for file in sorted(folder.iterdir()):
            name = file.name.removesuffix(".gz")
            is_subset = name.endswith(".test.tsv") or name.startswith("STS.input.")
            if is_subset and name.lower() not in known:
                raise InputError(
                    f"{file}: is no sub-set of {self.name}, which has "
                    f"{', '.join(self.spec.subsets)}: name the folder of {self.name}"
                )
        for subset in self.spec.subsets:
            if (found_in := find_in(folder, _names_of(subset))) is None:
                self.missing.append(subset)
                continue
            for row in self._scored(found_in):
                self._pair(found_in, "test", subset, row)

    def _scored(self, file: Path) -> Iterator[_Row]:
        """Rows of score and sentences, or of sentences whose scores stand beside."""
        lines = self._lines(file)
        if not file.name.startswith("STS.input."):
            for number, fields in self._fields(file, lines, 3):
                yield _Row(number, fields[1], fields[2], fields[0])
            return
        name = file.name.removesuffix(".gz").replace("STS.input.", "STS.gs.", 1)
        beside = find_in(file.parent, [name])
        if beside is None:
            raise InputError(f"{file.parent / name}: is missing beside {file.name}")
        scores = self._lines(beside)
        if len(scores) != len(lines):
            raise InputError(
                f"{beside}: has {len(scores):,} lines, but {file} has {len(lines):,}: line n of "
                "each must be of the same pair"
            )
        for number, fields in self._fields(file, lines, 2):
            yield _Row(number, fields[0], fields[1], scores[number - 1])

    def _columns(self, file: Path) -> Iterator[_Row]:
        """Rows of SICK, of GLUE, or of the STS Benchmark itself, which has no header."""
        lines = self._lines(file)
        header = lines[0].split("\t")
        wanted = (
            ("sentence_A", "sentence_B", "relatedness_score", "entailment_judgment")
            if self.name == "sick"
            else ("sentence1", "sentence2", "score")
        )
        if set(wanted) <= set(header):
            at = [header.index(column) for column in wanted]
        elif self.name == "sts_benchmark" and len(header) >= 7:
            at, header = [5, 6, 4], []
        else:
            raise InputError(
                f"{file}, line 1: has the columns {header}, not {', '.join(wanted)}: give the "
                f"files of {self.name} as they are shipped"
            )
        for number, fields in self._fields(file, lines, max(at) + 1):
            if number > 1 or not header:
                yield _Row(number, *(fields[i] for i in at))

    def _fields(self, file: Path, lines: list[str], least: int) -> Iterator[tuple[int, list[str]]]:
        for number, line in enumerate(lines, 1):
            fields = line.split("\t")
            if len(fields) < least:
                raise InputError(
                    f"{file}, line {number}: has {len(fields)} columns between tabs, fewer than "
                    f"{least}"
                )
            yield number, fields

    def _pair(self, file: Path, part: str, subset: str, row: _Row) -> None:
        where = f"{file}, line {row.line}"
        if not row.score.strip():
            self.unscored[subset] = self.unscored.get(subset, 0) + 1
            return
        first, second = row.first.strip(), row.second.strip()
        if not first or not second:
            raise InputError(f"{where}: a sentence is empty")
        try:
            score = float(row.score)
        except ValueError:
            score = float("nan")
        if not self.spec.low <= score <= HIGH:
            raise InputError(
                f"{where}: the score is {row.score!r}; it must be a number from {self.spec.low} to "
                f"{HIGH}"
            )
        label = None
        if row.label is not None:
            if row.label.strip() not in ENTAILMENT:
                raise InputError(
                    f"{where}: the judgement is {row.label!r}; it must be one of "
                    f"{', '.join(ENTAILMENT)}"
                )
            label = ENTAILMENT.index(row.label.strip())
        places = [self.texts.setdefault(text, len(self.texts)) for text in (first, second)]
        self.pairs.append(SimilarityPair(part, subset, places[0], places[1], score, label))

    def _lines(self, file: Path) -> list[str]:
        """All lines of a file, whose digest goes into that of the source."""
        text, digest = read_text(file)
        self.digest.update(f"{file.name} {digest}\n".encode())
        return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


SPLIT = "texts"


class SimilarityTask(SentenceTask):
    """Sentences, unlabelled: the score is that of a pair."""

    def splits(self, source: str) -> tuple[str, ...]:
        """All texts, of whichever parts and sub-sets there are."""
        return (SPLIT,)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """The distinct texts of a folder, in the order first seen.

        Raises:
            InputError: the folder is malformed, or has no such split.
        """
        if split != SPLIT:
            raise InputError(f"{self.name} has no split {split!r}: {SPLIT} alone")
        data = read_similarity(self.name, source)
        return TaskData(data.texts, data.sha256, [])

    def check_data(self, items: Sequence[Sentence], source: str) -> NoReturn:
        """Refuse to be trained on.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"no encoder can be fine-tuned on {self.name}, whose scores are of pairs of texts that "
            f"are encoded by themselves: use `bertvision similarity {self.name} --data {source}`"
        )
