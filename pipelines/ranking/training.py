"""Training of scorers on pairs of a positive and a negative passage of the same question."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from bertvision.errors import InputError
from bertvision.pipelines.ranking.metrics import Candidates, Floats, Ints, score_questions
from bertvision.pipelines.ranking.options import RankOptions, ScorerName
from bertvision.pipelines.ranking.scorers import Scorer, make_scorer

_ELEMENTS = 1 << 23  # of the vectors gathered at once in scoring: 32 MB, and some copies


class Vectors(NamedTuple):
    """The texts' vectors with each of several inputs."""

    queries: Tensor
    """(inputs, queries, width) float32."""
    passages: Tensor
    """(inputs, passages, width) float32."""

    def take(self, inputs: list[int]) -> Vectors:
        """Those of some inputs."""
        return Vectors(self.queries[inputs], self.passages[inputs])


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
        name: of the scorer; ``cosine`` has nothing to learn and comes back as it is.
        vectors: of all texts.
        candidates: ``train``, which is learned from, and ``dev``, which the epoch is chosen on.
        training: how.
        seed: of the initial weights, the order of the questions and the dropout.

    Raises:
        InputError: no question of train has both a positive and a negative passage, or none of dev
            has a positive one.
        NonFiniteError: the scores became NaN or infinite.
    """
    inputs, _, width = vectors.queries.shape
    scorer = make_scorer(name, inputs, width, seed).to(vectors.queries.device)
    parameters = list(scorer.parameters())
    if not parameters:
        return Trained(scorer, [0] * inputs, [[] for _ in range(inputs)])
    questions, dev = _Questions(candidates["train"]), candidates["dev"]
    optimiser = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=training.weight_decay)
    best = [_dev_map(scorer, vectors, dev)]
    top, chosen = best[0].copy(), np.zeros(inputs, np.int64)
    kept = copy.deepcopy(scorer.state_dict())
    for epoch in range(1, training.epochs + 1):
        running = epoch - chosen <= training.patience
        if not running.any():
            break
        scorer.train()
        for batch in questions.batches(training.batch_size, (seed, epoch), vectors.queries.device):
            optimiser.zero_grad(set_to_none=True)
            scores = scorer(vectors.queries, vectors.passages, batch.query, batch.passage)
            hinge_loss(scores, batch, training.margin).sum().backward()
            optimiser.step()
        best.append(_dev_map(scorer, vectors, dev))
        better = np.flatnonzero(running & (best[-1] > top))
        for key, value in scorer.state_dict().items():
            kept[key][better.tolist()] = value[better.tolist()]
        top[better], chosen[better] = best[-1][better], epoch
    scorer.load_state_dict(kept)
    last = np.minimum(chosen + training.patience, len(best) - 1)
    curves = [[float(m[i]) for m in best[: last[i] + 1]] for i in range(inputs)]
    return Trained(scorer.eval(), chosen.tolist(), curves)


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
    found: npt.NDArray[np.float32] = torch.cat(blocks, 1).numpy()
    return found


def hinge_loss(scores: Tensor, batch: Batch, margin: float) -> Tensor:
    """Σ weight · max(0, margin − s⁺ + s⁻), over the pairs of a batch.

    Args:
        scores: (inputs, candidates).
        batch: whose candidates they are.
        margin: see `RankOptions`.

    Returns:
        (inputs,).
    """
    short = margin - scores[:, batch.positive] + scores[:, batch.negative]
    return (functional.relu(short) * batch.weight).sum(-1)


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


def _dev_map(scorer: Scorer, vectors: Vectors, dev: Candidates) -> Floats:
    """MAP on dev of each input in per cent: (inputs,)."""
    scores = score_questions(score(scorer, vectors, dev), dev.label, dev.question, dev.tie)
    if not scores.ap.shape[-1]:
        raise InputError(
            f"none of {len(dev.questions):,} dev questions has a positive passage: no epoch can be "
            "chosen; rank with cosine, which learns nothing"
        )
    mean: Floats = 100 * scores.ap.mean(-1)
    return mean
