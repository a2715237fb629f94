"""Accuracies with the uncertainty of their sample of test examples.

The percentile bootstrap draws test examples with replacement (Efron & Tibshirani 1993). An example
is right or wrong, so the number of right ones in a resample of n is binomial(n, accuracy), and the
numbers of examples that only one of two probes gets right are multinomial: both are drawn here as
such, which is the same distribution at a fraction of the work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A share or a difference of shares, in per cent, with its 95 % interval."""

    value: float
    low: float
    high: float


def accuracy(correct: npt.NDArray[np.bool_], seed: int = 0) -> Interval:
    """Share of right examples.

    Args:
        correct: (examples,) whether each is right.
        seed: of the resamples.
    """
    n, right = len(correct), int(correct.sum())
    drawn = np.random.default_rng(seed).binomial(n, right / n, RESAMPLES)
    return _interval(right, drawn, n)


def difference(
    first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_], seed: int = 0
) -> Interval:
    """Accuracy of the first less that of the second, on the same examples.

    Args:
        first: (examples,) whether each is right.
        second: (examples,) likewise, in the same order.
        seed: of the resamples.
    """
    n = len(first)
    gained, lost = int((first & ~second).sum()), int((~first & second).sum())
    shares = [gained / n, lost / n, (n - gained - lost) / n]
    drawn = np.random.default_rng(seed).multinomial(n, shares, RESAMPLES)
    return _interval(gained - lost, drawn[:, 0] - drawn[:, 1], n)


def majority(train: npt.NDArray[np.int64], test: npt.NDArray[np.int64]) -> float:
    """Accuracy, in per cent, of always saying the class that is most frequent in training.

    Args:
        train: (training examples,) labels.
        test: (test examples,) labels.
    """
    return 100 * float((test == np.bincount(train).argmax()).mean())


def _interval(count: int, drawn: npt.NDArray[np.int64], n: int) -> Interval:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Interval(100 * count / n, 100 * float(low) / n, 100 * float(high) / n)
