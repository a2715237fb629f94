"""Is the difference between two systems more than noise? Paired bootstrap, and spread over seeds.

Both systems answer the same questions, so their difference is taken question by question, and the
sample of questions is what is uncertain: questions are drawn again with replacement, as often as
there are, and the difference is computed anew (Efron & Tibshirani 1993, An Introduction to the
Bootstrap; Koehn 2004, EMNLP; Berg-Kirkpatrick et al. 2012, EMNLP-CoNLL).

Questions about one paragraph are not independent: a system that misreads the paragraph gets several
of them wrong at once. Drawing questions one by one would take them for more evidence than they are,
so whole clusters are drawn where they are given.

The interval of one seed holds the noise of the sample of questions alone. What another seed of
training would have given is in it where several were trained: seeds and questions are then drawn
anew, each by itself, as in the multi-bootstrap of Sellam et al. 2022 (The MultiBERTs, ICLR,
arXiv:2106.16163) and Owen 2007 (The pigeonhole bootstrap, Annals of Applied Statistics 1). Of n
seeds the drawn spread is, as in every bootstrap, too small by the factor √((n − 1)/n).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

By = Literal["context", "question"]
"""What is drawn: all questions of one text together, or each alone."""
Seeds = Literal["one", "all"]
"""Whether a system is the one training that was named, or all that differ from it by seed."""
_DRAWS_AT_ONCE = 1 << 22  # bounds the memory: 64 MB of indices and sums


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
    """What was drawn: contexts, or questions where each stands alone."""
    resamples: int
    """How often."""
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
        second: scores of the second, likewise; the questions are in the same order.
        clusters: (questions,) what each question belongs to, such as its context; clusters are
            drawn whole. None draws question by question.
        resamples: how often to draw.
        confidence: of the interval.
        seed: of the draws.

    Raises:
        InputError: there are no scores, they are not finite, or not as many on both sides.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    one, other = (x[0] if x.ndim == 2 and len(x) else x for x in (a, b))
    _check(one, other, resamples, confidence)
    if a.ndim == 2 or b.ndim == 2:
        return _over_seeds(
            np.atleast_2d(a), np.atleast_2d(b), clusters, resamples, confidence, seed
        )
    sums, sizes = _by_cluster(a - b, clusters)
    drawn = _draw(sums, sizes, resamples, np.random.default_rng(seed))
    means = float(a.mean()), float(b.mean())
    slack = 1e-9 * float(np.abs(a - b).max())
    exact = float(sums.sum() / sizes.sum())
    return _difference(*means, exact, drawn, slack, confidence, len(a), len(sums))


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
    """As `paired_bootstrap`, of a metric that is no mean over questions, such as a correlation.

    The metric is computed anew on each resample, of both systems on the same questions; of several
    trainings it is the mean over those that were drawn.

    Args:
        metric: predictions and gold labels, (questions,) each → a score.
        first: (questions,) predictions of the first system, or (seeds, questions) of several
            trainings, which are drawn too.
        second: of the second, likewise; the questions are in the same order.
        gold: (questions,) labels.
        clusters: as in `paired_bootstrap`.
        resamples: how often to draw.
        confidence: of the interval.
        seed: of the draws.

    Raises:
        InputError: there are no predictions, they are not finite, or not as many on all sides.
    """
    sides = [np.atleast_2d(first), np.atleast_2d(second)]
    for a in sides[0]:
        for b in sides[1]:
            _check(a.astype(np.float64), b.astype(np.float64), resamples, confidence)
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
    found = _difference(one, other, one - other, drawn, slack, confidence, len(gold), len(members))
    return found._replace(seeds=(len(sides[0]), len(sides[1])))


def _over_seeds(
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    clusters: Sequence[Hashable] | None,
    resamples: int,
    confidence: float,
    seed: int,
) -> Difference:
    """`paired_bootstrap` of (seeds, questions): questions in pairs, seeds of each side alone."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("scores hold NaN or infinity: they cannot be compared")
    sizes = _by_cluster(a[0], clusters)[1]
    sides = [np.array([_by_cluster(row, clusters)[0] for row in x]).T for x in (a, b)]
    random, drawn = np.random.default_rng(seed), []
    at_once = max(1, _DRAWS_AT_ONCE // len(sizes))
    for begin in range(0, resamples, at_once):
        n = min(at_once, resamples - begin)
        chosen = random.integers(0, len(sizes), (n, len(sizes)))
        rows = len(sizes) * np.arange(n)[:, None]
        times = np.bincount((chosen + rows).ravel(), minlength=n * len(sizes)).reshape(n, -1)
        means = []
        for sums in sides:  # (clusters, seeds)
            by_seed = times @ sums / (times @ sizes)[:, None]  # (n, seeds)
            seeds = random.integers(0, sums.shape[1], by_seed.shape)
            means.append(np.take_along_axis(by_seed, seeds, axis=1).mean(axis=1))
        drawn.append(means[0] - means[1])
    scores, slack = (
        (float(a.mean()), float(b.mean())),
        1e-9 * float(max(abs(a).max(), abs(b).max())),
    )
    found = _difference(
        *scores,
        scores[0] - scores[1],
        np.concatenate(drawn),
        slack,
        confidence,
        a.shape[1],
        len(sizes),
    )
    return found._replace(seeds=(len(a), len(b)))


def _check(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], resamples: int, confidence: float
) -> None:
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
    first: float,
    second: float,
    difference: float,
    drawn: npt.NDArray[np.float64],
    slack: float,
    confidence: float,
    questions: int,
    clusters: int,
) -> Difference:
    """What the resampled differences say.

    Args:
        first: score of the first system.
        second: of the second.
        difference: first minus second.
        drawn: (resamples,) differences.
        slack: by how much a difference may fall short of another that it equals: sums in another
            order differ in their last bits.
        confidence: of the interval.
        questions: scores of each system.
        clusters: what was drawn.
    """
    tail = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    far = np.abs(drawn - difference) >= abs(difference) - slack
    return Difference(
        first=first,
        second=second,
        difference=difference,
        low=float(low),
        high=float(high),
        p=(int(far.sum()) + 1) / (len(drawn) + 1),
        standard_error=float(drawn.std()),
        questions=questions,
        clusters=clusters,
        resamples=len(drawn),
    )


def _members(count: int, clusters: Sequence[Hashable] | None) -> list[npt.NDArray[np.int64]]:
    """The questions of each cluster."""
    if clusters is None:
        return list(np.arange(count)[:, None])
    found: dict[Hashable, list[int]] = {}
    for row, cluster in enumerate(clusters):
        found.setdefault(cluster, []).append(row)
    return [np.array(rows) for rows in found.values()]


def _by_cluster(
    values: npt.NDArray[np.float64], clusters: Sequence[Hashable] | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sum and number of the values of each cluster."""
    if clusters is None:
        return values, np.ones(len(values), np.float64)
    if len(clusters) != len(values):
        raise InputError(f"{len(clusters)} clusters are named for {len(values)} scores")
    numbers: dict[Hashable, int] = {}
    member = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
    sizes = np.bincount(member).astype(np.float64)
    return np.bincount(member, weights=values).astype(np.float64), sizes


def _draw(
    sums: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.float64],
    resamples: int,
    random: np.random.Generator,
) -> npt.NDArray[np.float64]:
    """(resamples,) mean of the values of as many clusters as there are, drawn with replacement."""
    at_once = max(1, _DRAWS_AT_ONCE // len(sums))
    means = []
    for begin in range(0, resamples, at_once):
        drawn = random.integers(0, len(sums), (min(at_once, resamples - begin), len(sums)))
        means.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(means)


def format_p(p: float, resamples: int, equals: str = "") -> str:
    """A p-value as far as so many resamples can tell it."""
    return f"{equals}{p:.2g}" if p > 1 / (resamples + 1) else f"< {1 / resamples:g}"
