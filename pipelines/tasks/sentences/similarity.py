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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.ranking import text_id
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.source import find_in
from bertvision.pipelines.tasks.tables import Column, Layout, Table, aligned_table, read_table

ENTAILMENT = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
"""The judgements of SICK, in the order of their indices."""


HIGH = 5
"""Score of what means the same, in all data sets."""


_STS = Layout(
    {
        "first": Column(("sentence1",), filled=True),
        "second": Column(("sentence2",), filled=True),
        "score": Column(("score",), "score", range=(0, HIGH)),
    },
    separator="\t",
    ragged=True,
    hint="give the files as they are shipped",
)
_BENCHMARK = ("genre", "filename", "year", "index", "score", "sentence1", "sentence2")
_SUBSET = replace(_STS, header=("score", "sentence1", "sentence2"))
_INPUT = replace(_STS, header=("sentence1", "sentence2"))
_SCORES = replace(_STS, header=("score",), separator="\n")
_SICK = replace(
    _STS,
    columns={
        "first": Column(("sentence_A",), filled=True),
        "second": Column(("sentence_B",), filled=True),
        "score": Column(("relatedness_score",), "score", range=(1, HIGH)),
        "label": Column(("entailment_judgment",), among=ENTAILMENT),
    },
)


class SimilaritySpec(NamedTuple):
    """How a data set is written."""

    folders: tuple[str, ...]
    """Where its files may be, inside of the folder that is named."""
    layouts: tuple[Layout, ...]
    files: Mapping[str, tuple[str, ...]] = {}
    """Names of the files of each part; empty where there are sub-sets."""
    subsets: tuple[str, ...] = ()
    """Names of the sub-sets, in SentEval's order."""

    @property
    def low(self) -> int:
        """Score of what is not alike."""
        return self.layouts[0].columns["score"].range[0]


def _year(year: int, *subsets: str) -> SimilaritySpec:
    name = f"STS{year % 100}"
    folders = (f"STS/{name}-en-test", f"{name}-en-test", name, str(year))
    return SimilaritySpec(folders, (_SUBSET,), subsets=subsets)


SIMILARITY: dict[str, SimilaritySpec] = {
    "sick": SimilaritySpec(
        ("SICK",),
        (_SICK,),
        {
            "train": ("SICK_train.txt",),
            "dev": ("SICK_trial.txt",),
            "test": ("SICK_test_annotated.txt",),
        },
    ),
    "sts_benchmark": SimilaritySpec(
        ("STS/STSBenchmark", "STSBenchmark", "STS-B"),
        (_STS, replace(_STS, header=_BENCHMARK)),
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
                self._pairs(read_table(file, *self.spec.layouts), part, self.name)
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
            if (file_of_subset := find_in(folder, _names_of(subset))) is None:
                self.missing.append(subset)
            else:
                self._pairs(self._subset(file_of_subset), "test", subset)

    def _subset(self, file: Path) -> Table:
        """Rows of score and sentences, or of sentences whose scores stand beside."""
        name = file.name.removesuffix(".gz")
        if not name.startswith("STS.input."):
            return read_table(file, *self.spec.layouts)
        scores = name.replace("STS.input.", "STS.gs.", 1)
        return aligned_table(file.parent, {name: _INPUT, scores: _SCORES})

    def _pairs(self, table: Table, part: str, subset: str) -> None:
        for name, digest in table.files.items():
            self.digest.update(f"{name} {digest}\n".encode())
        for _, fields in table.checked():
            if fields["score"] is None:
                self.unscored[subset] = self.unscored.get(subset, 0) + 1
                continue
            first, second = (
                self.texts.setdefault(fields[name].strip(), len(self.texts))
                for name in ("first", "second")
            )
            label = ENTAILMENT.index(fields["label"]) if "label" in fields else None
            self.pairs.append(SimilarityPair(part, subset, first, second, fields["score"], label))


SPLIT = "texts"


class SimilarityTask(SentenceTask):
    """Sentences, unlabelled: the score is that of a pair."""

    refusal = (
        "no encoder can be fine-tuned on {name}, whose scores are of pairs of texts that are "
        "encoded by themselves: use `bertvision similarity {name} --data {data}`"
    )

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
