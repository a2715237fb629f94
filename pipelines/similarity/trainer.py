"""The trained scorer: a softmax regression on [|u − v|; u∗v] of the vectors of a pair.

Of relatedness it learns a distribution over the whole scores, whose mean is the score that it
tells (Tai, Socher & Manning 2015, ACL, arXiv:1503.00075); of entailment, the classes. The loss is
the cross entropy against the target distribution, which is their Kullback-Leibler divergence but
for a constant.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import NonFiniteError
from bertvision.pipelines.similarity.data import Floats, Pairs
from bertvision.pipelines.similarity.options import SimilarityOptions

Float32Array = npt.NDArray[np.float32]


class Trained(NamedTuple):
    """What several trainings came to, each at its best epoch."""

    probabilities: Floats
    """(seeds, scored pairs, classes)"""
    dev: list[float]
    """Quality on the pairs that the epoch was chosen on, by seed."""
    epochs: list[int]
    """The chosen epoch, by seed."""


def pair_features(vectors: Float32Array, pairs: Pairs) -> Float32Array:
    """[|u − v|; u∗v]: (pairs, 2 · width).

    Args:
        vectors: (texts, width)
        pairs: of these texts.
    """
    u: Float32Array = vectors[pairs.first]
    v: Float32Array = vectors[pairs.second]
    features: Float32Array = np.concatenate([np.abs(u - v), u * v], axis=1)
    return features


def target_distribution(scores: Floats, classes: npt.NDArray[np.int64]) -> Float32Array:
    """The two whole scores beside a score, weighted so that their mean is the score.

    Args:
        scores: (pairs,) from the first to the last of ``classes``.
        classes: whole numbers in a row, ascending.

    Returns:
        (pairs, classes), rows of sum 1.
    """
    closeness = 1 - np.abs(scores[:, None] - classes[None])
    target: Float32Array = np.clip(closeness, 0, 1).astype(np.float32)
    return target


def train_scorer(
    features: tuple[Float32Array, Float32Array, Float32Array],
    targets: Float32Array,
    quality: Callable[[Floats], float],
    options: SimilarityOptions,
    where: torch.device,
) -> Trained:
    """Train a softmax regression once for each seed, all at once.

    Features are scaled to mean 0 and deviation 1 over the training pairs; one that does not vary
    there becomes 0. A seed decides the initial weights and the order of the pairs.

    Args:
        features: of the training pairs, of those that the epoch is chosen on, and of the scored.
        targets: (training pairs, classes) distributions.
        quality: of (pairs, classes) probabilities of the second, higher is better.
        options: how.
        where: device that trains.

    Raises:
        NonFiniteError: features or scores are NaN or infinite.
    """
    if not all(np.isfinite(part).all() for part in features):
        raise NonFiniteError(
            "hidden states hold NaN or infinity, so that no scorer can be trained on them: "
            "`bertvision store verify` says where they are"
        )
    x, chosen_on, scored = (torch.from_numpy(part).to(where) for part in _standardised(*features))
    y = torch.from_numpy(targets).to(where)
    seeds, classes = range(options.seeds), targets.shape[1]
    weight, bias = _start(seeds, x.shape[1], classes, where)
    optimiser = torch.optim.AdamW([weight, bias], lr=options.lr, weight_decay=options.weight_decay)
    orders = [np.random.default_rng([seed, 1]) for seed in seeds]
    top, best = np.full(len(seeds), -math.inf), np.zeros(len(seeds), np.int64)
    kept = copy.deepcopy((weight.data, bias.data))
    for epoch in range(1, options.epochs + 1):
        order = torch.from_numpy(np.stack([r.permutation(len(x)) for r in orders])).to(where)
        for rows in order.split(options.batch_size, dim=1):
            optimiser.zero_grad(set_to_none=True)
            told = torch.baddbmm(bias, x[rows], weight).log_softmax(-1)
            (-(y[rows] * told).sum(-1).mean(1).sum()).backward()
            optimiser.step()
        found = np.array([quality(p) for p in _probabilities(weight, bias, chosen_on)])
        better = np.flatnonzero((found > top) & (epoch - best <= options.patience))
        for held, now in zip(kept, (weight, bias), strict=True):
            held[better.tolist()] = now.data[better.tolist()]
        top[better], best[better] = found[better], epoch
        if (epoch - best >= options.patience).all():
            break
    return Trained(_probabilities(*kept, scored), top.tolist(), best.tolist())


def _standardised(*parts: Float32Array) -> list[Float32Array]:
    """Each channel with mean 0 and deviation 1 over the first part."""
    mean = parts[0].mean(0, dtype=np.float64)
    deviation = parts[0].std(0, dtype=np.float64)
    varies = deviation > 1e-6 * (np.abs(mean) + deviation.max(initial=0))
    scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=varies)
    return [((part - mean) * scale).astype(np.float32) for part in parts]


def _start(
    seeds: range, width: int, classes: int, where: torch.device
) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Weights as those of `torch.nn.Linear`: (seeds, width, classes) and (seeds, 1, classes)."""
    bound = 1 / math.sqrt(width)
    drawn = [
        torch.empty(width + 1, classes).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(seed)
        )
        for seed in seeds
    ]
    stacked = torch.stack(drawn).to(where)
    return torch.nn.Parameter(stacked[:, :-1].clone()), torch.nn.Parameter(stacked[:, -1:].clone())


def _probabilities(weight: Tensor, bias: Tensor, x: Tensor) -> Floats:
    """(seeds, pairs, classes) float64."""
    with torch.inference_mode():
        found = torch.baddbmm(bias, x.expand(len(weight), -1, -1), weight).double().softmax(-1)
    if not torch.isfinite(found).all():
        raise NonFiniteError(
            "the trained scorer holds NaN or infinity: lower its learning rate with --lr"
        )
    probabilities: Floats = found.cpu().numpy()
    return probabilities
