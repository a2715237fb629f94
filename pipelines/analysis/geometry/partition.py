"""The partition function of Mu & Viswanath (2018), *All-but-the-Top*, and what it says of isotropy.

Z(c) = Σ exp(cᵀx) over the vectors x. It is the same in all directions c where they spread evenly:
I = min Z / max Z, eq. 1, with c over the eigenvectors of Σ x xᵀ and their negatives. Exponents of
hidden states are large, so log Z is summed (log-sum-exp), and log I is what is told: 0 at most.

The same pass has the correction of that paper: the mean and the first principal components are
taken out of every vector. In the coordinates of the principal components that is leaving the first
ones out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertvision.pipelines.analysis.sums.moments import Array, Block, Moments, slabs
from bertvision.pipelines.scheduler import map_here


class Bases(NamedTuple):
    """The directions in which Z is measured.

    Attributes:
        mean: (layers, hidden) of the vectors.
        raw: (layers, hidden, hidden) eigenvectors of Σ x xᵀ, a column each.
        centred: (layers, hidden, hidden) principal components, by falling variance.
        removed: components that the correction takes out.
    """

    mean: Array
    raw: Array
    centred: Array
    removed: int

    @classmethod
    def of(cls, moments: Moments) -> Bases:
        """The directions of vectors with these moments.

        As many components are removed as a hundredth of the channels, one at least: the rule of
        thumb of the paper.

        Args:
            moments: with covariances.
        """
        hidden = moments.mean.shape[1]
        covariances = moments.covariance()
        means = np.einsum("lc,ld->lcd", moments.mean, moments.mean)
        raw = map_here(lambda of: np.linalg.eigh(of)[1], list(covariances + means))
        centred = map_here(lambda of: np.linalg.eigh(of)[1][:, ::-1], list(covariances))
        return cls(moments.mean, np.stack(raw), np.stack(centred), max(1, round(hidden / 100)))


class LogSum(NamedTuple):
    """log Σ exp of values as they come: the largest, and the sum of the others relative to it."""

    largest: Array
    total: Array

    @classmethod
    def of(cls, values: Array) -> LogSum:
        """Over the first axis."""
        largest: Array = values.max(axis=0)
        return cls(largest, np.exp(values - largest).sum(axis=0))

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
        """Those of a block; None of an empty one.

        Args:
            block: (vectors, layers, hidden).
            bases: of all vectors.
        """
        found: Partition | None = None
        # what came from another worker may begin at any byte, and products of it round otherwise
        planes = [np.require(of, requirements=("C", "A")) for of in (bases.raw, bases.centred)]
        for (slab,) in slabs(block):
            part = _slab(slab, bases.mean, planes, bases.removed)
            found = part if found is None else found.merge(part)
        return found

    def merge(self, other: Partition) -> Partition:
        """Those of the vectors of both."""
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
    """Those of both, one of which may be of no vectors."""
    if one is None or other is None:
        return one or other
    return one.merge(other)


def _slab(slab: Array, mean: Array, planes: list[Array], removed: int) -> Partition:
    raw, centred = planes
    along = np.stack([slab[:, i] @ plane for i, plane in enumerate(raw)], axis=1)
    slab -= mean
    left = np.stack([slab[:, i] @ plane[:, removed:] for i, plane in enumerate(centred)], axis=1)
    norm = np.linalg.norm(left, axis=2)
    unit = left / np.where(norm > 0, norm, 1)[..., None]
    return Partition(_both(along), _both(left), (norm > 0).sum(axis=0), unit.sum(axis=0))


def _both(values: Array) -> LogSum:
    """The sums in each direction and in its negative."""
    parts = [LogSum.of(sign * values) for sign in (1, -1)]
    return LogSum(*(np.concatenate(pair, axis=-1) for pair in zip(*parts, strict=True)))


def _ratio(of: LogSum) -> Array:
    value = of.value()
    ratio: Array = value.min(axis=1) - value.max(axis=1)
    return ratio
