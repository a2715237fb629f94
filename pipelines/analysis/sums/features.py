"""The feature form of `KernelSums`: Σ K·L over all pairs of tokens is ‖Σ x yᵀ‖² over channels.

The sums of a layer pair take hidden_x × hidden_y × 8 bytes, those of all of them a GB and more.
Where the hidden states take about as much, they are held, and each pair of layers is summed over
all tokens by itself. Where there are more, a block is let go when it is added, whatever their
number, and layers of x are taken in groups, a pass each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.pipelines.analysis.sums.centring import Centring
from bertvision.pipelines.analysis.sums.kernels import KernelSums, squared_lengths
from bertvision.pipelines.analysis.sums.moments import Array, Block
from bertvision.pipelines.analysis.sums.pairs import Pair, groups, narrower, product, wanted_pairs
from bertvision.pipelines.analysis.sums.reduce import Blocks, tree_reduce
from bertvision.pipelines.scheduler import compute

HELD_BYTES = 2**31
"""Centred hidden states of all sides that are held, at most: 26,000 tokens of two sides of 13
layers of hidden size 768."""


class Lengths(NamedTuple):
    """The sums over single tokens.

    Attributes:
        norms: (variants, layers of all sides) Σ ‖x‖².
        norm_products: (variants, layers, layers) Σ ‖x‖²‖y‖².
    """

    norms: Array
    norm_products: Array

    def merge(self, other: Lengths) -> Lengths:
        """The sums of both; neither operand changes."""
        return Lengths(self.norms + other.norms, self.norm_products + other.norm_products)


class Products(NamedTuple):
    """Partial result: Σ x yᵀ of some pairs, and the sums over single tokens.

    Attributes:
        pairs: for each `Pair` (hidden, layers, hidden of the other side).
        lengths: the sums over single tokens.
    """

    pairs: list[Array]
    lengths: Lengths

    def merge(self, other: Products) -> Products:
        """The sums of both; neither operand changes."""
        pairs = [a + b for a, b in zip(self.pairs, other.pairs, strict=True)]
        return Products(pairs, self.lengths.merge(other.lengths))


def feature_sums(blocks: Blocks, sides: Sequence[Centring]) -> KernelSums:
    """The sums over pairs of tokens, from the channels.

    Args:
        blocks: an array per side, (tokens, layers, hidden).
        sides: how each is centred; of one side all pairs of its layers are computed, of two the
            layers of the first with those of the second.
    """
    shapes = [side.mean.shape for side in sides]
    bytes_held = sides[0].n * sum(layers * hidden for layers, hidden in shapes) * 4
    sums = _held if bytes_held <= HELD_BYTES else _streamed
    lengths, squares = sums(blocks, sides, wanted_pairs(shapes))
    first = [0, shapes[0][0]]  # of the layers of each side, behind one another
    products = np.full(lengths.norm_products.shape, np.nan)
    for (one, other), value in squares.items():
        i, j = (first[side] + layer for side, layer in (one, other))
        products[:, i, j] = products[:, j, i] = value
    return KernelSums(sides[0].n, products - lengths.norm_products, *lengths)


Squares = dict[tuple[tuple[int, int], tuple[int, int]], Array]
"""(variants,) ‖Σ x yᵀ‖² by side and layer of x, and side and layer of y."""


def _held(
    blocks: Blocks, sides: Sequence[Centring], pairs: Sequence[Pair]
) -> tuple[Lengths, Squares]:
    """Every pair of layers over all tokens at once: nothing is merged but their squares."""
    keep = [side.keep() for side in sides]
    held = [delayed(side) for side in sides]
    centred = [
        tuple(delayed(_centred)(side, part) for side, part in zip(held, block, strict=True))
        for block in blocks
    ]
    columns = [list(blocks_of) for blocks_of in zip(*centred, strict=True)]
    narrow = list(narrower(pairs))
    found = [
        delayed(_squares)(
            columns[p.side],
            columns[p.other],
            p,
            keep[p.side][:, p.layer],
            keep[p.other][:, p.layers],
        )
        for p in narrow
    ]
    lengths = tree_reduce(centred, partial(_lengths, sides=sides), Lengths.merge)
    of_tokens, *values = compute(delayed([lengths, *found]))
    squares: Squares = {}
    for pair, of_pair in zip(narrow, values, strict=True):
        squares |= _by_place(pair, of_pair)
    return of_tokens, squares


def _streamed(
    blocks: Blocks, sides: Sequence[Centring], pairs: Sequence[Pair]
) -> tuple[Lengths, Squares]:
    """All pairs of a group over the tokens of a block, and these merged."""
    keep = [side.keep() for side in sides]
    squares: Squares = {}
    for group in groups(pairs):
        leaf = partial(products_of, sides=sides, pairs=group)
        found: Products = compute(tree_reduce(blocks, leaf, Products.merge))
        for pair, sums in zip(group, found.pairs, strict=True):
            kept = keep[pair.side][:, pair.layer], keep[pair.other][:, pair.layers]
            squares |= _by_place(pair, _kept(sums, *kept))
    return found.lengths, squares


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
    found = [product(centred[p.side][:, p.layer], centred[p.other][:, p.layers]) for p in pairs]
    return Products(found, _lengths(*centred, sides=sides))


def _centred(side: Centring, block: Block) -> NDArray[Any]:
    return side.apply(block)


def _lengths(*centred: NDArray[Any], sides: Sequence[Centring]) -> Lengths:
    of_sides = [squared_lengths(x, side.keep()) for x, side in zip(centred, sides, strict=True)]
    lengths = np.concatenate(of_sides, axis=2)
    return Lengths(lengths.sum(axis=1), lengths.swapaxes(1, 2) @ lengths)


def _squares(
    x: list[NDArray[Any]], y: list[NDArray[Any]], pair: Pair, keep_x: Array, keep_y: Array
) -> Array:
    """(variants, layers) ‖Σ x yᵀ‖² of a pair over the blocks of both sides."""
    total = np.zeros((keep_x.shape[1], *keep_y.shape[1:]))
    for one, other in zip(x, y, strict=True):
        # what came from another worker may begin at any byte, and products of it round otherwise
        a = np.require(one[:, pair.layer], requirements="A")
        # of the same memory half of the product is computed
        b = a[:, None] if pair.itself else np.require(other[:, pair.layers], requirements="A")
        product(a, b, total)
    return _kept(total, keep_x, keep_y)


def _kept(sums: Array, keep_x: Array, keep_y: Array) -> Array:
    """(variants, layers) squares of Σ x yᵀ, summed over the channels that each variant keeps.

    Args:
        sums: (hidden_x, layers, hidden_y).
        keep_x: (variants, hidden_x) 1 for a channel that is kept, else 0.
        keep_y: (variants, layers, hidden_y) likewise.
    """
    squares = np.tensordot(keep_x, np.square(sums), axes=1)  # (variants, layers, hidden_y)
    found: Array = np.einsum("vjd,vjd->vj", squares, keep_y)
    return found


def _by_place(pair: Pair, values: Array) -> Squares:
    """The (variants, layers) of a pair, by the two layers."""
    places = [((pair.side, i), (pair.other, j)) for i, j in pair.places()]
    return dict(zip(places, values.T, strict=True))
