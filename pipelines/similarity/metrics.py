"""How well scores agree with people's: correlations per sub-set, with bootstrap intervals.

Pairs are drawn with replacement inside of each sub-set, and both correlations computed anew, of
ranks that are those of the sample drawn (Efron & Tibshirani 1993). What is drawn are counts of the
pairs, so that a correlation is a weighted one, and a rank a sum of counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.records import Count, Record
from bertvision.pipelines.similarity.data import Floats, Ints
from bertvision.pipelines.tasks.sentences.metrics import pearson, spearman

ALL, MEAN, WEIGHTED = "all", "mean", "wmean"
"""All pairs as one sample; the mean over sub-sets; the mean weighted by their pairs."""
_AT_ONCE = 100  # resamples: bounds the memory of the ranks


class Value(Record):
    """A figure with its 95 % interval over pairs, mean over seeds."""

    value: float
    low: float
    high: float
    sd: float | None = None
    """Standard deviation over seeds (n − 1); None of one."""


class Agreement(Record):
    """Correlations of one sub-set, or of several together."""

    subset: str
    """Its name, or `ALL`, `MEAN`, `WEIGHTED`."""
    pairs: Count
    pearson: Value
    """From −100 to 100."""
    spearman: Value


class _Drawn(NamedTuple):
    """A metric of every sub-set, and of all pairs as one, in the last place."""

    found: Floats
    """(seeds, sub-sets + 1)"""
    drawn: Floats
    """(seeds, resamples, sub-sets + 1)"""


def agreement(
    predicted: Floats, gold: Floats, subset: Ints, names: Sequence[str], resamples: int
) -> list[Agreement]:
    """Correlations of each sub-set, their mean, their weighted mean, and of all pairs as one.

    Args:
        predicted: (seeds, pairs) scores, higher is more alike.
        gold: (pairs,) people's.
        subset: (pairs,) index of the sub-set.
        names: of the sub-sets; of one alone there is nothing else to tell, and it is called `ALL`.
        resamples: how often pairs are drawn.
    """
    members = [np.flatnonzero(subset == i) for i in range(len(names))]
    sizes = np.array([len(rows) for rows in members], np.float64)
    both = [_drawn(rank, predicted, gold, members, resamples) for rank in (False, True)]

    def told(name: str, pairs: int, weights: Floats) -> Agreement:
        values = [
            Value(
                value=float((one.found @ weights).mean()),
                sd=float((one.found @ weights).std(ddof=1)) if len(one.found) > 1 else None,
                **interval((one.drawn @ weights).mean(0)),
            )
            for one in both
        ]
        return Agreement(subset=name, pairs=pairs, pearson=values[0], spearman=values[1])

    each = np.eye(len(names) + 1)
    rows = [told(ALL, len(gold), each[-1])]
    if len(names) > 1:
        of_subsets = [np.append(np.ones_like(sizes), 0), np.append(sizes, 0)]
        for name, weights in zip((MEAN, WEIGHTED), of_subsets, strict=True):
            rows.append(told(name, len(gold), weights / weights.sum()))
        for i, name in enumerate(names):
            rows.append(told(name, len(members[i]), each[i]))
    return rows


def accuracy(correct: npt.NDArray[np.bool_], resamples: int) -> Value:
    """Share of right pairs in per cent.

    Args:
        correct: (seeds, pairs) whether each is right.
        resamples: how often pairs are drawn.
    """
    return _mean(100 * correct.astype(np.float64), resamples)


def squared_error(predicted: Floats, gold: Floats, resamples: int) -> Value:
    """Mean squared error.

    Args:
        predicted: (seeds, pairs) scores on people's scale.
        gold: (pairs,) people's.
        resamples: how often pairs are drawn.
    """
    return _mean((predicted - gold) ** 2, resamples)


def interval(drawn: Floats) -> dict[str, float]:
    """``low`` and ``high`` of a 95 % percentile interval.

    Args:
        drawn: (resamples,)
    """
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"low": float(low), "high": float(high)}


def weighted_ranks(values: Floats, counts: Floats) -> Floats:
    """Ranks in samples that hold each value as often as it was drawn; ties share their mean rank.

    Args:
        values: (pairs,)
        counts: (resamples, pairs) how often each was drawn.

    Returns:
        (resamples, pairs); what was not drawn has a rank without meaning.
    """
    order = np.argsort(values, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # of equal values
    upto = np.cumsum(counts[:, order], axis=1)[:, ends]
    before = np.concatenate([np.zeros((len(counts), 1)), upto[:, :-1]], axis=1)
    middle = (before + upto + 1) / 2
    group = np.empty(len(values), np.int64)
    group[order] = np.searchsorted(ends, np.arange(len(values)))
    ranks: Floats = middle[:, group]
    return ranks


def weighted_pearson(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Correlations × 100 of samples; 0 where either side is constant: (resamples,).

    Args:
        x: (resamples or 1, pairs)
        y: likewise.
        counts: (resamples, pairs)
    """
    n = counts.sum(1, keepdims=True)
    x, y = x - (counts * x).sum(1, keepdims=True) / n, y - (counts * y).sum(1, keepdims=True) / n
    covariance, *variances = ((counts * a * b).sum(1) for a, b in ((x, y), (x, x), (y, y)))
    scale = np.sqrt(variances[0] * variances[1])
    found: Floats = 100 * np.divide(
        covariance, scale, out=np.zeros_like(scale), where=scale > 1e-12 * n[:, 0]
    )
    return found


def _mean(values: Floats, resamples: int) -> Value:
    """The mean over pairs, of (seeds, pairs)."""
    each, pairs = values.mean(1), values.shape[1]
    drawn = [c @ values.mean(0) / pairs for c in _counts([np.arange(pairs)], resamples)]
    return Value(
        value=float(each.mean()),
        sd=float(each.std(ddof=1)) if len(each) > 1 else None,
        **interval(np.concatenate(drawn)),
    )


def _drawn(
    rank: bool, predicted: Floats, gold: Floats, members: Sequence[Ints], resamples: int
) -> _Drawn:
    groups = [*members, np.concatenate(members)]
    correlation = spearman if rank else pearson
    found = np.array([[correlation(p[rows], gold[rows]) for rows in groups] for p in predicted])
    drawn = np.empty((len(predicted), resamples, len(groups)))
    begin = 0
    for counts in _counts(members, resamples):
        end = begin + len(counts)
        for j, rows in enumerate(groups):
            mine = counts[:, rows]
            y = weighted_ranks(gold[rows], mine) if rank else _unit(gold[rows])
            for i, values in enumerate(predicted):
                x = weighted_ranks(values[rows], mine) if rank else _unit(values[rows])
                drawn[i, begin:end, j] = weighted_pearson(x, y, mine)
        begin = end
    return _Drawn(found, drawn)


def _unit(values: Floats) -> Floats:
    """(1, pairs) with deviation 1, so that a constant sample is told by its size alone."""
    spread = values.std()
    scaled: Floats = ((values - values.mean()) / (spread if spread > 0 else 1))[None]
    return scaled


def _counts(members: Sequence[Ints], resamples: int) -> Iterator[Floats]:
    """(some resamples, pairs) how often each pair was drawn, the same at every call."""
    random = np.random.default_rng(0)
    pairs = sum(map(len, members))
    for begin in range(0, resamples, _AT_ONCE):
        counts = np.zeros((min(_AT_ONCE, resamples - begin), pairs))
        for rows in members:
            share = np.full(len(rows), 1 / len(rows))
            counts[:, rows] = random.multinomial(len(rows), share, len(counts))
        yield counts
