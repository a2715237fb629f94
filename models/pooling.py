"""Pooling of layers, adapters, and the reduction of a width: the parts of heads."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pooling = Literal["learned", "average", "attention", "last"]


def make_pooling(kind: Pooling, layers: int, hidden: int) -> nn.Module:
    """A module (tokens, layers, hidden) → (tokens, hidden).

    Args:
        kind: `LearnedPooling`, `AveragePooling`, `AttentionPooling` or `LastLayer`.
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
    """
    if kind == "learned":
        return LearnedPooling(layers)
    if kind == "attention":
        return AttentionPooling(layers, hidden)
    return AveragePooling() if kind == "average" else LastLayer()


class LearnedPooling(nn.Module):
    """Scalar mix: γ · Σ_l softmax(w)_l · h_l, with w ~ N(0, 0.05) and γ = 1 at the start.

    Peters et al. (2018, ELMo, equation 1); for probing by Tenney et al. (2019, *BERT Rediscovers
    the Classical NLP Pipeline*, equation 1).

    Args:
        layers: number of hidden states, the embedding output included (25 for BERT-large).
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scalars = nn.Parameter(torch.empty(layers))  # (layers,) w
        self.gamma = nn.Parameter(torch.ones(()))
        nn.init.normal_(self.scalars, std=0.05)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pool over layers: (tokens, layers, hidden) → (tokens, hidden)."""
        weights = self.gamma * self.scalars.softmax(dim=0)
        return _weighted_sum(weights.expand(len(hidden_states), -1), hidden_states)


class AveragePooling(nn.Module):
    """Mean over layers; no parameters."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pool over layers: (tokens, layers, hidden) → (tokens, hidden)."""
        tokens, layers, _ = hidden_states.shape
        # Divided afterwards: 1 / layers would be rounded in bfloat16.
        return (
            _weighted_sum(hidden_states.new_ones(1).expand(tokens, layers), hidden_states) / layers
        )


class AttentionPooling(nn.Module):
    """Weights of each token's own: Σ_l a_l h_l, with a = softmax_l(q · h_l / √hidden + b_l).

    A learned query looks at what the layers hold, where `LearnedPooling` weighs them alike for all
    tokens (q = 0 gives that, with b as its w). The word attention of Yang et al. (2016,
    *Hierarchical Attention Networks for Document Classification*, equations 5 to 7) over layers
    instead of words, without its hidden layer, with the scale of Vaswani et al. (2017, equation 1).
    q and b begin at 0: the mean.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
    """

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(hidden))
        self.bias = nn.Parameter(torch.zeros(layers))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pool over layers: (tokens, layers, hidden) → (tokens, hidden)."""
        query = self.query / math.sqrt(len(self.query))
        scores = hidden_states @ query.to(hidden_states.dtype) + self.bias  # (tokens, layers)
        return _weighted_sum(scores.float().softmax(dim=1), hidden_states)


class LastLayer(nn.Module):
    """The last hidden state alone, which is what BERT's own output layer reads; no parameters."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The last layer: (tokens, layers, hidden) → (tokens, hidden)."""
        return hidden_states[:, -1]


def _weighted_sum(weights: Tensor, hidden_states: Tensor) -> Tensor:
    """Σ_l w_l h_l of each token: (tokens, layers), (tokens, layers, hidden) → (tokens, hidden)."""
    # Measured on CPU: bmm with expanded weights takes a tenth of the time of matmul or einsum,
    # which transpose (copy) the hidden states first, and in bfloat16 a fourth of that of mean().
    return torch.bmm(weights.to(hidden_states.dtype).unsqueeze(1), hidden_states).squeeze(1)


_STD = 1e-3


class SharedAdapter(nn.Module):
    """GELU(h W + b) with one W for all layers: hidden × size + size parameters.

    Args:
        hidden: width of the hidden states.
        size: width of the compressed states.
    """

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, size)
        nn.init.trunc_normal_(self.down.weight, std=_STD, a=-2 * _STD, b=2 * _STD)
        nn.init.zeros_(self.down.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compress: (tokens, layers, hidden) → (tokens, layers, size)."""
        return F.gelu(self.down(hidden_states))


class IndependentAdapter(nn.Module):
    """GELU(h_l W_l + b_l), a W of its own per layer: layers × (hidden × size + size) parameters.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        size: width of the compressed states.
    """

    def __init__(self, layers: int, hidden: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers, size, hidden))
        self.bias = nn.Parameter(torch.zeros(layers, size))
        nn.init.trunc_normal_(self.weight, std=_STD, a=-2 * _STD, b=2 * _STD)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compress: (tokens, layers, hidden) → (tokens, layers, size)."""
        # Measured on CPU against baddbmm and einsum, forward and backward: one matmul per layer is
        # up to 1.5 times faster in float32 and 2 to 5 times in bfloat16, as fast as the shared
        # adapter. Batched matmul over a strided view falls back to slower kernels.
        states = zip(
            hidden_states.unbind(1), self.weight.unbind(0), self.bias.unbind(0), strict=True
        )
        return F.gelu(torch.stack([F.linear(h, w, b) for h, w, b in states], dim=1))


class Reduction(nn.Module):
    """Pool the layers, compress the result with an adapter, either or neither.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        pooling: Way in which the layers become one, or None to keep them.
        size: width of a `SharedAdapter` after that, or None to keep the width.
    """

    def __init__(self, layers: int, hidden: int, pooling: Pooling | None, size: int | None) -> None:
        super().__init__()
        self.channels = layers if pooling is None else 1
        self.width = hidden if size is None else size
        self.pooling = None if pooling is None else make_pooling(pooling, layers, hidden)
        self.adapter = None if size is None else SharedAdapter(hidden, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Reduce: (tokens, layers, hidden) → (tokens, channels, width)."""
        if self.pooling is not None:
            hidden_states = self.pooling(hidden_states).unsqueeze(1)
        return hidden_states if self.adapter is None else self.adapter(hidden_states)
