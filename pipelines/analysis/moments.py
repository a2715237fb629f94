"""Streamed moments of hidden states, in float64: add blocks, merge partial results, keep the state.

Everything the similarity and isotropy analyses need from a split is a sum over its tokens, so it
is computed block by block and merged in a tree; no block is kept. ``add`` changes the object it is
called on, ``merge`` returns a new one and leaves both operands alone (Dask may reuse them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Block = NDArray[np.floating[Any]]

SLAB_BYTES = 2**26
"""A block is turned into float64 in slabs of about this size, whatever the size of the block."""


class _State:
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
class Moments(_State):
    """First and second moments of every channel, and of the tokens' unit vectors, per layer.

    Second moments are about the running mean and are merged by Chan, Golub & LeVeque (1979), so
    that a large mean costs no precision.

    Attributes:
        n: tokens seen.
        n_unit: (layers,) tokens with a norm above zero, which have a direction.
        mean: (layers, hidden) mean of each channel.
        m2: (layers, hidden) Σ (x − mean)².
        sum_norm: (layers,) Σ ‖x‖.
        sum_unit: (layers, hidden) Σ u with u = x / ‖x‖.
        sum_unit2: (layers, hidden) Σ u², per channel.
        comoment: (layers, hidden, hidden) Σ (x − mean)(x − mean)ᵀ, or None where not asked for.
    """

    n: int
    n_unit: Array
    mean: Array
    m2: Array
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
            0,
            np.zeros(layers),
            np.zeros(plane),
            np.zeros(plane),
            np.zeros(layers),
            np.zeros(plane),
            np.zeros(plane),
            comoment,
        )

    def add(self, block: Block) -> None:
        """Adds the tokens of a block.

        Args:
            block: (tokens, layers, hidden) hidden states.
        """
        for (slab,) in slabs(block):
            n = len(slab)
            norm2 = np.einsum("nlc,nlc->nl", slab, slab)
            norm = np.sqrt(norm2)
            unit = slab / np.where(norm > 0, norm, 1)[..., None]
            self.n_unit += (norm > 0).sum(axis=0)
            self.sum_norm += norm.sum(axis=0)
            self.sum_unit += unit.sum(axis=0)
            self.sum_unit2 += np.einsum("nlc,nlc->lc", unit, unit)
            mean = slab.mean(axis=0)
            deviation = np.subtract(slab, mean, out=slab)
            comoment = None
            if self.comoment is not None:
                per_layer = [d.T @ d for d in deviation.transpose(1, 0, 2)]
                comoment = np.stack(per_layer)
            self._absorb(n, mean, np.einsum("nlc,nlc->lc", deviation, deviation), comoment)

    def merge(self, other: Moments) -> Moments:
        """The moments of the tokens of both; neither operand changes."""
        merged = type(self).from_state(self.state())
        merged.n_unit += other.n_unit
        merged.sum_norm += other.sum_norm
        merged.sum_unit += other.sum_unit
        merged.sum_unit2 += other.sum_unit2
        merged._absorb(other.n, other.mean, other.m2, other.comoment)
        return merged

    def _absorb(self, n: int, mean: Array, m2: Array, comoment: Array | None) -> None:
        total = self.n + n
        if n == 0:
            return
        delta = mean - self.mean
        weight = self.n * n / total
        self.m2 += m2 + weight * delta**2
        if self.comoment is not None and comoment is not None:
            self.comoment += comoment
            self.comoment += weight * delta[:, :, None] * delta[:, None, :]
        self.mean += delta * (n / total)
        self.n = total

    def variance(self) -> Array:
        """(layers, hidden) variance of each channel, with n in the denominator."""
        return self.m2 / self.n

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


@dataclass(slots=True, eq=False)
class CrossMoments(_State):
    """What linear HSIC needs from paired tokens, for every layer of x against every layer of y.

    The tokens are shifted by fixed vectors (their means, as a rule): HSIC does not depend on the
    shift, its rounding error does. A *variant* leaves some channels out; variants share M, the only
    costly sum (2 · tokens · layers_x · hidden_x · layers_y · hidden_y operations).

    Attributes:
        shift_x: (layers_x, hidden_x) subtracted from x.
        shift_y: (layers_y, hidden_y) subtracted from y.
        keep_x: (variants, layers_x, hidden_x) 1 for the channels that a variant keeps, else 0.
        keep_y: (variants, layers_y, hidden_y) the same of y.
        n: tokens seen.
        m: (layers_x, hidden_x, layers_y, hidden_y) M = Σ x yᵀ.
        sum_x: (layers_x, hidden_x) Sx = Σ x.
        sum_y: (layers_y, hidden_y) Sy = Σ y.
        x_by_y: (variants, layers_x, hidden_x, layers_y) a = Σ ‖y‖² x.
        y_by_x: (variants, layers_y, hidden_y, layers_x) c = Σ ‖x‖² y.
        norm_x: (variants, layers_x) A = Σ ‖x‖².
        norm_y: (variants, layers_y) B = Σ ‖y‖².
        norm_xy: (variants, layers_x, layers_y) C = Σ ‖x‖²‖y‖².
    """

    shift_x: Array
    shift_y: Array
    keep_x: Array
    keep_y: Array
    n: int
    m: Array
    sum_x: Array
    sum_y: Array
    x_by_y: Array
    y_by_x: Array
    norm_x: Array
    norm_y: Array
    norm_xy: Array

    @classmethod
    def empty(
        cls,
        shift_x: Array,
        shift_y: Array,
        keep_x: Array | None = None,
        keep_y: Array | None = None,
    ) -> CrossMoments:
        """The cross moments of no tokens; without masks there is one variant, all channels."""
        keep_x = np.ones((1, *shift_x.shape)) if keep_x is None else keep_x
        keep_y = np.ones((1, *shift_y.shape)) if keep_y is None else keep_y
        (lx, dx), (ly, dy), v = shift_x.shape, shift_y.shape, len(keep_x)
        return cls(
            shift_x,
            shift_y,
            keep_x,
            keep_y,
            0,
            np.zeros((lx, dx, ly, dy)),
            np.zeros((lx, dx)),
            np.zeros((ly, dy)),
            np.zeros((v, lx, dx, ly)),
            np.zeros((v, ly, dy, lx)),
            np.zeros((v, lx)),
            np.zeros((v, ly)),
            np.zeros((v, lx, ly)),
        )

    def add(self, x: Block, y: Block) -> None:
        """Adds paired tokens.

        Args:
            x: (tokens, layers_x, hidden_x) hidden states.
            y: (tokens, layers_y, hidden_y) hidden states of the same tokens in the same order.
        """
        lx, dx, ly, dy = self.m.shape
        for slab_x, slab_y in slabs(x, y):
            slab_x -= self.shift_x
            slab_y -= self.shift_y
            flat_x, flat_y = slab_x.reshape(len(slab_x), -1), slab_y.reshape(len(slab_y), -1)
            self.n += len(slab_x)
            # layer by layer: the product is as large as what it is added to
            for layer in range(lx):
                self.m[layer] += (slab_x[:, layer].T @ flat_y).reshape(dx, ly, dy)
            self.sum_x += slab_x.sum(axis=0)
            self.sum_y += slab_y.sum(axis=0)
            norms_x, norms_y = _norms(slab_x, self.keep_x), _norms(slab_y, self.keep_y)
            for v, (norm_x, norm_y) in enumerate(zip(norms_x, norms_y, strict=True)):
                self.x_by_y[v] += (flat_x.T @ norm_y).reshape(lx, dx, ly)
                self.y_by_x[v] += (flat_y.T @ norm_x).reshape(ly, dy, lx)
                self.norm_x[v] += norm_x.sum(axis=0)
                self.norm_y[v] += norm_y.sum(axis=0)
                self.norm_xy[v] += norm_x.T @ norm_y

    def merge(self, other: CrossMoments) -> CrossMoments:
        """The cross moments of the tokens of both, which share shifts and masks."""
        fixed = (self.shift_x, self.shift_y, self.keep_x, self.keep_y)
        names = [f.name for f in fields(self)][len(fixed) :]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return CrossMoments(*fixed, **sums)

    def hsic(self, *, unbiased: bool = True) -> Array:
        """Linear HSIC of every layer of x with every layer of y.

        Unbiased: HSIC₁ of Song et al. (2012), eq. 5, from sums over tokens instead of the token ×
        token Gram matrices; needs n ≥ 4. Biased: HSIC₀ of Gretton et al. (2005), ‖cov(x, y)‖²_F
        with n − 1 in the denominator.

        Returns:
            (variants, layers_x, layers_y)
        """
        n = self.n
        frobenius = np.empty_like(self.norm_xy)  # ‖M‖²
        bilinear = np.empty_like(self.norm_xy)  # Sxᵀ M Sy
        for layer, m in enumerate(self.m):  # (hidden_x, layers_y, hidden_y)
            by_channel = np.tensordot(self.keep_x[:, layer], m**2, axes=1)
            frobenius[:, layer] = np.einsum("vjd,vjd->vj", by_channel, self.keep_y)
            through = np.tensordot(self.keep_x[:, layer] * self.sum_x[layer], m, axes=1)
            bilinear[:, layer] = np.einsum("vjd,vjd->vj", through, self.keep_y * self.sum_y)
        sx, sy = self.keep_x * self.sum_x, self.keep_y * self.sum_y  # (variants, layers, hidden)
        length_x = np.einsum("vic,vic->vi", sx, sx)[:, :, None]  # ‖Sx‖²
        length_y = np.einsum("vjd,vjd->vj", sy, sy)[:, None, :]
        if not unbiased:
            centred = frobenius - 2 * bilinear / n + length_x * length_y / n**2
            biased: Array = centred / (n - 1) ** 2
            return biased
        trace = frobenius - self.norm_xy
        total_x = length_x - self.norm_x[:, :, None]
        total_y = length_y - self.norm_y[:, None, :]
        both = (
            bilinear
            - np.einsum("vic,vicj->vij", sx, self.x_by_y)
            - np.einsum("vjd,vjdi->vij", sy, self.y_by_x)
            + self.norm_xy
        )
        hsic: Array = trace + total_x * total_y / ((n - 1) * (n - 2)) - 2 * both / (n - 2)
        return hsic / (n * (n - 3))


def slabs(*blocks: Block) -> Iterator[list[Array]]:
    """Paired pieces of blocks of equal length, as fresh float64 arrays of about ``SLAB_BYTES``."""
    row = max(block[:1].size for block in blocks) * 8
    step = max(1, SLAB_BYTES // max(1, row))
    for start in range(0, len(blocks[0]), step):
        yield [np.array(block[start : start + step], dtype=np.float64) for block in blocks]


def _norms(slab: Array, keep: Array) -> Array:
    """(variants, tokens, layers) squared norms over the channels that each variant keeps."""
    return np.stack([np.einsum("nlc,nlc,lc->nl", slab, slab, kept) for kept in keep])
