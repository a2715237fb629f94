"""How good a ranking is: average precision, reciprocal rank and precision at 1 of each question.

Candidates are ordered by score. Equal scores are ordered by passage id, the greater string first,
which is what trec_eval does; ids here are digests of the passages' text, so that this is a fixed
order that has nothing to do with the order of the file, the label or the system.

The metrics of a question without a positive passage are not defined. The convention of WikiQA is
to leave such questions out (Yang, Yih & Meek 2015, EMNLP); `Metrics` says how many there were, and
what the means are where they count as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.tasks.sentences.ranking_data import RankingData

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
        scores: (…, pairs), higher is better.
        question: (pairs,) index of the question.
        tie: (pairs,) which of equal scores comes first: the smaller.

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
        scores: (…, pairs), higher is better; every leading index is a system of its own.
        label: (pairs,) 1 or 0.
        question: (pairs,) index of the question; the result is in this order.
        tie: (pairs,) as for `ranks`.

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    place = ranks(scores, question, tie)
    flat = place.reshape(-1, place.shape[-1])
    positives = np.bincount(question, weights=label)
    found = positives > 0
    chosen = np.flatnonzero(label)
    sums, first = (np.zeros((len(flat), len(positives))) for _ in range(2))
    for row, values in enumerate(flat):
        # positives by question, then rank: the k-th of a question has k positives down to its rank
        order = chosen[np.lexsort((values[chosen], question[chosen]))]
        counts = positives[found].astype(np.int64)
        k = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        sums[row] = np.bincount(question[order], weights=k / values[order], minlength=len(found))
        best = order[k == 1]
        first[row, question[best]] = 1 / values[best]
    shape = (*place.shape[:-1], int(found.sum()))
    rr = first[:, found].reshape(shape)
    ap = (sums[:, found] / positives[found]).reshape(shape)
    return QuestionScores(ap, rr, (rr == 1).astype(np.float64))


def summary(scores: QuestionScores, questions: int) -> Metrics:
    """Means of one system.

    Args:
        scores: (questions with a positive passage,) each.
        questions: all that were asked, with a positive passage or without.

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
    found = positives > 0
    expected = {
        (n, r): _expected(n, r)
        for n, r in {(int(n), int(r)) for n, r in zip(sizes[found], positives[found], strict=True)}
    }
    rows = [expected[int(n), int(r)] for n, r in zip(sizes[found], positives[found], strict=True)]
    ap, rr, p1 = np.array(rows, np.float64).reshape(-1, 3).T
    return QuestionScores(ap, rr, p1)


def _expected(n: int, r: int) -> tuple[float, float, float]:
    """Expected average precision, reciprocal rank and precision at 1: r positives among n."""
    harmonic = math.fsum(1 / k for k in range(1, n + 1))
    above = (r - 1) / (n - 1) if n > 1 else 0.0
    ap = (harmonic + above * (n - harmonic)) / n
    rr = math.fsum(math.comb(n - k, r - 1) / k for k in range(1, n - r + 2)) / math.comb(n, r)
    return ap, rr, r / n
