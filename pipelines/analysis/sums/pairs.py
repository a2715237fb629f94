"""Pairs of layers, the products of their channels, and which are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertvision.pipelines.analysis.sums.centring import CHUNK
from bertvision.pipelines.analysis.sums.moments import Array

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
        x: of one layer.
        y: of the layers that it meets.
        total: what it is added to, in its memory.
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
