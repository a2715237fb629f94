"""Uncertainty of scores: the spread that another choice of items, and of seeds, would give.

Items are drawn again with replacement, as often as there are, and the score is computed anew (Efron
& Tibshirani 1993, An Introduction to the Bootstrap). Intervals are those of the percentiles.

Two systems that answer the same questions are compared question by question: both are scored on
the same draws (Koehn 2004, EMNLP; Berg-Kirkpatrick et al. 2012, EMNLP-CoNLL).

Questions about one paragraph are not independent: a system that misreads the paragraph gets several
of them wrong at once. Drawing questions one by one would take them for more evidence than they are,
so whole clusters are drawn where they are given.

The interval of one seed holds the noise of the sample of questions alone. The noise of training is
in it where several seeds were trained: seeds and questions are then drawn anew, each by itself, as
in the multi-bootstrap of Sellam et al. 2022 (The MultiBERTs, ICLR, arXiv:2106.16163) and Owen 2007
(The pigeonhole bootstrap, Annals of Applied Statistics 1). Of n seeds the drawn spread is, as in
every bootstrap, too small by the factor √((n − 1)/n).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
By = Literal["context", "question"]
"""Unit of a draw: all questions of one text together, or each alone."""
Seeds = Literal["one", "all"]
"""Whether a system is the one training that was named, or all that differ from it by seed."""
_DRAWS_AT_ONCE = 1 << 22  # bounds the memory: 64 MB of indices and sums
_COUNTS_AT_ONCE = 100  # resamples whose counts are held: bounds the memory of ranks
_SHARES = 10_000  # draws of shares, which cost next to nothing


class Difference(NamedTuple):
    """The difference of two systems, first minus second, in the unit of the scores."""

    first: float
    """Mean score of the first system."""
    second: float
    """Mean score of the second."""
    difference: float
    """First minus second."""
    low: float
    """Lower end of the percentile interval of the difference."""
    high: float
    """Its upper end."""
    p: float
    """Two-sided: how often a difference at least as far from 0 arises where there is none."""
    standard_error: float
    """Standard deviation of the difference over the resamples."""
    questions: int
    """Number of scores of each system."""
    clusters: int
    """Number of units that are drawn: contexts, or questions where each stands alone."""
    resamples: int
    """Number of draws."""
    seeds: tuple[int, int] = (1, 1)
    """Trainings of each system that were drawn too; one is taken as it is."""


def paired_bootstrap(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The difference of two systems' mean scores, with its interval and p-value.

    The interval is that of the percentiles. For p, the resampled differences are moved so that
    their centre is 0, as they would be if the systems were equally good, and those at least as far
    from it as the measured one are counted (one is added to both counts, so that p is never 0).

    Args:
        first: (questions,) scores of the first system; (seeds, questions) of several trainings,
            which are drawn too.
        second: Scores of the second, likewise; the questions are in the same order.
        clusters: (questions,) cluster of each question, such as its context; clusters are
            drawn whole. None draws question by question.
        resamples: Number of draws.
        confidence: Share of the draws inside of the interval.
        seed: Seed of the draws.

    Raises:
        InputError: there are no scores, they are not finite, or not as many on both sides.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    one, other = (x[0] if x.ndim == 2 and len(x) else x for x in (a, b))
    _check(one, other, resamples, confidence)
    random, means = np.random.default_rng(seed), (float(a.mean()), float(b.mean()))
    if a.ndim == b.ndim == 1:
        sums, sizes = _by_cluster(a - b, clusters)
        drawn = resampled_means(sums, sizes, resamples, random)
        exact, slack = float(sums.sum() / sizes.sum()), float(np.abs(a - b).max())
    else:
        a, b = np.atleast_2d(a), np.atleast_2d(b)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InputError("scores hold NaN or infinity: they cannot be compared")
        sizes = _by_cluster(a[0], clusters)[1]
        sides = [np.array([_by_cluster(row, clusters)[0] for row in x]).T for x in (a, b)]
        drawn = np.concatenate(
            [
                _of_drawn_seeds(sides[0], sizes, times, random)
                - _of_drawn_seeds(sides[1], sizes, times, random)
                for times in drawn_counts(len(sizes), resamples, random)
            ]
        )
        exact, slack = means[0] - means[1], float(max(abs(a).max(), abs(b).max()))
    difference = _difference(means, exact, drawn, 1e-9 * slack, confidence, a.shape[-1], len(sizes))
    return difference._replace(seeds=(len(np.atleast_2d(a)), len(np.atleast_2d(b))))


def paired_runs(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The difference of two systems that every run has, with its interval over runs and questions.

    d ± t(ν) · √(s²/n + e²): d is the mean of the n runs' own differences, s² their variance with
    n − 1, and e the bootstrap's standard error of d over clusters of questions; the degrees of
    freedom ν are those of Satterthwaite (1946, Biometrics Bulletin 2), of n − 1 and one less than
    the number of clusters. The interval of few runs is as wide as that of t; that of drawn runs is
    narrower.

    Args:
        first: (runs, questions) scores of the first system in each run.
        second: Those of the second, likewise; runs and questions are in the same order.
        clusters: See `paired_bootstrap`.
        resamples: Number of draws.
        confidence: Probability with which such intervals hold the true difference.
        seed: Seed of the draws.

    Raises:
        InputError: there are no scores, they are not finite, not as many on both sides, or of one
            run alone.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 2 or len(a) < 2:
        raise InputError(
            f"scores of shape {a.shape} have no spread over runs: give those of two runs or more"
        )
    over_questions = paired_bootstrap(
        a.mean(0), b.mean(0), clusters=clusters, resamples=resamples, seed=seed
    )
    _check(a.ravel(), b.ravel(), resamples, confidence)
    from scipy.special import stdtr, stdtrit

    of_runs = float((a - b).mean(1).var(ddof=1)) / len(a)
    of_questions = over_questions.standard_error**2
    error, half, p = float(np.sqrt(of_runs + of_questions)), 0.0, 1.0
    if error:
        parts = [(of_runs, len(a) - 1), (of_questions, max(over_questions.clusters - 1, 1))]
        freedom = error**4 / sum(part**2 / own for part, own in parts)
        half = error * float(stdtrit(freedom, (1 + confidence) / 2))
        p = 2 * float(stdtr(freedom, -abs(over_questions.difference) / error))
    return over_questions._replace(
        low=over_questions.difference - half,
        high=over_questions.difference + half,
        p=p,
        standard_error=error,
        seeds=(len(a), len(b)),
    )


def _of_drawn_seeds(
    sums: Floats, sizes: Floats, times: Ints, random: np.random.Generator
) -> Floats:
    """(resamples,) means over clusters and seeds, of which as many are drawn as there are.

    Args:
        sums: (clusters, seeds) sum of the scores of each cluster.
        sizes: (clusters,) number of scores of each cluster.
        times: (resamples, clusters) how often each cluster was drawn.
        random: Generator that draws the seeds.
    """
    by_seed = times @ sums / (times @ sizes)[:, None]  # (resamples, seeds)
    seeds = random.integers(0, sums.shape[1], by_seed.shape)
    means: Floats = np.take_along_axis(by_seed, seeds, axis=1).mean(axis=1)
    return means


def paired_bootstrap_of(
    metric: Callable[[npt.NDArray[Any], npt.NDArray[Any]], float],
    first: npt.NDArray[Any],
    second: npt.NDArray[Any],
    gold: npt.NDArray[Any],
    *,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The same for a metric that is no mean over questions, such as a correlation.

    The metric is computed anew on each resample, of both systems on the same questions; of several
    trainings it is the mean over those that were drawn.

    Args:
        metric: Score of predictions and gold labels, (questions,) each.
        first: (questions,) predictions of the first system, or (seeds, questions) of several
            trainings, which are drawn too.
        second: Those of the second, likewise; the questions are in the same order.
        gold: (questions,) labels.
        clusters: See `paired_bootstrap`.
        resamples: Number of draws.
        confidence: Share of the draws inside of the interval.
        seed: Seed of the draws.

    Raises:
        InputError: there are no predictions, they are not finite, or not as many on all sides.
    """
    sides = [np.atleast_2d(first), np.atleast_2d(second)]
    for a in sides[0]:
        for b in sides[1]:
            _check(a.real.astype(np.float64), b.real.astype(np.float64), resamples, confidence)
    members = _members(len(gold), clusters)
    random = np.random.default_rng(seed)
    drawn = np.empty(resamples)
    for i in range(resamples):
        chosen = random.integers(0, len(members), len(members))
        rows = np.concatenate([members[c] for c in chosen])
        means = []
        for side in sides:
            times = np.bincount(random.integers(0, len(side), len(side))) if len(side) > 1 else [1]
            some = [k * metric(side[s, rows], gold[rows]) for s, k in enumerate(times) if k]
            means.append(sum(some) / len(side))
        drawn[i] = means[0] - means[1]
    one, other = (float(np.mean([metric(said, gold) for said in side])) for side in sides)
    slack = 1e-9 * max(abs(one), abs(other))
    sizes = len(gold), len(members)
    difference = _difference((one, other), one - other, drawn, slack, confidence, *sizes)
    return difference._replace(seeds=(len(sides[0]), len(sides[1])))


def _check(a: Floats, b: Floats, resamples: int, confidence: float) -> None:
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise InputError(
            f"scores of shapes {a.shape} and {b.shape} cannot be paired: give one score per "
            "question of each system"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("scores hold NaN or infinity: they cannot be compared")
    if resamples < 1 or not 0 < confidence < 1:
        raise InputError(
            f"{resamples} resamples at confidence {confidence}: give at least one, and a "
            "confidence between 0 and 1"
        )


def _difference(
    scores: tuple[float, float],
    difference: float,
    drawn: Floats,
    slack: float,
    confidence: float,
    questions: int,
    clusters: int,
) -> Difference:
    """Interval, p-value and standard error of resampled differences.

    Args:
        scores: Scores of the first and the second system.
        difference: First score minus second.
        drawn: (resamples,) differences.
        slack: Amount by which equal differences may differ, since sums in another order differ in
            their last bits.
        confidence: Share of the draws inside of the interval.
        questions: Number of scores of each system.
        clusters: Number of clusters that were drawn.
    """
    low, high = percentiles(drawn, 50 * (1 - confidence))
    far = np.abs(drawn - difference) >= abs(difference) - slack
    return Difference(
        *scores,
        difference=difference,
        low=float(low),
        high=float(high),
        p=(int(far.sum()) + 1) / (len(drawn) + 1),
        standard_error=float(drawn.std()),
        questions=questions,
        clusters=clusters,
        resamples=len(drawn),
    )


def _members(count: int, clusters: Sequence[Hashable] | None) -> list[Ints]:
    """The questions of each cluster."""
    if clusters is None:
        return list(np.arange(count)[:, None])
    member = cluster_numbers(clusters)
    return np.split(np.argsort(member, kind="stable"), np.cumsum(np.bincount(member))[:-1])


def _by_cluster(values: Floats, clusters: Sequence[Hashable] | None) -> tuple[Floats, Floats]:
    """Sum and number of the values of each cluster."""
    if clusters is None:
        return values, np.ones(len(values), np.float64)
    if len(clusters) != len(values):
        raise InputError(f"{len(clusters)} clusters are named for {len(values)} scores")
    member = cluster_numbers(clusters)
    sizes = np.bincount(member).astype(np.float64)
    return np.bincount(member, weights=values).astype(np.float64), sizes


def cluster_numbers(clusters: Sequence[Hashable]) -> Ints:
    """(items,) number of each item's cluster, in the order in which clusters are first seen."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters], np.int64)


def resampled_means(
    sums: npt.NDArray[Any], sizes: npt.NDArray[Any], resamples: int, random: np.random.Generator
) -> Floats:
    """Means over clusters that are drawn with replacement, as many as there are.

    Args:
        sums: (clusters,) sum of the values of each cluster.
        sizes: (clusters,) number of values of each cluster.
        resamples: Number of draws.
        random: Generator of the draws.

    Returns:
        (resamples,); 0 where the drawn clusters have no value.
    """
    at_once = max(1, _DRAWS_AT_ONCE // len(sums))
    means = []
    for begin in range(0, resamples, at_once):
        drawn = random.integers(0, len(sums), (min(at_once, resamples - begin), len(sums)))
        means.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1).clip(1))
    return np.concatenate(means)


def drawn_counts(units: int, resamples: int, random: np.random.Generator) -> Iterator[Ints]:
    """Draw units with replacement, and count how often each was drawn, some resamples at a time.

    Args:
        units: Number of units, of which as many are drawn with replacement.
        resamples: Number of draws.
        random: Generator of the draws; it may be used between two parts.

    Yields:
        (some resamples, units)
    """
    at_once = max(1, _DRAWS_AT_ONCE // units)
    for begin in range(0, resamples, at_once):
        n = min(at_once, resamples - begin)
        chosen = random.integers(0, units, (n, units)) + units * np.arange(n)[:, None]
        yield np.bincount(chosen.ravel(), minlength=n * units).reshape(n, units)


def resampled(
    score: Callable[[Floats], Floats], members: Sequence[Ints], resamples: int, seed: int = 0
) -> Floats:
    """Scores of samples that are drawn inside of each group, by how often each unit was drawn.

    Args:
        score: Scores, (…, some resamples), of samples given as counts, (some resamples, units).
        members: Numbers of the units of each group, all of them once.
        resamples: Number of draws.
        seed: Seed of the draws: scores of the same units are of the same draws.

    Returns:
        (…, resamples)
    """
    random, scores = np.random.default_rng(seed), []
    units = sum(map(len, members))
    for begin in range(0, resamples, _COUNTS_AT_ONCE):
        counts = np.zeros((min(_COUNTS_AT_ONCE, resamples - begin), units))
        for rows in members:
            share = np.full(len(rows), 1 / len(rows))
            counts[:, rows] = random.multinomial(len(rows), share, len(counts))
        scores.append(score(counts))
    return np.concatenate(scores, -1)


def percentiles(drawn: npt.ArrayLike, tail: float = 2.5) -> Floats:
    """Lower and upper end of the percentile interval of what was drawn.

    Args:
        drawn: (…, resamples); NaN is left out.
        tail: Per cent of the draws below the interval, and above it.

    Returns:
        (2, …); NaN where nothing is a number.
    """
    values = np.asarray(drawn, np.float64)
    if not np.isfinite(values).any():
        return np.full((2, *values.shape[:-1]), np.nan)
    ends: Floats = np.nanpercentile(values, [tail, 100 - tail], axis=-1)
    return ends


class Interval(NamedTuple):
    """A share or a difference of shares, in per cent, with its 95 % interval."""

    value: float
    low: float
    high: float


def share(
    correct: npt.NDArray[np.bool_], seed: int = 0, clusters: Sequence[Hashable] | None = None
) -> Interval:
    """Share of examples that are right.

    The number of right ones in a resample of n is binomial(n, share): it is drawn as such, which is
    the distribution of drawing examples at a fraction of the work.

    Args:
        correct: (examples,) whether each is right.
        seed: Seed of the draws.
        clusters: (examples,) cluster of each, which are drawn in their place; None draws examples.
    """
    if clusters is not None:
        return _of_clusters(correct.astype(np.float64), clusters, seed)
    n, right = len(correct), int(correct.sum())
    return _of_counts(right, np.random.default_rng(seed).binomial(n, right / n, _SHARES), n)


def share_difference(
    first: npt.NDArray[np.bool_],
    second: npt.NDArray[np.bool_],
    seed: int = 0,
    clusters: Sequence[Hashable] | None = None,
) -> Interval:
    """Share of the first that is right less that of the second, on the same examples.

    The numbers of examples that only one of both gets right are multinomial: see `share`.

    Args:
        first: (examples,) whether each is right.
        second: (examples,) likewise, in the same order.
        seed: Seed of the draws.
        clusters: As in `share`.
    """
    if clusters is not None:
        return _of_clusters(first.astype(np.float64) - second, clusters, seed)
    n = len(first)
    gained, lost = int((first & ~second).sum()), int((~first & second).sum())
    shares = [gained / n, lost / n, (n - gained - lost) / n]
    drawn = np.random.default_rng(seed).multinomial(n, shares, _SHARES)
    return _of_counts(gained - lost, drawn[:, 0] - drawn[:, 1], n)


def _of_clusters(values: Floats, clusters: Sequence[Hashable], seed: int) -> Interval:
    sums, sizes = _by_cluster(values, clusters)
    drawn = resampled_means(sums, sizes, _SHARES, np.random.default_rng(seed))
    low, high = percentiles(drawn)
    return Interval(100 * float(values.mean()), 100 * float(low), 100 * float(high))


def _of_counts(count: int, drawn: Ints, n: int) -> Interval:
    low, high = percentiles(drawn, 50 * (1 - 0.95))  # which is not 2.5 to the last bit
    return Interval(100 * count / n, 100 * float(low) / n, 100 * float(high) / n)


def weighted_ranks(values: Floats, counts: Floats) -> Floats:
    """Ranks in samples that hold each value as often as it was drawn; ties share their mean rank.

    Args:
        values: (units,)
        counts: (resamples, units) how often each was drawn.

    Returns:
        (resamples, units); ranks of units that were not drawn have no meaning.
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
        x: (resamples or 1, units)
        y: (resamples or 1, units)
        counts: (resamples, units) how often each was drawn.
    """
    n = counts.sum(1, keepdims=True)
    x, y = x - (counts * x).sum(1, keepdims=True) / n, y - (counts * y).sum(1, keepdims=True) / n
    covariance, *variances = ((counts * a * b).sum(1) for a, b in ((x, y), (x, x), (y, y)))
    scale = np.sqrt(variances[0] * variances[1])
    correlations: Floats = 100 * np.divide(
        covariance, scale, out=np.zeros_like(scale), where=scale > 1e-12 * n[:, 0]
    )
    return correlations


def deviation(scores: Sequence[float]) -> float | None:
    """Standard deviation over seeds, with n − 1 in the denominator; None of a single seed."""
    return statistics.stdev(scores) if len(scores) > 1 else None


def format_p(p: float, resamples: int, equals: str = "") -> str:
    """A p-value as far as so many resamples can tell it."""
    return f"{equals}{p:.2g}" if p > 1 / (resamples + 1) else f"< {1 / resamples:g}"
