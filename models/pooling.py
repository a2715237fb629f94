"""One vector per token from the hidden states of all layers."""

from __future__ import annotations

import math
from typing import Literal

import torch
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
