"""Scores of predicted distances and depths of words beside those of the gold tree.

They are those of Hewitt & Manning (2019), *A Structural Probe for Finding Syntax in Word
Representations*, section 3, as their code has them (``structural-probes/reporter.py``): UUAS
without punctuation, correlations of ranks that are averaged by the length of sentences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.analysis.structure.gold import (
    Floats,
    Ints,
    depths,
    distances,
    spanning_trees,
)
from bertvision.pipelines.tasks.trees.conllu import PUNCTUATION, ParsedSentence

SHORTEST, LONGEST = 5, 50
"""Lengths of the sentences whose correlations are averaged."""


class Gold(NamedTuple):
    """What a sentence is scored against."""

    distances: Ints
    """(words, words) edges between two words."""
    depths: Ints
    """(words,) edges between a word and the root."""
    counted: Ints
    """Indices of the words that are no punctuation."""
    edges: npt.NDArray[np.bool_]
    """(counted, counted) whether the tree has an edge between two of these."""


def gold_of(sentence: ParsedSentence) -> Gold:
    """What a sentence is scored against."""
    found = distances(sentence.heads)
    counted = np.flatnonzero(np.array(sentence.upos) != PUNCTUATION)
    return Gold(found, depths(sentence.heads), counted, found[np.ix_(counted, counted)] == 1)


def right_edges(predicted: npt.NDArray[np.floating], gold: Gold) -> Ints:
    """Edges of the spanning tree of predicted distances that the gold tree has too.

    Directions do not count, and punctuation is in neither of the trees.

    Args:
        predicted: (…, words, words) distances.
        gold: of the sentence.

    Returns:
        (…,) how many; `n_edges` is how many there are.
    """
    if not len(gold.counted):
        return np.zeros(predicted.shape[:-2], np.int64)
    among = predicted[..., gold.counted[:, None], gold.counted]
    tree = spanning_trees(among)
    found: Ints = gold.edges[tree[..., 0], tree[..., 1]].sum(axis=-1)
    return found


def n_edges(gold: Gold) -> int:
    """Edges of the gold tree between words that are no punctuation."""
    return int(gold.edges.sum()) // 2


def finds_root(predicted: npt.NDArray[np.floating], gold: Gold) -> npt.NDArray[np.bool_]:
    """Whether the word of the smallest predicted depth, of those no punctuation, is the root.

    Args:
        predicted: (…, words) depths.
        gold: of the sentence.
    """
    if not len(gold.counted):
        return np.zeros(predicted.shape[:-1], bool)
    found: npt.NDArray[np.bool_] = (
        gold.depths[gold.counted[predicted[..., gold.counted].argmin(axis=-1)]] == 0
    )
    return found


def rank_correlation(predicted: npt.NDArray[np.floating], gold: npt.NDArray[np.integer]) -> Floats:
    """Spearman's correlation along the last axis, −1 to 1; ties share their mean rank.

    0 where either side is constant, which tells nothing.

    Args:
        predicted: (…, words)
        gold: (…, words), broadcast to it.
    """
    x, y = (_ranks(side) for side in (predicted, np.asarray(gold, np.float64)))
    x, y = (side - side.mean(axis=-1, keepdims=True) for side in (x, y))
    scale = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    products = (x * y).sum(-1)
    found: Floats = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return found


def distance_correlation(predicted: npt.NDArray[np.floating], gold: Gold) -> Floats:
    """Mean over words of the rank correlation of their distances to all words of the sentence.

    As in the code of Hewitt & Manning the word itself is one of these, at distance 0 in both.

    Args:
        predicted: (…, words, words) distances.
        gold: of the sentence.
    """
    found: Floats = rank_correlation(predicted, gold.distances).mean(axis=-1)
    return found


def _ranks(values: npt.NDArray[np.floating]) -> Floats:
    """Ranks along the last axis, from 0; equal values share the mean of theirs."""
    order = np.argsort(values, axis=-1, kind="stable")
    ascending = np.take_along_axis(values, order, -1)
    places = np.broadcast_to(np.arange(values.shape[-1]), values.shape)
    border = np.diff(ascending, axis=-1) != 0
    ends = np.ones((*values.shape[:-1], 1), bool)
    first = np.maximum.accumulate(np.where(np.concatenate([ends, border], -1), places, 0), -1)
    behind = np.where(np.concatenate([border, ends], -1), places, values.shape[-1])
    last = np.minimum.accumulate(behind[..., ::-1], -1)[..., ::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, (first + last) / 2, -1)
    return ranks
