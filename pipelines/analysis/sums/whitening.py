"""Hidden states in the coordinates of their principal directions, each of variance one.

Correlations of such coordinates need no large differences of large sums: a product in float32 is
right to 2⁻²⁴ whatever the variance of the channels it came from. The coordinates themselves, and
the covariances they come from, are computed in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertvision.pipelines.analysis.sums import centring
from bertvision.pipelines.analysis.sums.moments import Array, Block, Moments, layer_slabs
from bertvision.pipelines.analysis.sums.reduce import check_finite

NULL = 1e-12
"""A direction with less variance than this part of the largest is none."""


class WhiteLayer(NamedTuple):
    """What is left to know of a layer when its coordinates are computed.

    Attributes:
        loadings: (hidden, hidden) see `Whitening`.
        rank: how many directions there are.
        kept: how many hold the share of the variance that was asked for.
    """

    loadings: Array
    rank: int
    kept: int


class Whitening(NamedTuple):
    """How the hidden states of one side are whitened; directions by falling variance.

    Attributes:
        mean: (layers, hidden) subtracted.
        directions: (layers, hidden, hidden) a column for each: v / √(λ + ridge), 0 of none.
        loadings: (layers, hidden, hidden) a column for each: λ v / √(λ + ridge), which is the
            covariance of the channels with the coordinate.
        ranks: per layer, how many directions there are.
        kept: per layer, how many of them hold the share of the variance that was asked for.
    """

    mean: Array
    directions: Array
    loadings: Array
    ranks: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, moments: Moments, keep: float, ridge: float) -> Whitening:
        """The whitening of hidden states with these moments.

        Args:
            moments: of all tokens, with covariances.
            keep: share of the variance.
            ridge: added to the variance of every direction, as a part of the channels' mean one.

        Raises:
            NonFiniteError: NaN or infinity in the hidden states.
        """
        check_finite(moments.m2)
        covariances = moments.covariance()
        directions, loadings = np.zeros_like(covariances), np.zeros_like(covariances)
        ranks, kept = [], []
        for i, covariance in enumerate(covariances):
            values, vectors = np.linalg.eigh(covariance)
            values, vectors = values[::-1].clip(min=0), vectors[:, ::-1]
            rank = int((values > NULL * values[0]).sum()) if values[0] > 0 else 0
            values, vectors = values[:rank], vectors[:, :rank]
            scale = np.sqrt(values + ridge * values.sum() / len(covariance))
            directions[i, :, :rank] = vectors / scale
            loadings[i, :, :rank] = vectors * (values / scale)
            share = np.cumsum(values) / values.sum()
            ranks.append(rank)
            # what rounding leaves of 1 must not cost a direction
            kept.append(min(rank, int(np.searchsorted(share, keep - 1e-12)) + 1))
        return cls(moments.mean, directions, loadings, tuple(ranks), tuple(kept))

    def layer(self, i: int) -> WhiteLayer:
        """What is to be known of a layer.

        Args:
            i: its place.
        """
        return WhiteLayer(self.loadings[i], self.ranks[i], self.kept[i])

    def apply(self, block: Block) -> NDArray[Any]:
        """(tokens, layers, hidden) coordinates, of type `centring.PRODUCTS`."""
        found = np.empty(block.shape, centring.PRODUCTS)
        # what came from another worker may begin at any byte, and products of it round otherwise
        planes = np.require(self.directions, requirements=("C", "A"))
        for rows, i, slab in layer_slabs(block):
            slab -= self.mean[i]
            found[rows, i] = slab @ planes[i]
        return found
