"""Sums over pairs of tokens of the products of two layers' kernels: what CKA is a ratio of.

The linear kernel K of a layer is the token × token matrix of inner products of its centred hidden
states. Σ K·L over pairs of tokens can be had from the tokens (the Gram form, tokens² · channels
operations) or from the channels (the feature form, ‖Σ x yᵀ‖², tokens · channels²): the same number,
by whichever costs less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertvision.pipelines.analysis.sums.moments import Array, Block, State, slabs


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
    found = [
        np.einsum("nlc,vlc->vnl", np.square(slab), keep, optimize=False) for slab in slabs(hidden)
    ]
    return np.concatenate(found, axis=1) if found else np.zeros((len(keep), *hidden.shape[:2]))
