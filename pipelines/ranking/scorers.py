"""What scores a passage for a question, from the vectors u and v of both.

Every module scores with several inputs at once, such as the layers of an encoder: its parameters
have a leading index, and what is at one index never meets what is at another. Trained together on
the sum of their losses they learn exactly what each would learn alone, as Adam is element-wise.

The scorers are those of Ma et al. 2019 (arXiv:1910.07973): the cosine; the bilinear form uᵀWv; a
linear layer (``logistic``) or a perceptron with one hidden layer (``mlp``) on [u; v; u∗v; |u − v|],
or on [u; v] alone. A linear layer on [u; v] gives wᵤ·u + wᵥ·v, where the first term is the same for
all candidates of a question: it can learn what answers look like, not which question they answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bertvision.errors import InputError
from bertvision.pipelines.ranking.options import SCORERS, ScorerName

HIDDEN = 64
"""Width of the hidden layer of ``mlp``."""
DROPOUT = 0.5
"""Dropout of its hidden layer, in training."""


class Scorer(nn.Module, ABC):
    """Scores pairs of a query and a passage with each of several inputs."""

    @abstractmethod
    def score(self, u: Tensor, v: Tensor) -> Tensor:
        """Score pairs.

        Args:
            u: (inputs, pairs, width) vectors of the queries.
            v: (inputs, pairs, width) vectors of the passages.

        Returns:
            (inputs, pairs), higher is better.
        """

    def forward(self, queries: Tensor, passages: Tensor, query: Tensor, passage: Tensor) -> Tensor:
        """Score pairs that are given by their rows.

        Args:
            queries: (inputs, queries, width).
            passages: (inputs, passages, width).
            query: (pairs,) rows of ``queries``.
            passage: (pairs,) rows of ``passages``.

        Returns:
            (inputs, pairs).
        """
        return self.score(queries[:, query], passages[:, passage])


class Cosine(Scorer):
    """u·v / (‖u‖ ‖v‖); nothing is learned. A vector of zeros scores 0."""

    def score(self, u: Tensor, v: Tensor) -> Tensor:
        """See `Scorer.score`."""
        return nn.functional.cosine_similarity(u, v, dim=-1)


class Bilinear(Scorer):
    """uᵀWv, with W = I at the start, which is the dot product.

    What is learned is W − I, so that weight decay pulls towards the dot product, not to zero.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.change = nn.Parameter(torch.zeros(inputs, width, width))

    @property
    def weight(self) -> Tensor:
        """W: (inputs, width, width)."""
        return self.change + torch.eye(self.change.shape[-1], device=self.change.device)

    def score(self, u: Tensor, v: Tensor) -> Tensor:
        """See `Scorer.score`."""
        return ((u @ self.weight) * v).sum(-1)

    def forward(self, queries: Tensor, passages: Tensor, query: Tensor, passage: Tensor) -> Tensor:
        """See `Scorer.forward`; a query goes through W once, not once for each candidate."""
        rows, place = query.unique(return_inverse=True)
        projected = queries[:, rows] @ self.weight
        return (projected[:, place] * passages[:, passage]).sum(-1)


class Logistic(Scorer):
    """A linear layer on the features of a pair; 0 at the start."""

    def __init__(self, inputs: int, width: int, features: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.zeros(inputs, feature_width(features, width), 1))

    def score(self, u: Tensor, v: Tensor) -> Tensor:
        """See `Scorer.score`. No bias: it is the same for all candidates of a question."""
        return (self.features(u, v) @ self.weight).squeeze(-1)


class Perceptron(Scorer):
    """One hidden layer of `HIDDEN` ReLU units with dropout, on the features of a pair.

    Every input starts from the same draw of the generator, as it would alone.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        features: Callable[[Tensor, Tensor], Tensor],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.features = features
        self.generator = generator
        wide = feature_width(features, width)
        first = torch.randn(wide, HIDDEN, generator=generator) * math.sqrt(2 / wide)  # He et al.
        second = torch.randn(HIDDEN, 1, generator=generator) * math.sqrt(1 / HIDDEN)
        self.first = nn.Parameter(first.repeat(inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(inputs, 1, HIDDEN))
        self.second = nn.Parameter(second.repeat(inputs, 1, 1))

    def score(self, u: Tensor, v: Tensor) -> Tensor:
        """See `Scorer.score`."""
        hidden = torch.relu(torch.baddbmm(self.bias, self.features(u, v), self.first))
        if self.training:
            # one mask for all inputs, so that an input meets what it would meet alone
            keep = torch.rand(hidden.shape[1:], generator=self.generator) >= DROPOUT
            hidden = hidden * keep.to(hidden.device) / (1 - DROPOUT)
        return (hidden @ self.second).squeeze(-1)


def concatenated(u: Tensor, v: Tensor) -> Tensor:
    """[u; v]: (…, 2 · width)."""
    return torch.cat([u, v], -1)


def with_interactions(u: Tensor, v: Tensor) -> Tensor:
    """[u; v; u∗v; |u − v|]: (…, 4 · width)."""
    return torch.cat([u, v, u * v, (u - v).abs()], -1)


def feature_width(features: Callable[[Tensor, Tensor], Tensor], width: int) -> int:
    """How many features a pair of vectors of this width has."""
    return features(torch.zeros(width), torch.zeros(width)).shape[-1]


def make_scorer(name: ScorerName, inputs: int, width: int, seed: int) -> Scorer:
    """A scorer at its start.

    Args:
        name: one of `SCORERS`.
        inputs: how many it scores with at once.
        width: of a vector.
        seed: of the initial weights, where they are random.

    Raises:
        InputError: there is no such scorer.
    """
    features = concatenated if name.endswith("-uv") else with_interactions
    match name.removesuffix("-uv"):
        case "cosine":
            return Cosine()
        case "bilinear":
            return Bilinear(inputs, width)
        case "logistic":
            return Logistic(inputs, width, features)
        case "mlp":
            return Perceptron(inputs, width, features, torch.Generator().manual_seed(seed))
    raise InputError(f"{name!r} is no scorer: there are {', '.join(SCORERS)}")
