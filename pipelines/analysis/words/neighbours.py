"""Whether the nearest neighbour of a word's use, by cosine, is another use of the same word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from bertvision.pipelines.analysis.sums import centring
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.analysis.words.alike import Groups
from bertvision.pipelines.scheduler import compute

ROWS = 512
"""Uses of one edge of a tile, whose cosines are there at once."""


class Separation(NamedTuple):
    """How uses of a word lie to each other and to those of others.

    Attributes:
        nearest: (layers,) share of uses whose nearest neighbour is of the same word; NaN where
            none has a direction.
        margin: (layers,) mean of the cosine with the nearest use of the same word, less that with
            the nearest of another.
        chance: share that neighbours at random would have.
    """

    nearest: Array
    margin: Array
    chance: float


def separation(uses: Groups) -> Separation:
    """How uses of words lie to each other.

    Costs uses² · layers · hidden operations in float32.

    Args:
        uses: a group for each word, two words or more, with two uses of each or more.
    """
    sizes = np.concatenate([np.array(of) for of in uses.sizes])
    units = [delayed(_units)(*block) for block in uses.blocks]
    of_word = [delayed(_nearest_of_word)(*of) for of in zip(units, uses.sizes, strict=True)]
    parts: list[list[Delayed]] = [[] for _ in units]
    tile = delayed(_tile, nout=2)
    for i, one in enumerate(units):
        for j in range(i, len(units)):
            mine, theirs = tile(one, units[j], uses.sizes[i] if i == j else None)
            parts[i].append(mine)
            if j > i:
                parts[j].append(theirs)
    of_others = [delayed(_best)(of) for of in parts]
    same, other = compute(delayed(_behind)(of_word, of_others))
    n = len(same)
    chance = float((sizes * (sizes - 1)).sum() / (n * (n - 1)))
    both = np.isfinite(same) & np.isfinite(other)
    count = both.sum(axis=0)
    count = np.where(count > 0, count, np.nan)
    apart = np.subtract(same, other, where=both, out=np.zeros(both.shape))
    margin: Array = apart.sum(axis=0) / count
    return Separation(((same > other) & both).sum(axis=0) / count, margin, chance)


def _units(block: NDArray[Any]) -> NDArray[Any]:
    norm = np.linalg.norm(block.astype(np.float64), axis=2, keepdims=True)
    units: NDArray[Any] = (block / np.where(norm > 0, norm, np.nan)).astype(centring.PRODUCTS)
    return units


def _nearest_of_word(units: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """(uses, layers) the largest cosine of each use with another of its word."""
    found = []
    for group in np.split(units, np.cumsum(sizes)[:-1]):
        cosines = np.einsum("ilc,jlc->lij", group, group)
        np.einsum("lii->li", cosines)[:] = -np.inf
        found.append(_known(cosines).max(axis=2).T)
    return np.concatenate(found)


def _tile(
    one: NDArray[Any], other: NDArray[Any], sizes: Sequence[int] | None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(uses, layers) the largest cosine of each use of two blocks with one of another word.

    Words do not go on from block to block: only in a block with itself, whose ``sizes`` are given,
    are two uses of one.
    """
    # what came from another worker may begin at any byte, and products of it round otherwise
    one = np.require(one, requirements=("C", "A"))
    other = np.require(other, requirements=("C", "A"))
    word = None if sizes is None else np.repeat(np.arange(len(sizes)), sizes)
    mine, theirs = (np.full(x.shape[:2], -np.inf, x.dtype) for x in (one, other))
    for start in range(0, len(one), ROWS):
        for begin in range(0, len(other), ROWS):
            rows, columns = slice(start, start + ROWS), slice(begin, begin + ROWS)
            for layer in range(one.shape[1]):
                cosines = _known(one[rows, layer] @ other[columns, layer].T)
                if word is not None:
                    cosines[word[rows, None] == word[None, columns]] = -np.inf
                np.maximum(mine[rows, layer], cosines.max(axis=1), out=mine[rows, layer])
                np.maximum(theirs[columns, layer], cosines.max(axis=0), out=theirs[columns, layer])
    return mine, theirs


def _known(cosines: NDArray[Any]) -> NDArray[Any]:
    """What has no direction is nobody's nearest."""
    cosines[np.isnan(cosines)] = -np.inf
    return cosines


def _best(parts: list[NDArray[Any]]) -> NDArray[Any]:
    best: NDArray[Any] = np.maximum.reduce(parts)
    return best


def _behind(*blocks: list[NDArray[Any]]) -> list[NDArray[Any]]:
    return [np.concatenate(of) for of in blocks]
