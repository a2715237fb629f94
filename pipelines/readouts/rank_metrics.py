"""Metrics of rankings, BM25 and a random order beside them, files for trec_eval.

Candidates are ordered by score. Equal scores are ordered by passage id, the greater string first,
which is what trec_eval does; ids here are digests of the passages' text, so that this is a fixed
order that has nothing to do with the order of the file, the label or the system.

The metrics of a question without a positive passage are not defined. The convention of WikiQA is
to leave such questions out (Yang, Yih & Meek 2015, EMNLP); `Metrics` says how many there were, and
what the means are where they count as 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, NonFiniteError, WorkspaceError
from bertvision.pipelines.readouts.batched import Floats, Ints
from bertvision.pipelines.tasks.sentences.ranking import RankingData

SETTINGS: dict[str, Any] = {"method": "lucene", "k1": 1.5, "b": 0.75}
"""BM25 in Lucene's form, whose inverse document frequency is never negative, at the usual
constants (Robertson & Zaragoza 2009; computed by bm25s, Lù 2024)."""
TOKENS: dict[str, Any] = {"lower": True, "token_pattern": r"(?u)\b\w\w+\b", "stopwords": "en"}
"""Lower-cased runs of two or more word characters but 33 English stop words; no stemming."""


@dataclass(frozen=True)
class Candidates:
    """The pairs of one part of the data, as arrays; (pairs,) unless said otherwise."""

    questions: list[str]
    """Ids, in the order first seen."""
    question: Ints
    """Index into ``questions``."""
    query: Ints
    """Index among the distinct queries of the data."""
    passage: Ints
    """Index among the distinct passages of the data."""
    label: Ints
    """1 where the passage answers, else 0."""
    tie: Ints
    """Place among the candidates of the part where scores are equal: by passage id, descending."""

    @classmethod
    def of(cls, data: RankingData, part: str) -> Candidates:
        """The candidates of ``train``, ``dev`` or ``test``.

        Raises:
            InputError: the data has no such part.
        """
        pairs = [pair for pair in data.pairs if pair.part == part]
        if not pairs:
            parts = ", ".join(dict.fromkeys(pair.part for pair in data.pairs))
            raise InputError(
                f"the data has no part {part}, only {parts}: add {part}/ or {part}.tsv"
            )
        numbers: dict[str, int] = {}
        question = [numbers.setdefault(pair.question, len(numbers)) for pair in pairs]
        return cls(
            list(numbers),
            np.array(question, np.int64),
            np.array([pair.query for pair in pairs], np.int64),
            np.array([pair.passage for pair in pairs], np.int64),
            np.array([pair.label for pair in pairs], np.int64),
            tie_order([data.passages[pair.passage].id for pair in pairs]),
        )

    def __len__(self) -> int:
        return len(self.question)


class QuestionScores(NamedTuple):
    """Scores of each question that has a positive passage, from 0 to 1: (…, questions)."""

    ap: Floats
    """Average precision: the mean over the positive passages of the precision at their rank."""
    rr: Floats
    """Reciprocal rank of the first positive passage."""
    p1: Floats
    """1 where the first passage is positive, else 0."""


class Metrics(NamedTuple):
    """Means over questions, in per cent."""

    map: float
    mrr: float
    p1: float
    map_all: float
    """As ``map``, where questions without a positive passage count as 0; likewise the others."""
    mrr_all: float
    p1_all: float
    questions: int
    """With a positive passage."""
    without_positive: int
    """Questions that ``map``, ``mrr`` and ``p1`` leave out."""


def tie_order(ids: Sequence[str]) -> Ints:
    """Places of equal scores: 0 for the greatest id, the same place for the same id. (ids,)."""
    places = {name: place for place, name in enumerate(sorted(set(ids), reverse=True))}
    return np.array([places[name] for name in ids], np.int64)


def ranks(scores: npt.ArrayLike, question: Ints, tie: Ints) -> Ints:
    """Rank of each candidate among those of its question, from 1.

    Args:
        scores: (…, pairs) scores, of which higher ones are better.
        question: (pairs,) index of the question.
        tie: (pairs,) order of equal scores: the smaller comes first.

    Returns:
        (…, pairs).

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    given = np.asarray(scores)
    if not np.isfinite(given).all():
        raise NonFiniteError(
            "scores hold NaN or infinity, so that passages cannot be ranked: lower the learning "
            "rate, or look for non-finite hidden states with `bertvision store verify`"
        )
    flat = given.reshape(-1, given.shape[-1])
    counts = np.bincount(question)
    begins = np.repeat(np.cumsum(counts) - counts, counts)  # of each place, sorted by question
    result = np.empty(flat.shape, np.int64)
    for row, values in zip(result, flat, strict=True):
        order = np.lexsort((tie, -values, question))
        row[order] = np.arange(len(question)) - begins + 1
    return result.reshape(given.shape)


def score_questions(
    scores: npt.ArrayLike, label: Ints, question: Ints, tie: Ints
) -> QuestionScores:
    """Score the ranking of every question that has a positive passage.

    Args:
        scores: (…, pairs) scores, of which higher ones are better; every leading index is a system
            of its own.
        label: (pairs,) 1 or 0.
        question: (pairs,) index of the question, which orders the result.
        tie: (pairs,) order of equal scores; see `ranks`.

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    place = ranks(scores, question, tie)
    flat = place.reshape(-1, place.shape[-1])
    positives = np.bincount(question, weights=label)
    asked = positives > 0
    chosen = np.flatnonzero(label)
    sums, first = (np.zeros((len(flat), len(positives))) for _ in range(2))
    for row, values in enumerate(flat):
        # positives by question, then rank: the k-th of a question has k positives down to its rank
        order = chosen[np.lexsort((values[chosen], question[chosen]))]
        counts = positives[asked].astype(np.int64)
        k = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        sums[row] = np.bincount(question[order], weights=k / values[order], minlength=len(asked))
        best = order[k == 1]
        first[row, question[best]] = 1 / values[best]
    shape = (*place.shape[:-1], int(asked.sum()))
    rr = first[:, asked].reshape(shape)
    ap = (sums[:, asked] / positives[asked]).reshape(shape)
    return QuestionScores(ap, rr, (rr == 1).astype(np.float64))


def summary(scores: QuestionScores, questions: int) -> Metrics:
    """Means of one system.

    Args:
        scores: (questions with a positive passage,) each.
        questions: Number of all questions, with a positive passage or without.

    Raises:
        InputError: no question has a positive passage.
    """
    n = scores.ap.shape[-1]
    if not n:
        raise InputError(
            f"none of {questions:,} questions has a positive passage: nothing can be scored"
        )
    means = [100 * float(values.mean()) for values in scores]
    ap, rr, p1 = means
    ap_all, rr_all, p1_all = (mean * n / questions for mean in means)
    return Metrics(ap, rr, p1, ap_all, rr_all, p1_all, n, questions - n)


def expected_at_random(label: Ints, question: Ints) -> QuestionScores:
    """Exact expectation of the scores of each question over all orders of its candidates.

    With R positives among n, rank k holds a positive with probability R/n, above which
    (k − 1)(R − 1)/(n − 1) more are expected (Bestgen 2015, Prague Bulletin of Mathematical
    Linguistics 103); the first of them is at rank k with probability C(n − k, R − 1) / C(n, R).

    Args:
        label: (pairs,) 1 or 0.
        question: (pairs,) index of the question.
    """
    sizes, positives = np.bincount(question), np.bincount(question, weights=label).astype(np.int64)
    has_answer = positives > 0
    expected = {
        (n, r): _expected(n, r)
        for n, r in {
            (int(n), int(r)) for n, r in zip(sizes[has_answer], positives[has_answer], strict=True)
        }
    }
    rows = [
        expected[int(n), int(r)]
        for n, r in zip(sizes[has_answer], positives[has_answer], strict=True)
    ]
    ap, rr, p1 = np.array(rows, np.float64).reshape(-1, 3).T
    return QuestionScores(ap, rr, p1)


def _expected(n: int, r: int) -> tuple[float, float, float]:
    """Expected average precision, reciprocal rank and precision at 1: r positives among n."""
    harmonic = math.fsum(1 / k for k in range(1, n + 1))
    above = (r - 1) / (n - 1) if n > 1 else 0.0
    ap = (harmonic + above * (n - harmonic)) / n
    rr = math.fsum(math.comb(n - k, r - 1) / k for k in range(1, n - r + 2)) / math.comb(n, r)
    return ap, rr, r / n


def bm25(data: RankingData, candidates: Candidates) -> npt.NDArray[np.float32]:
    """Score each candidate for its question by BM25: (pairs,).

    Document frequencies and the mean length are those of the distinct candidate passages of the
    part that is scored, of all its questions together: the collection that would be searched.

    Args:
        data: Data whose texts are compared.
        candidates: Candidates of one part of it.
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG

    passages, place = np.unique(candidates.passage, return_inverse=True)
    quiet = {"return_ids": False, "show_progress": False}
    words = bm25s.tokenize([data.passages[i].text for i in passages], **TOKENS, **quiet)
    asked, question = np.unique(candidates.query, return_inverse=True)
    queries = bm25s.tokenize([data.queries[i].text for i in asked], **TOKENS, **quiet)
    scores = np.zeros(len(candidates), np.float32)
    if not any(words):
        return scores  # no passage has a word: all are alike
    index = bm25s.BM25(**SETTINGS)
    index.index(words, show_progress=False)
    for i, query in enumerate(queries):
        if known := index.get_tokens_ids(query):
            mine = question == i
            scores[mine] = index.get_scores_from_ids(known)[place[mine]]
    return scores


def run_file(
    scores: npt.NDArray[np.float32], candidates: Candidates, passages: Sequence[str], name: str
) -> str:
    """A ranking as trec_eval reads it: ``question Q0 passage rank score name``, a line each."""
    place = ranks(scores, candidates.question, candidates.tie)
    order = np.lexsort((place, candidates.question))
    return "".join(
        f"{candidates.questions[candidates.question[i]]} Q0 {passages[candidates.passage[i]]} "
        f"{place[i]} {scores[i]:.9g} {name}\n"
        for i in order
    )


def read_qrels(path: Path) -> tuple[Ints, Ints]:
    """Read the number of the question and the label of each candidate, as `qrels_file` wrote them.

    Args:
        path: Path of the file.

    Returns:
        (candidates,) of each.

    Raises:
        WorkspaceError: it is damaged; names the line.
    """
    numbers: dict[str, int] = {}
    question, label = [], []
    try:
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match line.split(" "):
                case [name, "0", _, ("0" | "1") as digit]:
                    question.append(numbers.setdefault(name, len(numbers)))
                    label.append(int(digit))
                case _:
                    raise ValueError(f"line {i} is {line[:80]!r}")
        if not any(label):
            raise ValueError("it has no positive passage")
    except (OSError, ValueError) as error:
        again = f"`bertvision rank {path.parents[1].name}` writes it again"
        raise WorkspaceError(f"{path} is damaged ({error}): {again}") from error
    return np.array(question, np.int64), np.array(label, np.int64)


def qrels_file(candidates: Candidates, passages: Sequence[str]) -> str:
    """The labels as trec_eval reads them: ``question 0 passage label``, a line each."""
    return "".join(
        f"{candidates.questions[q]} 0 {passages[p]} {label}\n"
        for q, p, label in zip(
            candidates.question, candidates.passage, candidates.label, strict=True
        )
    )
