"""The partition function of Mu & Viswanath (2018), *All-but-the-Top*, and what it says of isotropy.

Z(c) = Σ exp(cᵀx) over the vectors x. It is the same in all directions c where they spread evenly:
I = min Z / max Z, eq. 1, with c over the eigenvectors of Σ x xᵀ and their negatives. Exponents of
hidden states are large, so log Z is summed (log-sum-exp), and log I is what is told: 0 at most.

The same pass has the correction of that paper: the mean and the first principal components are
taken out of every vector. In the coordinates of the principal components that is leaving the first
ones out.

Products and exponentials are in the type of the hidden states, which is float32 of a store; sums of
them are in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from bertvision.pipelines.analysis.moments import Array, Block, Moments, parts
from bertvision.pipelines.scheduler import map_here


class Bases(NamedTuple):
    """The directions in which Z is measured.

    Attributes:
        mean: (layers, hidden) of the vectors, float64.
        raw: (layers, hidden, hidden) eigenvectors of Σ x xᵀ, a column each.
        centred: (layers, hidden, hidden − removed) principal components, by falling variance,
            without the first ones, which the correction takes out.
        variances: (layers, hidden) of all principal components, falling, float64.
    """

    mean: Array
    raw: Block
    centred: Block
    variances: Array

    @classmethod
    def of(cls, moments: Moments, dtype: DTypeLike) -> Bases:
        """The directions of vectors with these moments.

        As many components are removed as a hundredth of the channels, one at least: the rule of
        thumb of the paper.

        Args:
            moments: Moments with covariances.
            dtype: Type in which vectors are projected; the directions are found in float64.
        """
        layers, hidden = moments.mean.shape
        removed = max(1, round(hidden / 100))
        about_mean = list(moments.covariance())
        about_zero = [c + np.outer(m, m) for c, m in zip(about_mean, moments.mean, strict=True)]
        decomposed = map_here(np.linalg.eigh, about_mean + about_zero)
        raw = np.empty((layers, hidden, hidden), dtype)
        centred = np.empty((layers, hidden, hidden - removed), dtype)
        for i in range(layers):
            centred[i] = decomposed[i].eigenvectors[:, ::-1][:, removed:]
            raw[i] = decomposed[layers + i].eigenvectors
        variances = np.stack([one.eigenvalues[::-1] for one in decomposed[:layers]])
        return cls(moments.mean, raw, centred, variances)


class LogSum(NamedTuple):
    """log Σ exp of values as they come: the largest, and the sum of the others relative to it."""

    largest: Array
    total: Array

    @classmethod
    def of(cls, values: Block) -> LogSum:
        """Over the first axis, of the values and behind them of their negatives."""
        most, least = values.max(axis=0), values.min(axis=0)
        room = np.subtract(values, most)
        above = np.exp(room, out=room).sum(axis=0, dtype=np.float64)
        np.subtract(least, values, out=room)
        below = np.exp(room, out=room).sum(axis=0, dtype=np.float64)
        largest = np.concatenate([most, -least]).astype(np.float64)
        return cls(largest, np.concatenate([above, below]))

    def merge(self, other: LogSum) -> LogSum:
        """The sum of the values of both."""
        largest = np.maximum(self.largest, other.largest)
        total = self.total * np.exp(self.largest - largest)
        return LogSum(largest, total + other.total * np.exp(other.largest - largest))

    def value(self) -> Array:
        """Log Σ exp."""
        value: Array = self.largest + np.log(self.total)
        return value


class Partition(NamedTuple):
    """Log Z of some vectors in all directions, and their unit vectors after the correction.

    Attributes:
        raw: (layers, 2 · hidden) of the vectors, in both senses of each direction.
        corrected: (layers, 2 · (hidden − removed)) of the corrected ones, in the directions that
            are left to them.
        n_unit: (layers,) vectors that have a length after the correction.
        sum_unit: (layers, hidden − removed) Σ of the corrected vectors, each of length 1.
    """

    raw: LogSum
    corrected: LogSum
    n_unit: Array
    sum_unit: Array

    @classmethod
    def of(cls, block: Block, bases: Bases) -> Partition | None:
        """The sums of a block; None of an empty one.

        Args:
            block: (vectors, layers, hidden).
            bases: Bases of all vectors.
        """
        # what came from another worker may begin at any byte, and products of it round otherwise
        planes = [np.require(plane, requirements=("C", "A")) for plane in bases[:3]]
        partition: Partition | None = None
        for part in parts(block):
            layers = [
                _layer(part[:, i], *bases_of_layer)
                for i, bases_of_layer in enumerate(zip(*planes, strict=True))
            ]
            of_part = _stacked(layers)
            partition = of_part if partition is None else partition.merge(of_part)
        return partition

    def merge(self, other: Partition) -> Partition:
        """The sums over the vectors of both."""
        return Partition(
            self.raw.merge(other.raw),
            self.corrected.merge(other.corrected),
            self.n_unit + other.n_unit,
            self.sum_unit + other.sum_unit,
        )

    def log_ratio(self) -> Array:
        """(layers,) log I of the vectors."""
        return _ratio(self.raw)

    def corrected_ratio(self) -> Array:
        """(layers,) log I of the corrected vectors."""
        return _ratio(self.corrected)

    def corrected_cosine(self) -> Array:
        """(layers,) mean cosine of two different vectors, corrected; NaN of fewer than two."""
        n = self.n_unit
        with np.errstate(invalid="ignore", divide="ignore"):
            cosine: Array = ((self.sum_unit**2).sum(axis=1) - n) / (n * (n - 1))
        return cosine


def merged(one: Partition | None, other: Partition | None) -> Partition | None:
    """The sums of both, one of which may have no vectors."""
    if one is None or other is None:
        return one or other
    return one.merge(other)


def _layer(vectors: Block, mean: Array, raw: Block, centred: Block) -> Partition:
    """Sums over the (vectors, hidden) of a layer, without an axis of layers."""
    # the mean of a channel that hardly varies has more digits than its vectors
    left = (vectors - mean).astype(vectors.dtype) @ centred
    norm = np.sqrt(np.einsum("nc,nc->n", left, left))
    inverse = np.divide(1, norm, out=np.zeros_like(norm), where=norm > 0)
    unit = (inverse @ left).astype(np.float64)
    return Partition(LogSum.of(vectors @ raw), LogSum.of(left), (norm > 0).sum(), unit)


def _stacked(layers: Sequence[Partition]) -> Partition:
    """Sums of several layers, with an axis of layers in front."""
    raw, corrected = (
        LogSum(
            np.stack([layer.largest for layer in sums]), np.stack([layer.total for layer in sums])
        )
        for sums in ([layer.raw for layer in layers], [layer.corrected for layer in layers])
    )
    n_unit, sum_unit = (
        np.stack(layer) for layer in zip(*(layer[2:] for layer in layers), strict=True)
    )
    return Partition(raw, corrected, n_unit, sum_unit)


def _ratio(log_sum: LogSum) -> Array:
    value = log_sum.value()
    ratio: Array = value.min(axis=1) - value.max(axis=1)
    return ratio
