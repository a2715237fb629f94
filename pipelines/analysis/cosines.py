"""Correlations of the cosines between tokens in two layers, from tiles of tokens × tokens.

Each layer has a cosine for every pair of tokens. Two layers are compared by Pearson's correlation
of their cosines, over all pairs of different tokens, or for each token over all others. The
diagonal, a token with itself, never enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from bertvision.pipelines.analysis import kernels
from bertvision.pipelines.analysis.moments import Array, Block, Moments, each_merged, each_of, slabs
from bertvision.pipelines.analysis.reduce import Blocks, check_finite, tree_reduce
from bertvision.pipelines.scheduler import compute

ROWS = 256
"""Tokens of one edge of a tile: its cosines, of all layers, are to stay in the cache."""


class Correlations(NamedTuple):
    """How alike the cosines of the layers of two sides are; NaN where a layer has none that vary.

    Attributes:
        of_pairs: (layers_x, layers_y) over all pairs of different tokens.
        of_tokens: (layers_x, layers_y) mean over tokens of the correlation over all others.
        n: tokens.
    """

    of_pairs: Array
    of_tokens: Array
    n: int


def cosine_correlations(blocks: Blocks, depths: Sequence[int]) -> Correlations:
    """The correlations of every layer of the first side with every layer of the last.

    Costs tokens² · channels of all sides operations in float32; rows of cosines are summed in
    float32 over at most a block, then in float64.

    Args:
        blocks: Blocks of a sample that is held; an array per side, (tokens, layers, hidden).
        depths: layers of each side, of which there are one or two.

    Raises:
        NonFiniteError: NaN or infinity in the hidden states.
    """
    moments: list[Moments] = compute(tree_reduce(blocks, partial(each_of, Moments.of), each_merged))
    for m in moments:
        check_finite(m.sum_norm[:, None])
    # near 0 they lose no digits to their mean; a layer with a token of norm 0 has no cosines
    means = np.concatenate([m.cosine_by_channel().sum(axis=1) for m in moments])
    units = [tuple(delayed(_units)(part) for part in block) for block in blocks]
    rows: list[list[Delayed]] = [[] for _ in units]
    tile = delayed(partial(_tile, means=means, depths=tuple(depths)), nout=2)
    for i, one in enumerate(units):
        for j in range(i, len(units)):
            mine, theirs = tile(list(one), list(units[j]), i == j)
            rows[i].append(mine)
            if j > i:
                rows[j].append(theirs)
    complete: Blocks = [(delayed(_total)(parts),) for parts in rows]
    leaf = partial(_token_sums, n=moments[0].n)
    sums: _TokenSums = compute(tree_reduce(complete, leaf, _TokenSums.merge))
    return Correlations(sums.of_pairs(moments[0].n), sums.of_tokens / moments[0].n, moments[0].n)


class _Row(NamedTuple):
    """Sums over the other tokens, for each token of a block."""

    x: Array
    """(tokens, layers_x) Σ k."""
    y: Array
    xx: Array
    """(tokens, layers_x) Σ k²."""
    yy: Array
    xy: Array
    """(tokens, layers_x, layers_y) Σ k l."""


class _TokenSums(NamedTuple):
    """Sums over tokens: of their rows, and of their correlations."""

    row: _Row
    of_tokens: Array

    def merge(self, other: _TokenSums) -> _TokenSums:
        """The sums of both."""
        row = _Row(*(a + b for a, b in zip(self.row, other.row, strict=True)))
        return _TokenSums(row, self.of_tokens + other.of_tokens)

    def of_pairs(self, n: int) -> Array:
        """The correlation over all pairs of different tokens."""
        return _correlation(self.row, n * (n - 1))


def _correlation(row: _Row, n: int) -> Array:
    """(…, layers_x, layers_y) Pearson's correlation from sums over ``n`` cosines."""
    x, y = row.x / n, row.y / n
    covariance = row.xy / n - x[..., :, None] * y[..., None, :]
    product = (row.xx / n - x**2)[..., :, None] * (row.yy / n - y**2)[..., None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        result: Array = np.where(product > 0, covariance / np.sqrt(product), np.nan)
    return result


def _units(block: Block) -> NDArray[Any]:
    """(tokens, layers, hidden) of length 1; NaN of what has no direction."""
    units = np.empty(block.shape, kernels.PRODUCTS)
    start = 0
    for slab in slabs(block):
        norm = np.linalg.norm(slab, axis=2, keepdims=True)
        slab /= np.where(norm > 0, norm, np.nan)
        units[start : start + len(slab)] = slab
        start += len(slab)
    return units


def _tile(
    one: list[NDArray[Any]],
    other: list[NDArray[Any]],
    itself: bool,
    *,
    means: Array,
    depths: tuple[int, ...],
) -> tuple[_Row, _Row]:
    """The sums of the tokens of one block over those of another, and the other way round."""
    # what came from another worker may begin at any byte, and products of it round otherwise
    one = [np.require(x, requirements=("C", "A")) for x in one]
    other = one if itself else [np.require(y, requirements=("C", "A")) for y in other]
    mine, theirs = _zeros(len(one[0]), depths), _zeros(len(other[0]), depths)
    for start in range(0, len(one[0]), ROWS):
        for begin in range(start if itself else 0, len(other[0]), ROWS):
            rows, columns = slice(start, start + ROWS), slice(begin, begin + ROWS)
            pairs = [
                (x[rows, i], y[columns, i])
                for x, y in zip(one, other, strict=True)
                for i in range(x.shape[1])
            ]
            cosines = np.stack([x @ y.T for x, y in pairs])  # (layers, rows, columns)
            cosines -= means[:, None, None].astype(cosines.dtype)
            diagonal = itself and start == begin
            if diagonal:
                np.einsum("ltt->lt", cosines)[:] = 0
            _add(mine, rows, cosines, depths)
            if not diagonal:
                _add(mine if itself else theirs, columns, cosines.swapaxes(1, 2), depths)
    return mine, theirs


def _zeros(tokens: int, depths: tuple[int, ...]) -> _Row:
    x, y = (tokens, depths[0]), (tokens, depths[-1])
    return _Row(*map(np.zeros, (x, y, x, y, (*x, depths[-1]))))


def _add(row: _Row, tokens: slice, cosines: NDArray[Any], depths: tuple[int, ...]) -> None:
    """Adds what some tokens share with others: (layers, tokens, others)."""
    by_token = np.ascontiguousarray(cosines.swapaxes(0, 1))
    products = by_token @ by_token.swapaxes(1, 2)  # (tokens, layers, layers)
    sums = by_token.sum(axis=2, dtype=np.float64)
    squares = np.einsum("nll->nl", products)
    x, y = slice(depths[0]), slice(-depths[-1], None)
    row.x[tokens] += sums[:, x]
    row.y[tokens] += sums[:, y]
    row.xx[tokens] += squares[:, x]
    row.yy[tokens] += squares[:, y]
    row.xy[tokens] += products[:, x, y]


def _total(parts: list[_Row]) -> _Row:
    return _Row(*(sum(column[1:], start=column[0]) for column in zip(*parts, strict=True)))


def _token_sums(row: _Row, *, n: int) -> _TokenSums:
    of_tokens = _correlation(row, n - 1).sum(axis=0)
    return _TokenSums(_Row(*(part.sum(axis=0) for part in row)), of_tokens)
