"""Streamed moments of pairs of hidden states: what linear HSIC, and so CKA, is computed from."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from bertvision.pipelines.analysis.moments import Array, Block, State, slabs


@dataclass(slots=True, eq=False)
class CrossMoments(State):
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


def _norms(slab: Array, keep: Array) -> Array:
    """(variants, tokens, layers) squared norms over the channels that each variant keeps."""
    return np.stack([np.einsum("nlc,nlc,lc->nl", slab, slab, kept) for kept in keep])
