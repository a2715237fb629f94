"""The Gram form of `KernelSums`: kernels of tiles of tokens × tokens, which are never all there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.pipelines.analysis.sums.centring import Centring
from bertvision.pipelines.analysis.sums.kernels import KernelSums
from bertvision.pipelines.analysis.sums.moments import Array, Block
from bertvision.pipelines.analysis.sums.reduce import Blocks, tree_reduce
from bertvision.pipelines.scheduler import compute

ROWS = 256
"""Tokens of one edge of a tile: its kernels, of all layers, are to stay in the cache."""


def gram_sums(blocks: Blocks, sides: Sequence[Centring]) -> KernelSums:
    """The sums over pairs of tokens, from the tokens.

    All tokens are held at once, centred, in float32; every block meets every other one.

    Args:
        blocks: an array per side, (tokens, layers, hidden).
        sides: how each is centred.
    """
    parts = [
        tuple(delayed(_parts)(side, part) for side, part in zip(sides, block, strict=True))
        for block in blocks
    ]
    pairs = [(*one, *other) for i, one in enumerate(parts) for other in parts[i + 1 :]]
    tree = tree_reduce([*parts, *pairs], partial(_tiles, sides=len(sides)), KernelSums.merge)
    sums: KernelSums = compute(tree)
    return sums


def gram_cost(tokens: int, shapes: Sequence[tuple[int, int]]) -> int:
    """About how many operations `gram_sums` takes.

    Products of kernels with one another are short, and take about four times as long as they
    should; there are those of two variants.

    Args:
        tokens: how many.
        shapes: layers and hidden size of each side.
    """
    layers = sum(depth for depth, _ in shapes)
    return tokens**2 * (sum(depth * hidden for depth, hidden in shapes) + 8 * layers**2)


class _Parts(NamedTuple):
    """The centred hidden states of a block, the dropped channels apart."""

    rest: NDArray[Any]
    """(tokens, layers, hidden), 0 where a channel is dropped."""
    dropped: NDArray[Any]
    """(tokens, layers, channels) the dropped channels."""


def _parts(side: Centring, block: Block) -> _Parts:
    centred = side.apply(block)
    channels = np.array(side.dropped, np.int64)[None]  # (1, layers, channels)
    dropped = np.take_along_axis(centred, channels, axis=2)
    np.put_along_axis(centred, channels, 0.0, axis=2)
    return _Parts(centred, dropped)


def _tiles(*blocks: _Parts, sides: int) -> KernelSums:
    """The sums of a block with itself, or of one block (the first ``sides``) with another."""
    # what came from another worker may begin at any byte, and products of it round otherwise
    aligned = [_Parts(*(np.require(x, requirements=("C", "A")) for x in part)) for part in blocks]
    one, other = aligned[:sides], aligned[-sides:]
    itself = len(blocks) == sides
    variants = 2 if one[0].dropped.shape[2] else 1
    layers = sum(part.rest.shape[1] for part in one)
    tokens, others = len(one[0].rest), len(other[0].rest)
    shape = variants, layers, layers
    sums = KernelSums(itself * tokens, np.zeros(shape), np.zeros(shape[:2]), np.zeros(shape))
    # memory that is used again: each product in new memory would take a sixth longer
    room = np.empty(layers * min(ROWS, tokens) * min(ROWS, others), one[0].rest.dtype)
    for start in range(0, tokens, ROWS):
        # what lies left of the diagonal is what lies right of it
        for begin in range(start if itself else 0, others, ROWS):
            rows, columns = slice(start, start + ROWS), slice(begin, begin + ROWS)
            diagonal = itself and start == begin
            for v, kernels in _kernels(one, other, rows, columns, room):
                if diagonal:
                    lengths = np.einsum("ltt->lt", kernels).astype(np.float64)
                    sums.norms[v] += lengths.sum(axis=1)
                    sums.norm_products[v] += lengths @ lengths.T
                sums.products[v] += _inner(kernels) * (1 if diagonal else 2)
    sums.products -= sums.norm_products
    return sums


def _kernels(
    one: Sequence[_Parts],
    other: Sequence[_Parts],
    rows: slice,
    columns: slice,
    room: NDArray[Any],
) -> Iterator[tuple[int, NDArray[Any]]]:
    """The number of each variant and its kernels (layers, rows, columns), in memory used again.

    The kernel of the dropped channels is added to that of the others, so nothing cancels.
    """
    pairs = [
        (x.rest[rows, i], y.rest[columns, i], x.dropped[rows, i], y.dropped[columns, i])
        for x, y in zip(one, other, strict=True)
        for i in range(x.rest.shape[1])
    ]
    shape = len(pairs), len(pairs[0][0]), len(pairs[0][1])
    kernels = room[: math.prod(shape)].reshape(shape)
    for kernel, (x, y, _, _) in zip(kernels, pairs, strict=True):
        np.matmul(x, y.T, out=kernel)
    if not pairs[0][2].shape[1]:
        yield 0, kernels
        return
    yield 1, kernels
    for kernel, (_, _, x, y) in zip(kernels, pairs, strict=True):
        kernel += x @ y.T
    yield 0, kernels


def _inner(kernels: NDArray[Any]) -> Array:
    """(layers, layers) Σ K·L over a tile: each row in the type of the kernels, rows in float64."""
    by_row = kernels.swapaxes(0, 1)  # (rows, layers, columns)
    found: Array = (by_row @ by_row.swapaxes(1, 2)).sum(axis=0, dtype=np.float64)
    return found
