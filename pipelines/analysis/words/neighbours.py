"""Whether the nearest neighbour of a word's use, by cosine, is another use of the same word."""

from __future__ import annotations

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
        nearest: (layers,) share of uses whose nearest neighbour is of the same word.
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
    words = np.split(
        np.repeat(np.arange(len(sizes)), sizes), np.cumsum([sum(of) for of in uses.sizes])[:-1]
    )
    units = [delayed(_units)(*block) for block in uses.blocks]
    parts: list[list[Delayed]] = [[] for _ in units]
    tile = delayed(_tile, nout=2)
    for i, one in enumerate(units):
        for j in range(i, len(units)):
            mine, theirs = tile(one, units[j], words[i], words[j], i == j)
            parts[i].append(mine)
            if j > i:
                parts[j].append(theirs)
    best = np.concatenate(compute([delayed(_best)(of) for of in parts]))  # (uses, 2, layers)
    same, other = best[:, 0], best[:, 1]
    n = len(best)
    chance = float((sizes * (sizes - 1)).sum() / (n * (n - 1)))
    margin: Array = (same - other).mean(axis=0, dtype=np.float64)
    return Separation((same > other).mean(axis=0), margin, chance)


def _units(block: NDArray[Any]) -> NDArray[Any]:
    norm = np.linalg.norm(block.astype(np.float64), axis=2, keepdims=True)
    units: NDArray[Any] = (block / np.where(norm > 0, norm, np.nan)).astype(centring.PRODUCTS)
    return units


def _tile(
    one: NDArray[Any],
    other: NDArray[Any],
    words: NDArray[np.int64],
    others: NDArray[np.int64],
    itself: bool,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(uses, 2, layers) the largest cosines of each use with the same and with another word."""
    # what came from another worker may begin at any byte, and products of it round otherwise
    one = np.require(one, requirements=("C", "A"))
    other = one if itself else np.require(other, requirements=("C", "A"))
    layers = one.shape[1]
    mine, theirs = (np.full((len(x), 2, layers), -np.inf, x.dtype) for x in (one, other))
    for start in range(0, len(one), ROWS):
        for begin in range(0, len(other), ROWS):
            rows, columns = slice(start, start + ROWS), slice(begin, begin + ROWS)
            same = words[rows, None] == others[None, columns]
            for layer in range(layers):
                cosines = one[rows, layer] @ other[columns, layer].T
                if itself and start == begin:
                    np.fill_diagonal(cosines, -np.inf)
                for k, of in enumerate((same, ~same)):
                    found = np.where(of, cosines, -np.inf)
                    mine[rows, k, layer] = np.maximum(mine[rows, k, layer], found.max(axis=1))
                    if not itself:
                        theirs[columns, k, layer] = np.maximum(
                            theirs[columns, k, layer], found.max(axis=0)
                        )
    return mine, theirs


def _best(parts: list[NDArray[Any]]) -> NDArray[Any]:
    best: NDArray[Any] = np.maximum.reduce(parts)
    return best
