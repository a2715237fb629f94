"""The feature form of `KernelSums`: Σ K·L over all pairs of tokens is ‖Σ x yᵀ‖² over channels.

One pass over the blocks, whatever their number; a block is let go when it is added. The sums of a
layer pair take hidden_x × hidden_y × 8 bytes, so layers of x are taken in groups, a pass each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertvision.pipelines.analysis.sums.centring import CHUNK, Centring
from bertvision.pipelines.analysis.sums.kernels import KernelSums, squared_lengths
from bertvision.pipelines.analysis.sums.moments import Array, Block
from bertvision.pipelines.analysis.sums.reduce import Blocks, tree_reduce
from bertvision.pipelines.scheduler import compute

GROUP_BYTES = 2**29
"""About the size of one partial result: 512 MiB are 455 layer pairs of hidden size 384, or 64 of
1,024. One to three partial results per worker are alive at a time."""


class Pair(NamedTuple):
    """A layer of one side, and neighbouring layers of a side that it meets."""

    side: int
    layer: int
    other: int
    layers: slice
    numbers: int
    """Elements of Σ x yᵀ: hidden · layers · hidden of the other side."""

    def places(self) -> list[tuple[int, int]]:
        """The layer with each of those that it meets."""
        return [(self.layer, j) for j in range(self.layers.start, self.layers.stop)]


class Products(NamedTuple):
    """Partial result: Σ x yᵀ of some pairs, and the sums over single tokens.

    Attributes:
        n: tokens.
        pairs: for each `Pair` (hidden, layers, hidden of the other side).
        norms: (variants, layers of all sides) Σ ‖x‖².
        norm_products: (variants, layers, layers) Σ ‖x‖²‖y‖².
    """

    n: int
    pairs: list[Array]
    norms: Array
    norm_products: Array

    def merge(self, other: Products) -> Products:
        """The sums of both; neither operand changes."""
        return Products(
            self.n + other.n,
            [a + b for a, b in zip(self.pairs, other.pairs, strict=True)],
            self.norms + other.norms,
            self.norm_products + other.norm_products,
        )


def feature_sums(blocks: Blocks, sides: Sequence[Centring]) -> KernelSums:
    """The sums over pairs of tokens, from the channels.

    Args:
        blocks: an array per side, (tokens, layers, hidden).
        sides: how each is centred; of one side all pairs of its layers are computed, of two the
            layers of the first with those of the second.
    """
    depth = [len(side.mean) for side in sides]
    keep = [side.keep() for side in sides]
    variants, layers = len(keep[0]), sum(depth)
    products = np.full((variants, layers, layers), np.nan)
    for pairs in groups(wanted_pairs([side.mean.shape for side in sides])):
        leaf = partial(products_of, sides=sides, pairs=pairs)
        found: Products = compute(tree_reduce(blocks, leaf, Products.merge))
        for (side, layer, other, of, _), m in zip(pairs, found.pairs, strict=True):
            kept = keep[side][:, layer], keep[other][:, of]
            squares = np.tensordot(kept[0], np.square(m), axes=1)
            i, first = sum(depth[:side]) + layer, sum(depth[:other])
            j = slice(first + of.start, first + of.stop)
            products[:, i, j] = np.einsum("vjd,vjd->vj", squares, kept[1])
            products[:, j, i] = products[:, i, j]
    products -= found.norm_products
    return KernelSums(found.n, products, found.norms, found.norm_products)


def feature_cost(tokens: int, shapes: Sequence[tuple[int, int]]) -> int:
    """About how many operations `feature_sums` takes.

    Args:
        tokens: how many.
        shapes: layers and hidden size of each side.
    """
    return 2 * tokens * sum(pair.numbers for pair in wanted_pairs(shapes))


def products_of(*blocks: Block, sides: Sequence[Centring], pairs: Sequence[Pair]) -> Products:
    """The sums of some pairs over the tokens of a block.

    Args:
        blocks: (tokens, layers, hidden) of each side.
        sides: how each is centred.
        pairs: of layers.
    """
    centred = [side.apply(block) for side, block in zip(sides, blocks, strict=True)]
    lengths = np.concatenate(
        [squared_lengths(x, side.keep()) for x, side in zip(centred, sides, strict=True)], axis=2
    )
    found = [product(centred[p.side][:, p.layer], centred[p.other][:, p.layers]) for p in pairs]
    return Products(len(blocks[0]), found, lengths.sum(axis=1), lengths.swapaxes(1, 2) @ lengths)


def product(x: NDArray[Any], y: NDArray[Any]) -> Array:
    """(hidden_x, layers, hidden_y) Σ x yᵀ of (tokens, hidden_x) and (tokens, layers, hidden_y)."""
    width = y.shape[1] * y.shape[2]
    first = y[:CHUNK].reshape(-1 if len(y) else 0, width)  # a block may be empty
    found: Array = (x[:CHUNK].T @ first).astype(np.float64)
    for start in range(CHUNK, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        found += x[part].T @ y[part].reshape(-1, width)
    return found.reshape((x.shape[1], *y.shape[1:]))


def wanted_pairs(shapes: Sequence[tuple[int, ...]]) -> list[Pair]:
    """The pairs of layers that are computed: across two sides, or all of one; each with itself.

    Args:
        shapes: layers and hidden size of each side.
    """
    (lx, dx), (ly, dy) = shapes[0], shapes[-1]
    if len(shapes) == 1:
        return [Pair(0, i, 0, slice(i, lx), (lx - i) * dx * dx) for i in range(lx)]
    pairs = []
    for i in range(lx):
        pairs.append(Pair(0, i, 1, slice(0, ly), ly * dx * dy))
        pairs.append(Pair(0, i, 0, slice(i, i + 1), dx * dx))
    return pairs + [Pair(1, j, 1, slice(j, j + 1), dy * dy) for j in range(ly)]


def groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """The pairs in groups whose sums stay near `GROUP_BYTES`."""
    group: list[Pair] = []
    for pair in pairs:
        if group and 8 * sum(p.numbers for p in [*group, pair]) > GROUP_BYTES:
            yield group
            group = []
        group.append(pair)
    yield group
