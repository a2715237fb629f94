"""Streamed moments of hidden states, in float64: add blocks, merge partial results, keep the state.

Everything the similarity and isotropy analyses need from a split is a sum over its tokens, so it
is computed block by block and merged in a tree; no block is kept. ``add`` changes the object it is
called on, ``merge`` returns a new one and leaves both operands alone (Dask may reuse them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Block = NDArray[np.floating[Any]]

SLAB_BYTES = 2**22
"""A block is turned into float64 in slabs of about this size, whatever the size of the block: what
is done to a slab, one thing after another, finds it in the cache of the processor."""


class State:
    """``state`` and ``from_state`` for dataclasses whose fields are numbers, arrays or None."""

    def state(self) -> dict[str, NDArray[Any]]:
        """All fields that are not None, as arrays; ``from_state`` restores them exactly."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: np.asarray(value) for name, value in pairs if value is not None}

    @classmethod
    def from_state(cls, state: dict[str, NDArray[Any]]) -> Self:
        """The object whose ``state()`` this is."""
        return cls(**{k: v.item() if v.ndim == 0 else v.copy() for k, v in state.items()})


@dataclass(slots=True, eq=False)
class ChannelMoments(State):
    """Mean and variance of every channel, per layer.

    Second moments are about the running mean and are merged by Chan, Golub & LeVeque (1979), so
    that a large mean costs no precision.

    Attributes:
        n: tokens seen.
        mean: (layers, hidden) mean of each channel.
        m2: (layers, hidden) Σ (x − mean)².
    """

    n: int
    mean: Array
    m2: Array

    @classmethod
    def of(cls, block: Block) -> ChannelMoments:
        """The moments of the tokens of a block.

        Args:
            block: (tokens, layers, hidden) hidden states.
        """
        moments = cls(0, np.zeros(block.shape[1:]), np.zeros(block.shape[1:]))
        for slab in slabs(block):
            mean = slab.mean(axis=0)
            slab -= mean
            moments._absorb(len(slab), mean, np.einsum("nlc,nlc->lc", slab, slab))
        return moments

    def merge(self, other: Self) -> Self:
        """The moments of the tokens of both; neither operand changes."""
        merged = self.from_state(self.state())
        merged._absorb(other.n, other.mean, other.m2)
        return merged

    def _absorb(self, n: int, mean: Array, m2: Array) -> None:
        if n == 0:
            return
        total = self.n + n
        delta = mean - self.mean
        self.m2 += m2 + self.n * n / total * delta**2
        self.mean += delta * (n / total)
        self.n = total

    def variance(self) -> Array:
        """(layers, hidden) variance of each channel, with n in the denominator."""
        return self.m2 / self.n


@dataclass(slots=True, eq=False)
class Moments(ChannelMoments):
    """First and second moments of every channel, and of the tokens' unit vectors, per layer.

    Attributes:
        n_unit: (layers,) tokens with a norm above zero, which have a direction.
        sum_norm: (layers,) Σ ‖x‖.
        sum_unit: (layers, hidden) Σ u with u = x / ‖x‖.
        sum_unit2: (layers, hidden) Σ u², per channel.
        comoment: (layers, hidden, hidden) Σ (x − mean)(x − mean)ᵀ, or None where not asked for.
    """

    n_unit: Array
    sum_norm: Array
    sum_unit: Array
    sum_unit2: Array
    comoment: Array | None = None

    @classmethod
    def empty(cls, layers: int, hidden: int, *, covariance: bool = False) -> Moments:
        """The moments of no tokens.

        Args:
            layers: number of layers of the blocks to come.
            hidden: number of channels of the blocks to come.
            covariance: also keep the (hidden × hidden) co-moments of each layer.
        """
        plane = (layers, hidden)
        comoment = np.zeros((layers, hidden, hidden)) if covariance else None
        return cls(
            n=0,
            mean=np.zeros(plane),
            m2=np.zeros(plane),
            n_unit=np.zeros(layers),
            sum_norm=np.zeros(layers),
            sum_unit=np.zeros(plane),
            sum_unit2=np.zeros(plane),
            comoment=comoment,
        )

    @classmethod
    def of(cls, block: Block, *, covariance: bool = False) -> Moments:
        """The moments of the tokens of a block.

        Args:
            block: (tokens, layers, hidden) hidden states.
            covariance: also keep the (hidden × hidden) co-moments of each layer.
        """
        moments = cls.empty(*block.shape[1:], covariance=covariance)
        moments.add(block)
        return moments

    def add(self, block: Block) -> None:
        """Adds the tokens of a block.

        Args:
            block: (tokens, layers, hidden) hidden states.
        """
        for part in parts(block):
            n = len(part)
            mean, m2 = np.empty_like(self.mean), np.empty_like(self.m2)
            for i in range(part.shape[1]):
                room = np.empty((n + 1, part.shape[2]))
                slab = room[:n]
                slab[:] = part[:, i]
                self._add_units(i, slab)
                mean[i] = slab.mean(axis=0)
                slab -= mean[i]
                m2[i] = np.einsum("nc,nc->c", slab, slab)
                if self.comoment is not None:
                    # the term between what was and what comes enters the product as one more row
                    room[n] = np.sqrt(self.n * n / (self.n + n)) * (mean[i] - self.mean[i])
                    self.comoment[i] += room.T @ room
            self._absorb(n, mean, m2)

    def _add_units(self, layer: int, slab: Array) -> None:
        """Adds lengths and directions of (tokens, hidden) of a layer."""
        squares = slab * slab
        norm = np.sqrt(squares.sum(axis=1))
        inverse = np.divide(1.0, norm, out=np.zeros_like(norm), where=norm > 0)
        self.n_unit[layer] += (norm > 0).sum()
        self.sum_norm[layer] += norm.sum()
        self.sum_unit[layer] += inverse @ slab
        self.sum_unit2[layer] += inverse**2 @ squares

    def merge(self, other: Self) -> Self:
        """The moments of the tokens of both; neither operand changes."""
        merged = self.from_state(self.state())
        merged.n_unit += other.n_unit
        merged.sum_norm += other.sum_norm
        merged.sum_unit += other.sum_unit
        merged.sum_unit2 += other.sum_unit2
        if merged.comoment is not None and other.comoment is not None and other.n:
            weight = self.n * other.n / (self.n + other.n)
            for total, comoment, delta in zip(
                merged.comoment, other.comoment, other.mean - self.mean, strict=True
            ):
                total += comoment
                total += np.outer(weight * delta, delta)
        merged._absorb(other.n, other.mean, other.m2)
        return merged

    def covariance(self) -> Array:
        """(layers, hidden, hidden) covariance, with n in the denominator.

        Raises:
            TypeError: the moments were not made with ``covariance=True``.
        """
        if self.comoment is None:
            raise TypeError("these moments keep no covariance; make them with covariance=True")
        return self.comoment / self.n

    def cosine_by_channel(self) -> Array:
        """(layers, hidden) what each channel adds to the mean cosine of two different tokens.

        Exact over all n(n − 1) ordered pairs, ((Σu_c)² − Σu_c²) / (n(n − 1)); the sum over channels
        is the mean cosine, (‖Σu‖² − n) / (n(n − 1)). The contribution of a dimension to the cosine
        is that of Timkey & van Schijndel (2021), who estimate it from sampled pairs. NaN for fewer
        than two tokens.
        """
        pairs = self.n_unit * (self.n_unit - 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            result: Array = (self.sum_unit**2 - self.sum_unit2) / pairs[:, None]
        return result


M = TypeVar("M", bound=ChannelMoments)


def each_of(of: Callable[[Block], M], *blocks: Block) -> list[M]:
    """The moments of a block of each side.

    Args:
        of: Moments of one.
        *blocks: (tokens, layers, hidden) of each side.
    """
    return [of(block) for block in blocks]


def each_merged(one: list[M], other: list[M]) -> list[M]:
    """The moments of the tokens of both, side by side."""
    return [a.merge(b) for a, b in zip(one, other, strict=True)]


def slabs(block: Block) -> Iterator[Array]:
    """Pieces of a block, all layers of some tokens, as fresh float64 arrays."""
    for part in parts(block, block.shape[1]):
        yield np.array(part, dtype=np.float64)


def layer_slabs(block: Block) -> Iterator[tuple[slice, int, Array]]:
    """Tokens, layer and (tokens, hidden) of the pieces of a block, as fresh float64 arrays."""
    start = 0
    for part in parts(block):
        rows = slice(start, start + len(part))
        start += len(part)
        for i in range(part.shape[1]):
            yield rows, i, np.array(part[:, i], dtype=np.float64)


def parts(block: Block, layers: int = 1) -> Iterator[Block]:
    """Views of a block, all layers of some tokens.

    Args:
        block: (tokens, layers, hidden).
        layers: Number of layers that are about `SLAB_BYTES` in float64.
    """
    row = max(1, layers * block.shape[2]) * 8
    step = max(1, SLAB_BYTES // row)
    for start in range(0, len(block), step):
        yield block[start : start + step]
