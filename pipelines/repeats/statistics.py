"""Statistics over seeds: spread, failed runs, and differences between methods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_ROUNDING = 1e-9  # two ways to compute the same share of items


class Difference(NamedTuple):
    """How far the mean of one method is from that of another."""

    value: float
    low: float | None
    """Lower end of the 95 % interval; None where the runs cannot tell one."""
    high: float | None
    why: str | None = None
    """Why there is no interval."""


def is_failed(score: float, trivial: float) -> bool:
    """Whether a run learned nothing: its score is not above that of the trivial answer.

    The failed run of Mosbach et al. (2021), whose trivial answer is the majority class.

    Args:
        score: of the run on dev, per cent.
        trivial: of always giving the commonest answer, likewise; 0 for correlations.
    """
    return score <= trivial + _ROUNDING


def welch(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """The difference of two means with its 95 % interval by Welch's t.

    mean(a) − mean(b) ± t(0.975, ν) · √(s²(a)/n(a) + s²(b)/n(b)), with ν of Welch (1947),
    (s²(a)/n(a) + s²(b)/n(b))² / Σ (s²/n)² / (n − 1), and n − 1 in the variances s².

    Args:
        scores: of the runs of a method, at least one.
        others: of the runs of the method that it is compared with, at least one.
    """
    value = statistics.fmean(scores) - statistics.fmean(others)
    if min(len(scores), len(others)) < 2:
        return Difference(value, None, None, "one run alone has no spread")
    squares = [statistics.variance(of) / len(of) for of in (scores, others)]
    if not sum(squares):
        return Difference(value, None, None, "all runs of both score the same")
    from scipy.special import stdtrit

    sizes = (len(scores), len(others))
    freedom = sum(squares) ** 2 / sum(s**2 / (n - 1) for s, n in zip(squares, sizes, strict=True))
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(squares))
    return Difference(value, value - half, value + half)
