"""Hidden states as products of kernels take them: centred, scaled, in float32.

Products in float32 take half of the time of those in float64. What is centred first loses nothing
that matters: each product is right to 2⁻²⁴ of the two lengths, errors of many tokens cancel, and
sums over more than `CHUNK` tokens are in float64.

Sums over pairs of tokens of the products of two layers' kernels: what CKA is a ratio of.

The linear kernel K of a layer is the token × token matrix of inner products of its centred hidden
states. Σ K·L over pairs of tokens can be had from the tokens (the Gram form, tokens² · channels
operations) or from the channels (the feature form, ‖Σ x yᵀ‖², tokens · channels²): the same number,
by whichever costs less.

The Gram form of `KernelSums`: kernels of tiles of tokens × tokens, which are never all there.

Pairs of layers, the products of their channels, and which are computed together.

The feature form of `KernelSums`: Σ K·L over all pairs of tokens is ‖Σ x yᵀ‖² over channels.

The sums of a layer pair take hidden_x × hidden_y × 8 bytes, those of all of them a GB and more.
Where the hidden states take about as much, they are held, and each pair of layers is summed over
all tokens by itself. Where there are more, a block is let go when it is added, whatever their
number, and layers of x are taken in groups, a pass each.

The two forms of sums over pairs of tokens, and which of them takes fewer operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.pipelines.analysis.moments import Array, Block, ChannelMoments, State, slabs
from bertvision.pipelines.analysis.reduce import SAMPLE_ROWS, Blocks, check_finite, tree_reduce
from bertvision.pipelines.scheduler import compute

PRODUCTS: Any = np.float32
"""Type that products are computed in; sums of them are float64."""
CHUNK = 4096
"""Products of at most so many tokens are summed in `PRODUCTS`."""


class Centring(NamedTuple):
    """How the hidden states of one side are centred, and which channels a variant leaves out.

    Attributes:
        n: tokens that there are.
        mean: (layers, hidden) subtracted.
        factor: (layers,) multiplied with: a power of two that brings the mean length of a token
            near 1, so that nothing overflows. It is exact, and no ratio of kernels depends on it.
        dropped: per layer, the channels of largest variance, largest first; may be none.
    """

    n: int
    mean: Array
    factor: Array
    dropped: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, moments: ChannelMoments, drop: int) -> Centring:
        """The centring of hidden states with these moments.

        Args:
            moments: Moments of all tokens.
            drop: channels of each layer to leave out.

        Raises:
            NonFiniteError: NaN or infinity in the hidden states.
        """
        check_finite(moments.m2)
        order = np.argsort(-moments.m2, axis=1, kind="stable")[:, :drop]
        length = np.sqrt(moments.variance().sum(axis=1))
        _, exponent = np.frexp(np.where(length > 0, length, 1.0))
        dropped = tuple(map(tuple, order.tolist()))
        return cls(moments.n, moments.mean, np.ldexp(1.0, -exponent), dropped)

    @property
    def variants(self) -> int:
        """One of all channels, and one without those that are dropped, where there are any."""
        return 2 if self.dropped[0] else 1

    def apply(self, block: Block) -> NDArray[Any]:
        """(tokens, layers, hidden) centred and scaled, of type `PRODUCTS`."""
        centred = np.empty(block.shape, PRODUCTS)
        start = 0
        for slab in slabs(block):
            slab -= self.mean
            slab *= self.factor[:, None]
            centred[start : start + len(slab)] = slab
            start += len(slab)
        return centred

    def keep(self) -> Array:
        """(variants, layers, hidden) 1 for the channels that a variant keeps, else 0."""
        keep = np.ones((self.variants, *self.mean.shape))
        if self.variants > 1:
            np.put_along_axis(keep[1], np.array(self.dropped), 0.0, axis=1)
        return keep


@dataclass(slots=True, eq=False)
class KernelSums(State):
    """Sums over pairs of tokens, for the layers of all sides behind one another.

    Attributes:
        n: tokens.
        products: (variants, layers, layers) Σ K_ts L_ts over ordered pairs of different tokens t
            and s. Of two layers of one side NaN where it was not asked for; of a layer with itself
            always there.
        norms: (variants, layers) Σ K_tt, the squared lengths.
        norm_products: (variants, layers, layers) Σ K_tt L_tt.
    """

    n: int
    products: Array
    norms: Array
    norm_products: Array

    def merge(self, other: KernelSums) -> KernelSums:
        """The sums of both; neither operand changes."""
        return KernelSums(
            self.n + other.n,
            self.products + other.products,
            self.norms + other.norms,
            self.norm_products + other.norm_products,
        )

    def hsic(self, *, unbiased: bool = True) -> Array:
        """Linear HSIC of every pair of layers.

        Unbiased: HSIC₁ of Song et al. (2012), eq. 5; needs n ≥ 4. Biased: HSIC₀ of Gretton et al.
        (2005), ‖cov(x, y)‖²_F with n − 1 in the denominator. The hidden states are centred, so a
        row of K without its diagonal sums to −K_tt.

        Returns:
            (variants, layers, layers)
        """
        n, c = self.n, self.norm_products
        if not unbiased:
            biased: Array = (self.products + c) / (n - 1) ** 2
            return biased
        totals = self.norms[:, :, None] * self.norms[:, None, :]  # 1ᵀK̃1 · 1ᵀL̃1
        hsic: Array = self.products + totals / ((n - 1) * (n - 2)) - 2 * c / (n - 2)
        return hsic / (n * (n - 3))

    def cka(self, *, unbiased: bool = True) -> Array:
        """HSIC(X, Y) / √(HSIC(X, X) · HSIC(Y, Y)), Kornblith et al. (2019), eq. 2.

        Returns:
            (variants, layers, layers); NaN where a layer does not vary.
        """
        hsic = self.hsic(unbiased=unbiased)
        own = np.einsum("vii->vi", hsic)
        product = own[:, :, None] * own[:, None, :]
        with np.errstate(invalid="ignore", divide="ignore"):
            values: Array = np.where(product > 0, hsic / np.sqrt(product), np.nan)
        return values


def squared_lengths(hidden: Block, keep: Array) -> Array:
    """(variants, tokens, layers) squared lengths over the channels that each variant keeps.

    Args:
        hidden: (tokens, layers, hidden) centred.
        keep: (variants, layers, hidden) 1 for a channel that is kept, else 0.
    """
    lengths = [
        np.einsum("nlc,vlc->vnl", np.square(slab), keep, optimize=False) for slab in slabs(hidden)
    ]
    return np.concatenate(lengths, axis=1) if lengths else np.zeros((len(keep), *hidden.shape[:2]))


ROWS = 256
"""Tokens of one edge of a tile: its kernels, of all layers, are to stay in the cache."""


def gram_sums(blocks: Blocks, sides: Sequence[Centring]) -> KernelSums:
    """The sums over pairs of tokens, from the tokens.

    All tokens are held at once, centred, in float32; every block meets every other one.

    Args:
        blocks: an array per side, (tokens, layers, hidden).
        sides: Centring of each side.
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
        tokens: Their number.
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
    products: Array = (by_row @ by_row.swapaxes(1, 2)).sum(axis=0, dtype=np.float64)
    return products


GROUP_BYTES = 2**29
"""About the size of one partial result: 512 MiB are 455 layer pairs of hidden size 384, or 64 of
1,024. One to three partial results per worker are alive at a time."""


MEETING = 4
"""Layers that one meets in a product, at most: more are faster than one, and still stay in the
cache."""


class Pair(NamedTuple):
    """A layer of one side, and neighbouring layers of a side that it meets."""

    side: int
    layer: int
    other: int
    layers: slice
    numbers: int
    """Elements of Σ x yᵀ: hidden · layers · hidden of the other side."""

    @property
    def itself(self) -> bool:
        """Whether it is a layer with itself alone."""
        return self.side == self.other and self.layers == slice(self.layer, self.layer + 1)

    def of_layers(self, start: int, stop: int) -> Pair:
        """The layer with some of those that it meets.

        Args:
            start: the first.
            stop: behind the last.
        """
        share = self.numbers // (self.layers.stop - self.layers.start)
        return self._replace(layers=slice(start, stop), numbers=share * (stop - start))

    def places(self) -> list[tuple[int, int]]:
        """The layer with each of those that it meets."""
        return [(self.layer, j) for j in range(self.layers.start, self.layers.stop)]


def product(x: NDArray[Any], y: NDArray[Any], total: Array | None = None) -> Array:
    """(hidden_x, layers, hidden_y) Σ x yᵀ of (tokens, hidden_x) and (tokens, layers, hidden_y).

    Args:
        x: Vectors of one layer.
        y: Vectors of the layers that it meets.
        total: Sum that it is added to, in its memory.
    """
    shape = x.shape[1], *y.shape[1:]
    width = shape[1] * shape[2]
    total = np.zeros(shape) if total is None else total
    # memory that is used again: each product in new memory would take longer
    room = np.empty((x.shape[1], width), x.dtype)
    for start in range(0, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        np.matmul(x[part].T, y[part].reshape(-1, width), out=room)
        total += room.reshape(shape)
    return total


def narrower(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The same pairs, those of a layer with itself apart, and of few layers each."""
    for pair in pairs:
        layers = range(pair.layers.start, pair.layers.stop)
        if pair.side == pair.other and pair.layer in layers:
            yield pair.of_layers(pair.layer, pair.layer + 1)
            layers = range(pair.layer + 1, pair.layers.stop)
        for some in np.array_split(layers, -(-len(layers) // MEETING)) if layers else []:
            yield pair.of_layers(int(some[0]), int(some[-1]) + 1)


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
        sides: Centring of each side; of one side all pairs of its layers are computed, of two the
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
    delayed_sides = [delayed(side) for side in sides]
    centred = [
        tuple(
            delayed(Centring.apply)(side, part)
            for side, part in zip(delayed_sides, block, strict=True)
        )
        for block in blocks
    ]
    columns = [list(blocks_of) for blocks_of in zip(*centred, strict=True)]
    narrow = list(narrower(pairs))
    rows_of_blocks = [
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
    of_tokens, *values = compute(delayed([lengths, *rows_of_blocks]))
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
        products: Products = compute(tree_reduce(blocks, leaf, Products.merge))
        for pair, sums in zip(group, products.pairs, strict=True):
            masks = keep[pair.side][:, pair.layer], keep[pair.other][:, pair.layers]
            squares |= _by_place(pair, _kept(sums, *masks))
    return products.lengths, squares


def feature_cost(tokens: int, shapes: Sequence[tuple[int, int]]) -> int:
    """About how many operations `feature_sums` takes.

    Args:
        tokens: Their number.
        shapes: layers and hidden size of each side.
    """
    return 2 * tokens * sum(pair.numbers for pair in wanted_pairs(shapes))


def products_of(*blocks: Block, sides: Sequence[Centring], pairs: Sequence[Pair]) -> Products:
    """The sums of some pairs over the tokens of a block.

    Args:
        blocks: (tokens, layers, hidden) of each side.
        sides: Centring of each side.
        pairs: Pairs of layers.
    """
    centred = [side.apply(block) for side, block in zip(sides, blocks, strict=True)]
    products = [product(centred[p.side][:, p.layer], centred[p.other][:, p.layers]) for p in pairs]
    return Products(products, _lengths(*centred, sides=sides))


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
    products: Array = np.einsum("vjd,vjd->vj", squares, keep_y)
    return products


def _by_place(pair: Pair, values: Array) -> Squares:
    """The (variants, layers) of a pair, by the two layers."""
    places = [((pair.side, i), (pair.other, j)) for i, j in pair.places()]
    return dict(zip(places, values.T, strict=True))


Shape = tuple[int, int]
"""Layers and hidden size of a side."""


class Form(NamedTuple):
    """A way to the same sums."""

    sums: Callable[[Blocks, Sequence[Centring]], KernelSums]
    cost: Callable[[int, Sequence[Shape]], int]
    """About how many operations it takes of so many tokens."""
    most_rows: int
    """Tokens of a block, at most: partial results of the feature form are large, so it has few."""

    def rows(self, tokens: int) -> int:
        """Tokens of a block of a sample of so many: four blocks, or more where these are large."""
        return min(max(SAMPLE_ROWS, -(-tokens // 4)), self.most_rows)


FEATURES = Form(feature_sums, feature_cost, 4 * SAMPLE_ROWS)
GRAM = Form(gram_sums, gram_cost, SAMPLE_ROWS)


def cheaper_form(tokens: int, shapes: Sequence[Shape]) -> Form:
    """The form that takes fewer operations; it depends on nothing but its arguments.

    Args:
        tokens: Their number.
        shapes: Shapes of one side or of two.
    """
    return min((FEATURES, GRAM), key=lambda form: form.cost(tokens, shapes))
