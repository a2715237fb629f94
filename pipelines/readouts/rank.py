"""Rankers of candidate passages: scorers of two vectors, and their training on pairs.

Every scorer works with several inputs at once, such as the layers of an encoder: its parameters
have a leading index, and what is at one index never meets what is at another.

The scorers are those of Ma et al. 2019 (arXiv:1910.07973): the cosine; the bilinear form uᵀWv; a
linear layer (``logistic``) or a perceptron with one hidden layer (``mlp``) on [u; v; u∗v; |u − v|],
or on [u; v] alone. A linear layer on [u; v] gives wᵤ·u + wᵥ·v, where the first term is the same for
all candidates of a question: it can learn what answers look like, not which question they answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bertvision.errors import InputError
from bertvision.pipelines.readouts.batched import (
    Floats,
    Ints,
    Readout,
    standard_scale,
    train_patiently,
)
from bertvision.pipelines.readouts.options import SCORERS, RankOptions, ScorerName
from bertvision.pipelines.readouts.rank_metrics import Candidates, score_questions

HIDDEN = 64
"""Width of the hidden layer of ``mlp``."""
DROPOUT = 0.5
"""Dropout of its hidden layer, in training."""
_ELEMENTS = 1 << 23  # of the vectors gathered at once in scoring: 32 MB, and some copies


class Vectors(NamedTuple):
    """The texts' vectors with each of several inputs."""

    queries: Tensor
    """(inputs, queries, width) float32."""
    passages: Tensor
    """(inputs, passages, width) float32."""

    def take(self, inputs: list[int]) -> Vectors:
        """The vectors of some inputs."""
        return Vectors(self.queries[inputs], self.passages[inputs])


def scaled(vectors: Vectors, scorer: ScorerName, train: Candidates | None) -> Vectors:
    """The vectors on the scale that a scorer reads them on.

    ``cosine`` is indifferent to length. ``bilinear`` reads vectors of length 1, so that it begins
    as the cosine. The others read each channel with mean 0 and deviation 1 over the distinct
    queries, and likewise the distinct passages, of the training data: products and differences of
    channels of very different sizes, as BERT's are, would leave most of them without a part. A
    channel that does not vary there becomes 0.

    Args:
        vectors: Vectors as they are stored.
        scorer: Name of the scorer.
        train: The training data; None only for a scorer that learns nothing.
    """
    if scorer == "cosine" or train is None:
        return vectors
    if scorer == "bilinear":
        return Vectors(*(nn.functional.normalize(v, dim=-1) for v in vectors))
    both = zip(vectors, (train.query, train.passage), strict=True)
    return Vectors(*(_standard(values, torch.from_numpy(rows).unique()) for values, rows in both))


def _standard(values: Tensor, rows: Tensor) -> Tensor:
    """(inputs, texts, width) with mean 0 and deviation 1 of each channel over some rows."""
    mean, scale = standard_scale(values.transpose(0, 1), rows.to(values.device), 1e-6)
    return (values - mean) * scale


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

    The parameters are W − I, so that weight decay pulls towards the dot product, not to zero.
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
    """Number of features of a pair of vectors of this width."""
    return features(torch.zeros(width), torch.zeros(width)).shape[-1]


def make_scorer(name: ScorerName, inputs: int, width: int, seed: int) -> Scorer:
    """A scorer at its start.

    Args:
        name: Name of the scorer, one of `SCORERS`.
        inputs: Number of inputs that it scores with at once.
        width: Length of a vector.
        seed: Seed of the initial weights, where they are random.

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


class Trained(NamedTuple):
    """A scorer at the best epoch of each input, and how it got there."""

    scorer: Scorer
    epochs: list[int]
    """Best epoch of each input; 0 is the start."""
    curves: list[list[float]]
    """MAP on dev of each input in per cent, after each of its epochs, from epoch 0."""


class Batch(NamedTuple):
    """Some questions with all their candidates."""

    query: Tensor
    """(candidates,) rows of the queries' vectors."""
    passage: Tensor
    """(candidates,) rows of the passages' vectors."""
    positive: Tensor
    """(pairs,) candidate of the batch that answers."""
    negative: Tensor
    """(pairs,) candidate of the same question that does not."""
    weight: Tensor
    """(pairs,) such that questions weigh alike, and those of the batch sum to 1."""


class _Rankers(Readout[Batch | Candidates]):
    """A scorer with all inputs, whose own parameters are trained.

    Attributes:
        curve: (inputs,) MAP on dev in per cent at each look.
    """

    def __init__(self, scorer: Scorer, vectors: Vectors, margin: float) -> None:
        self.count, self.curve = len(vectors.queries), list[Floats]()
        self._scorer, self._vectors, self._margin = scorer, vectors, margin

    def start(self, seed: int) -> list[Tensor]:
        """The parameters of the scorer, which was made from the seed."""
        return list(self._scorer.parameters())

    def losses(
        self, parameters: list[Tensor], which: Tensor, batch: Batch | Candidates
    ) -> tuple[Tensor, int]:
        """Mean hinge loss of the questions of a batch, as that of one example."""
        assert isinstance(batch, Batch)
        self._scorer.train()
        scores = self._scorer(*self._vectors, batch.query, batch.passage)
        return hinge_loss(scores, batch, self._margin), 1

    def scores(
        self, parameters: list[Tensor], which: Tensor, batch: Batch | Candidates
    ) -> tuple[Tensor, int]:
        """MAP of the questions of dev in per cent, as that of one example."""
        assert isinstance(batch, Candidates)
        scores = score(self._scorer, self._vectors, batch)
        ap = score_questions(scores, batch.label, batch.question, batch.tie).ap
        if not ap.shape[-1]:
            raise InputError(
                f"none of {len(batch.questions):,} dev questions has a positive passage: no epoch "
                "can be chosen; rank with cosine, which learns nothing"
            )
        self.curve.append(100 * ap.mean(-1))
        return torch.from_numpy(self.curve[-1]), 1


def train(
    name: ScorerName,
    vectors: Vectors,
    candidates: Mapping[str, Candidates],
    training: RankOptions,
    *,
    seed: int = 0,
) -> Trained:
    """Train a scorer with all inputs at once; keep the epoch of each input that is best on dev.

    Each input stops by itself: what it learns after its patience is spent does not count. The
    result is that of training each input alone, up to the rounding of a batched product.

    Args:
        name: Name of the scorer; ``cosine`` has nothing to learn and comes back as it is.
        vectors: Vectors of all texts.
        candidates: ``train``, which is learned from, and ``dev``, which the epoch is chosen on.
        training: Settings of the training.
        seed: Seed of the initial weights, the order of the questions and the dropout.

    Raises:
        InputError: no question of train has both a positive and a negative passage, or none of dev
            has a positive one.
        NonFiniteError: the scores became NaN or infinite.
    """
    inputs, _, width = vectors.queries.shape
    device = vectors.queries.device
    scorer = make_scorer(name, inputs, width, seed).to(device)
    if not list(scorer.parameters()):
        return Trained(scorer, [0] * inputs, [[] for _ in range(inputs)])
    questions = _Questions(candidates["train"])
    rankers = _Rankers(scorer, vectors, training.margin)
    dev = [candidates["dev"]]

    def batches(epoch: int) -> Iterator[Batch]:
        return questions.batches(training.batch_size, (seed, epoch), device)

    stack = train_patiently(rankers, seed, training, device, batches, lambda: dev, from_start=True)
    with torch.no_grad():
        for parameter, best in zip(scorer.parameters(), stack.best, strict=True):
            parameter.copy_(best)
    chosen, curve = stack.epochs.tolist(), rankers.curve
    curves = [
        [float(at[i]) for at in curve[: epoch + training.patience + 1]]
        for i, epoch in enumerate(chosen)
    ]
    return Trained(scorer.eval(), chosen, curves)


def score(scorer: Scorer, vectors: Vectors, candidates: Candidates) -> npt.NDArray[np.float32]:
    """Scores of all candidates, without dropout: (inputs, pairs) float32."""
    inputs, _, width = vectors.queries.shape
    at_once = max(1, _ELEMENTS // (4 * inputs * width))
    device = vectors.queries.device
    query, passage = (
        torch.from_numpy(a).to(device) for a in (candidates.query, candidates.passage)
    )
    scorer.eval()
    with torch.inference_mode():
        blocks = [
            scorer(*vectors, query[at : at + at_once], passage[at : at + at_once]).cpu()
            for at in range(0, len(candidates), at_once)
        ]
    scores: npt.NDArray[np.float32] = torch.cat(blocks, 1).numpy()
    return scores


def hinge_loss(scores: Tensor, batch: Batch, margin: float) -> Tensor:
    """Σ weight · max(0, margin − s⁺ + s⁻), over the pairs of a batch.

    Args:
        scores: (inputs, candidates)
        batch: Batch with these candidates.
        margin: Margin of `RankOptions`.

    Returns:
        (inputs,).
    """
    short = margin - scores[:, batch.positive] + scores[:, batch.negative]
    return (nn.functional.relu(short) * batch.weight).sum(-1)


class _Questions:
    """The questions that have something to compare: a positive and a negative passage."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        order = np.argsort(candidates.question, kind="stable")
        rows = np.split(order, np.cumsum(np.bincount(candidates.question))[:-1])
        self.rows = [r for r in rows if 0 < candidates.label[r].sum() < len(r)]
        if not self.rows:
            raise InputError(
                f"none of {len(rows):,} training questions has both a positive and a negative "
                "passage: there is nothing to learn from; rank with cosine, which learns nothing"
            )

    def batches(self, size: int, seed: tuple[int, int], device: torch.device) -> Iterator[Batch]:
        """All questions in a seeded order, ``size`` to a batch."""
        order = np.random.default_rng(seed).permutation(len(self.rows))
        for begin in range(0, len(order), size):
            yield self._batch([self.rows[i] for i in order[begin : begin + size]], device)

    def _batch(self, rows: list[Ints], device: torch.device) -> Batch:
        positive, negative, weight = [], [], []
        begin = 0
        for row in rows:
            label = self.candidates.label[row]
            yes, no = np.flatnonzero(label == 1), np.flatnonzero(label == 0)
            positive.append(begin + np.repeat(yes, len(no)))
            negative.append(begin + np.tile(no, len(yes)))
            pairs = len(yes) * len(no)
            weight.append(np.full(pairs, 1 / (pairs * len(rows)), np.float32))
            begin += len(row)
        taken = np.concatenate(rows)
        arrays = (
            self.candidates.query[taken],
            self.candidates.passage[taken],
            *(np.concatenate(parts) for parts in (positive, negative, weight)),
        )
        return Batch(*(torch.from_numpy(array).to(device) for array in arrays))
