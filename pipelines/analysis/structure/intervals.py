"""Scores of many sentences, with their uncertainty as a sample of sentences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertvision.pipelines.analysis.structure.gold import Floats, Ints
from bertvision.pipelines.analysis.structure.scores import LONGEST, SHORTEST

_AT_ONCE = 100  # resamples: bounds the memory of the counts


class Share(NamedTuple):
    """A score that is a sum over sentences divided by another: UUAS, root, accuracy of words."""

    right: Floats
    """(…, sentences)"""
    of: Floats
    """(sentences,)"""


class ByLength(NamedTuple):
    """A score of sentences, averaged among those of one length, then over lengths."""

    values: Floats
    """(…, sentences)"""
    lengths: Ints
    """(sentences,) in words."""


def score(of: Share | ByLength) -> Floats:
    """The score of all sentences: (…,); NaN where no sentence counts."""
    drawn: Floats = _scores(of, np.ones((1, _sentences(of))))[..., 0]
    return drawn


def interval(of: Share | ByLength, resamples: int, seed: int = 0) -> Floats:
    """95 % percentile intervals over sentences, which are drawn with replacement.

    Efron & Tibshirani 1993. Every score is computed anew of the sentences drawn.

    Args:
        of: the score.
        resamples: how often to draw.
        seed: of the draws: scores of the same sentences are of the same draws.

    Returns:
        (…, 2) lower and upper end.
    """
    n, random = _sentences(of), np.random.default_rng(seed)
    drawn = []
    for begin in range(0, resamples, _AT_ONCE):
        times = min(_AT_ONCE, resamples - begin)
        drawn.append(_scores(of, random.multinomial(n, np.full(n, 1 / n), times).astype(float)))
    every = np.concatenate(drawn, -1)
    if not np.isfinite(every).any():
        return np.full((*every.shape[:-1], 2), np.nan)
    ends: Floats = np.nanpercentile(every, [2.5, 97.5], axis=-1)
    return np.moveaxis(ends, 0, -1)


def _sentences(of: Share | ByLength) -> int:
    return len(of[1])


def _scores(of: Share | ByLength, counts: Floats) -> Floats:
    """(…, resamples) scores of samples that have each sentence so often: (resamples, sentences)."""
    if isinstance(of, Share):
        return _divide(of.right @ counts.T, counts @ of.of)
    found = []
    for length in range(SHORTEST, LONGEST + 1):
        rows = np.flatnonzero(of.lengths == length)
        if len(rows):
            found.append(_divide(of.values[..., rows] @ counts[:, rows].T, counts[:, rows].sum(1)))
    if not found:
        return np.full((*of.values.shape[:-1], len(counts)), np.nan)
    each = np.stack(found)
    there = np.isfinite(each)  # a sample may have no sentence of a length
    return _divide(np.where(there, each, 0).sum(0), there.sum(0).astype(float))


def _divide(a: Floats, b: Floats) -> Floats:
    b = np.broadcast_to(b, a.shape)
    found: Floats = np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)
    return found
