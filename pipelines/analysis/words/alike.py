"""How alike the vectors of a group are, in each layer: cosines, and how many directions they need.

A block holds whole groups behind one another, so each is measured exactly, in float64, and let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.pipelines.analysis.sums.moments import Array, Block
from bertvision.pipelines.analysis.sums.reduce import (
    SAMPLE_ROWS,
    Blocks,
    check_finite,
    cut_blocks,
    tree_reduce,
)
from bertvision.pipelines.scheduler import compute

Rows = NDArray[np.int64]
ROUNDING = 1e-24
"""Variance that is less than this part of the squared lengths is what rounding leaves of none."""


class Groups(NamedTuple):
    """Groups of vectors in blocks of whole groups.

    Attributes:
        blocks: (vectors, layers, hidden) each.
        sizes: for each block the vectors of its groups.
    """

    blocks: Blocks
    sizes: list[list[int]]

    @classmethod
    def of(cls, x: da.Array, groups: Sequence[Rows]) -> Groups:
        """The groups of some rows; nothing is read yet.

        Args:
            x: (token, layer, hidden) hidden states.
            groups: rows of each.
        """
        sizes: list[list[int]] = []
        cuts: list[list[Rows]] = []
        for group in groups:
            if not cuts or sum(sizes[-1]) + len(group) > SAMPLE_ROWS:
                cuts.append([])
                sizes.append([])
            cuts[-1].append(group)
            sizes[-1].append(len(group))
        return cls(cut_blocks(x, [np.concatenate(cut) for cut in cuts]), sizes)


class Alike(NamedTuple):
    """How alike the vectors of each group are; NaN of a group without two directions.

    Attributes:
        length: (groups, layers) mean length of its vectors.
        cosine: (groups, layers) mean cosine of two different vectors.
        to_mean: (groups, layers) mean cosine of a vector with the mean vector of its group.
        explained: (groups, layers) share of the variance about the mean in the first principal
            component.
    """

    length: Array
    cosine: Array
    to_mean: Array
    explained: Array

    def merge(self, other: Alike) -> Alike:
        """Those of the groups of both."""
        return Alike(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class Common(NamedTuple):
    """Sums over vectors, from which mean cosines over all pairs follow.

    Attributes:
        n: (layers,) vectors that have a direction in the layer and in the first one.
        unit: (layers, hidden) Σ u with u of length 1.
        first: (layers, hidden) Σ of those of the first layer, of the same vectors.
        to_first: (layers,) Σ of the cosine of a vector with the same token in the first layer.
    """

    n: Array
    unit: Array
    first: Array
    to_first: Array

    def merge(self, other: Common) -> Common:
        """The sums of both."""
        return Common(*(a + b for a, b in zip(self, other, strict=True)))

    def cosine(self) -> Array:
        """(layers,) mean cosine of two different vectors."""
        return _of_pairs((self.unit**2).sum(axis=1) - self.n, self.n)

    def static(self) -> Array:
        """(layers,) mean cosine of a vector with the same token in the first layer."""
        return self.to_first / self.n

    def static_of_others(self) -> Array:
        """(layers,) mean cosine of a vector with another token in the first layer."""
        return _of_pairs((self.unit * self.first).sum(axis=1) - self.to_first, self.n)


def alike(groups: Groups, *, explained: bool = False) -> Alike:
    """How alike the vectors of each group are.

    Args:
        groups: that are read.
        explained: whether the variance is asked for too; NaN where not.

    Raises:
        NonFiniteError: NaN or infinity in the vectors.
    """
    blocks = _with_sizes(groups)
    leaf = _alike_explained if explained else _alike
    found: Alike = compute(tree_reduce(blocks, leaf, Alike.merge))
    check_finite(found.length.T)
    return found


def common(groups: Groups) -> Common:
    """Sums over all vectors of the groups.

    Args:
        groups: that are read.
    """
    found: Common = compute(tree_reduce(groups.blocks, _common, Common.merge))
    return found


def _with_sizes(groups: Groups) -> Blocks:
    pairs = zip(groups.blocks, groups.sizes, strict=True)
    return [(*block, delayed(sizes)) for block, sizes in pairs]


def _alike_explained(block: Block, sizes: Sequence[int]) -> Alike:
    return _alike(block, sizes, explained=True)


def _alike(block: Block, sizes: Sequence[int], *, explained: bool = False) -> Alike:
    found = []
    for part in np.split(block, np.cumsum(sizes)[:-1]):
        x = part.astype(np.float64)
        length = np.linalg.norm(x, axis=2).mean(axis=0)
        if not np.isfinite(length).all():
            x = np.zeros_like(x)  # it is refused by its length
        unit, n = _unit(x)
        cosine = _of_pairs((unit.sum(axis=0) ** 2).sum(axis=1) - n, n)
        mean, _ = _unit(x.mean(axis=0)[None])
        to_mean = np.einsum("nlc,lc->l", unit, mean[0]) / np.where(n > 0, n, np.nan)
        share = _explained(x) if explained else np.full(x.shape[1], np.nan)
        found.append((length, cosine, to_mean, share))
    return Alike(*(np.array(column) for column in zip(*found, strict=True)))


def _explained(x: Array) -> Array:
    """(layers,) from the vectors' products, of which there are fewer than channels."""
    squares = (x**2).sum(axis=(0, 2))
    x = (x - x.mean(axis=0)).transpose(1, 0, 2)
    values = np.linalg.eigvalsh(x @ x.swapaxes(1, 2)).clip(min=0)
    total = values.sum(axis=1)
    varies = total > ROUNDING * squares
    share: Array = np.where(varies, values[:, -1] / np.where(varies, total, 1), np.nan)
    return share


def _common(block: Block) -> Common:
    unit, _ = _unit(block.astype(np.float64))
    first = unit[:, :1]
    # of both or of none, so that each vector is paired with as many
    both: NDArray[np.bool_] = np.logical_and(unit.any(axis=2), first.any(axis=2))[..., None]
    unit, first = unit * both, first * both
    to_first = np.einsum("nlc,nlc->l", unit, first)
    n = both.sum(axis=(0, 2)).astype(np.float64)
    return Common(n, unit.sum(axis=0), first.sum(axis=0), to_first)


def _unit(x: Array) -> tuple[Array, Array]:
    """Vectors of length 1, or of zeros where there is no direction; and how many have one."""
    norm = np.linalg.norm(x, axis=2, keepdims=True)
    return x / np.where(norm > 0, norm, 1), (norm[..., 0] > 0).sum(axis=0).astype(np.float64)


def _of_pairs(total: Array, n: Array) -> Array:
    """A sum over ordered pairs of different vectors, as a mean."""
    pairs = n * (n - 1)
    mean: Array = total / np.where(pairs > 0, pairs, np.nan)
    return mean
