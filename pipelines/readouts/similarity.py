"""Similarity of sentences: pairs by what they are for, and scorers of the vectors of a pair.

The cosine learns nothing. The trained scorer is a softmax regression on [|u − v|; u∗v] of the
vectors of a pair. For relatedness it learns a distribution over the whole scores, whose mean is the
score that it gives (Tai, Socher & Manning 2015, ACL, arXiv:1503.00075); for entailment, the
classes. The loss is the cross entropy against the target distribution, which is their
Kullback-Leibler divergence but for a constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.readouts.batched import (
    Floats,
    Ints,
    Readout,
    train_patiently,
)
from bertvision.pipelines.readouts.inputs import Float32s
from bertvision.pipelines.readouts.options import SimilarityOptions
from bertvision.pipelines.results.columns import grouped
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.similarity import (
    HIGH,
    SIMILARITY,
    SPLIT,
    SimilarityPair,
    SimilarityTask,
    read_similarity,
)
from bertvision.pipelines.tasks.soundness import SplitSoundness, linked, soundness
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.selection import hold_out_items


@dataclass(frozen=True)
class Pairs:
    """Some pairs, as arrays: (pairs,) each."""

    first: Ints
    """Index among the texts."""
    second: Ints
    score: Floats
    label: Ints
    """Index of the judgement of entailment; −1 where nobody was asked."""
    subset: Ints
    """Index among the sub-sets of the data."""

    def __len__(self) -> int:
        return len(self.score)

    @classmethod
    def of(cls, pairs: Sequence[SimilarityPair], subsets: Sequence[str]) -> Pairs:
        """The arrays of pairs.

        Args:
            pairs: Pairs as they were read.
            subsets: Names of the sub-sets of the data.
        """
        return cls(
            np.array([pair.first for pair in pairs], np.int64),
            np.array([pair.second for pair in pairs], np.int64),
            np.array([pair.score for pair in pairs], np.float64),
            np.array([-1 if pair.label is None else pair.label for pair in pairs], np.int64),
            np.array([subsets.index(pair.subset) for pair in pairs], np.int64),
        )


@dataclass(frozen=True)
class SimilarityParts:
    """A data set, its pairs parted."""

    name: str
    classes: Ints
    """Scores that a class of the softmax regression stands for, ascending."""
    subsets: list[str]
    """Names of the sub-sets that there are; of data without any its own name."""
    texts: list[str]
    train: Pairs | None
    """None where the data have no training part."""
    chosen_on: Pairs | None
    """Pairs that epochs and layers are chosen on; None where there are none but the scored."""
    scored: Pairs
    scored_part: str
    """``test``, or ``dev`` of data whose test has no scores."""
    unscored: dict[str, int]
    """Pairs without a score, by sub-set."""
    missing: tuple[str, ...]
    """Sub-sets that are not there."""
    soundness: dict[str, SplitSoundness]
    """Pairs under two scores, and pairs that parts share, whichever sentence comes first."""
    sentences: dict[str, SplitSoundness]
    """The same of single sentences: those of a part that an earlier part has too."""

    @property
    def entailment(self) -> bool:
        """Whether people judged entailment too."""
        return bool((self.scored.label >= 0).all())


def read_parts(dataset: Dataset, dev_fraction: float) -> SimilarityParts:
    """Read a data set and part its pairs.

    ``test`` is scored where there is one, else ``dev``. Epochs are chosen on ``dev``; where that is
    scored itself or missing, on a part of ``train`` that shares no sentence with the rest.

    Args:
        dataset: A data set that was added to the workspace.
        dev_fraction: Part of the training pairs to hold out where it is needed.

    Raises:
        InputError: it is no data set of similarity.
        WorkspaceError: its files changed since it was added.
    """
    if not isinstance(dataset.task, SimilarityTask):
        raise InputError(
            f"{dataset.name or dataset.task.name} has no similarities: the tasks are "
            f"{', '.join(SIMILARITY)}"
        )
    name = dataset.task.name
    data = read_similarity(name, dataset.data[SPLIT].source)
    dataset.check_unchanged(SPLIT, data.sha256)
    parts = grouped(data.pairs, attrgetter("part"))
    scored_part = "test" if "test" in parts else "dev"
    if "dev" not in parts or scored_part == "dev":
        parts |= _held_out(parts.get("train", []), data.texts, dev_fraction)
    subsets = list(dict.fromkeys(pair.subset for pair in data.pairs))
    arrays = {part: Pairs.of(pairs, subsets) for part, pairs in parts.items() if pairs}
    both = {
        part: [(frozenset((p.first, p.second)), p.score) for p in parts[part]] for part in parts
    }
    single = {
        part: [(i, None) for i in sorted({i for p in parts[part] for i in (p.first, p.second)})]
        for part in parts
    }
    return SimilarityParts(
        name=name,
        classes=np.arange(SIMILARITY[name].low, HIGH + 1),
        subsets=subsets,
        texts=[sentence.text for sentence in data.texts],
        train=arrays.get("train"),
        chosen_on=arrays.get("tune" if scored_part == "dev" or "tune" in parts else "dev"),
        scored=arrays[scored_part],  # the reader refuses data without a scored part
        scored_part=scored_part,
        unscored=data.unscored,
        missing=data.missing,
        soundness=soundness(both),
        sentences=soundness(single),
    )


def _held_out(
    train: list[SimilarityPair], texts: Sequence[Sentence], fraction: float
) -> dict[str, list[SimilarityPair]]:
    """``train`` without the part that is held out, and this as ``tune``."""
    names = linked((texts[pair.first].text, texts[pair.second].text) for pair in train)
    rest, tune = hold_out_items(train, fraction, lambda pair: names[texts[pair.first].text], seed=0)
    return {"train": rest, "tune": tune} if rest and tune else {}


def word_overlap(texts: Sequence[str], pairs: Pairs) -> Floats:
    """Words that both sentences of a pair have, as a part of those that either has: (pairs,).

    A word is a run of letters, digits or underscores, in lower case (Jaccard's coefficient of the
    sets of words); of two sentences without any it is 0.
    """
    words = [frozenset(re.findall(r"\w+", text.lower())) for text in texts]
    overlaps = [
        len(words[i] & words[j]) / max(1, len(words[i] | words[j]))
        for i, j in zip(pairs.first, pairs.second, strict=True)
    ]
    return np.array(overlaps, np.float64)


def cosines(vectors: Float32s, pairs: Pairs) -> Floats:
    """u·v / (‖u‖ ‖v‖) of each pair; 0 of a vector of zeros: (pairs,).

    Args:
        vectors: (texts, width)
        pairs: Pairs of these texts.
    """
    long = vectors.astype(np.float64)
    norms = np.linalg.norm(long, axis=1, keepdims=True)
    unit = np.divide(long, norms, out=np.zeros_like(long), where=norms > 0)
    products: Floats = (unit[pairs.first] * unit[pairs.second]).sum(1)
    return products


def pair_features(vectors: Float32s, pairs: Pairs) -> Float32s:
    """[|u − v|; u∗v]: (pairs, 2 · width).

    Args:
        vectors: (texts, width)
        pairs: Pairs of these texts.
    """
    u: Float32s = vectors[pairs.first]
    v: Float32s = vectors[pairs.second]
    features: Float32s = np.concatenate([np.abs(u - v), u * v], axis=1)
    return features


def target_distribution(scores: Floats, classes: Ints) -> Float32s:
    """The two whole scores beside a score, weighted so that their mean is the score.

    Args:
        scores: (pairs,) scores from the first to the last of ``classes``.
        classes: Whole numbers in a row, ascending.

    Returns:
        (pairs, classes), rows of sum 1.
    """
    closeness = 1 - np.abs(scores[:, None] - classes[None])
    target: Float32s = np.clip(closeness, 0, 1).astype(np.float32)
    return target


class Trained(NamedTuple):
    """Several trainings, each at its best epoch."""

    probabilities: Floats
    """(seeds, scored pairs, classes)"""
    dev: list[float]
    """Quality on the pairs that the epoch was chosen on, by seed."""
    epochs: list[int]
    """The chosen epoch, by seed."""


class _Batch(NamedTuple):
    x: Tensor
    """(seeds, batch, width), or (batch, width) the same for all."""
    y: Tensor | None = None
    """(seeds, batch, classes) target distributions, of training pairs."""


class _Regressions(Readout[_Batch]):
    """A softmax regression for each seed, from 0."""

    def __init__(
        self, seeds: int, width: int, classes: int, quality: Callable[[Floats], float]
    ) -> None:
        self.count, self._shape, self._quality = seeds, (width + 1, classes), quality

    def start(self, seed: int) -> list[Tensor]:
        """Weights as those of `torch.nn.Linear`: (seeds, width, classes), (seeds, 1, classes)."""
        bound = 1 / math.sqrt(self._shape[0] - 1)
        randoms = [torch.Generator().manual_seed(seed + i) for i in range(self.count)]
        drawn = [torch.empty(self._shape).uniform_(-bound, bound, generator=r) for r in randoms]
        stacked = torch.stack(drawn)
        return [stacked[:, :-1].clone(), stacked[:, -1:].clone()]

    def losses(self, parameters: list[Tensor], which: Tensor, batch: _Batch) -> tuple[Tensor, int]:
        """Mean cross entropy of the pairs of a batch, as that of one example."""
        assert batch.y is not None
        weight, bias = parameters
        told = torch.baddbmm(bias, batch.x, weight).log_softmax(-1)
        return -(batch.y * told).sum(-1).mean(1), 1

    def scores(self, parameters: list[Tensor], which: Tensor, batch: _Batch) -> tuple[Tensor, int]:
        """Quality of the probabilities of all held-out pairs, as that of one example."""
        values = [self._quality(p) for p in _probabilities(parameters, batch.x)]
        return torch.tensor(values, dtype=torch.float64), 1


def train_scorer(
    features: Sequence[Float32s],
    targets: Float32s,
    quality: Callable[[Floats], float],
    options: SimilarityOptions,
    where: torch.device,
) -> Trained:
    """Train a softmax regression once for each seed, all at once.

    Features are scaled to mean 0 and deviation 1 over the training pairs; one that does not vary
    there becomes 0. A seed decides the initial weights and the order of the pairs.

    Args:
        features: Features of the training pairs, of those that the epoch is chosen on, and of the
            scored, (pairs, width) each.
        targets: (training pairs, classes) distributions.
        quality: Quality of (pairs, classes) probabilities of the second, higher is better.
        options: Settings of the training.
        where: Device that trains.

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
    randoms = [np.random.default_rng([seed, 1]) for seed in range(options.seeds)]

    def batches(epoch: int) -> Iterator[_Batch]:
        order = torch.from_numpy(np.stack([r.permutation(len(x)) for r in randoms])).to(where)
        for rows in order.split(options.batch_size, dim=1):
            yield _Batch(x[rows], y[rows])

    readout = _Regressions(options.seeds, x.shape[1], targets.shape[1], quality)
    held_out = [_Batch(chosen_on)]
    stack = train_patiently(readout, 0, options, where, batches, lambda: held_out)
    return Trained(_probabilities(stack.best, scored), stack.top.tolist(), stack.epochs.tolist())


def _standardised(*parts: Float32s) -> list[Float32s]:
    """Each channel with mean 0 and deviation 1 over the first part."""
    mean = parts[0].mean(0, dtype=np.float64)
    spread = parts[0].std(0, dtype=np.float64)
    varies = spread > 1e-6 * (np.abs(mean) + spread.max(initial=0))
    scale = np.divide(1, spread, out=np.zeros_like(spread), where=varies)
    return [((part - mean) * scale).astype(np.float32) for part in parts]


def _probabilities(parameters: list[Tensor], x: Tensor) -> Floats:
    """(seeds, pairs, classes) float64."""
    weight, bias = parameters
    with torch.inference_mode():
        softmaxed = torch.baddbmm(bias, x.expand(len(weight), -1, -1), weight).double().softmax(-1)
    if not torch.isfinite(softmaxed).all():
        raise NonFiniteError(
            "the trained scorer holds NaN or infinity: lower its learning rate with --lr"
        )
    probabilities: Floats = softmaxed.cpu().numpy()
    return probabilities
