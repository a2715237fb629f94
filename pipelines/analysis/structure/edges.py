"""Edge probes: parts of speech and relations, told from a mix of layers.

Tenney et al. (2019), *BERT Rediscovers the Classical NLP Pipeline* and *What do you learn from
context?*: a classifier reads γ Σ_l s_l h_l, with weights s = softmax(a) that are learned with it
(equation 1 of the former). Here a span is one word, its vector the mean of its tokens; of an arc
those of the head and of the dependent stand end to end. The classifier has one hidden layer with
tanh, or none.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bertvision.pipelines.analysis.structure.gold import Floats, Ints
from bertvision.pipelines.analysis.structure.probes import Probes
from bertvision.pipelines.analysis.structure.states import Batch
from bertvision.pipelines.tasks.trees.conllu import ParsedSentence

UNKNOWN = -1
"""Class of a label that training has not: never told, never learned."""


class EdgeProbes(Probes):
    """Classifiers on mixes: first of each layer alone, then of the layers up to each but the first.

    Attributes:
        classes: names of the classes, in the order of their logits.
        allowed: (probes, layers) which layers each mixes.
    """

    words: int
    """How many words a label is of."""

    def __init__(self, layers: int, hidden: int, units: int, classes: Sequence[str]) -> None:
        """Two probes for each layer but the first, which has one.

        Args:
            layers: how many are read.
            hidden: their width.
            units: of the hidden layer of the classifier; 0 for none.
            classes: names of the classes.
        """
        self.classes, self._units = tuple(classes), units
        self._width = self.words * hidden
        self._number = {name: i for i, name in enumerate(classes)}
        upto = torch.ones(layers, layers).tril().bool()
        self.allowed = torch.cat([torch.eye(layers).bool(), upto[1:]])
        self.count = len(self.allowed)

    def start(self, seed: int) -> list[Tensor]:
        """Uniform weights of the layers, γ = 1, and a classifier that starts as torch's do."""
        random = torch.Generator().manual_seed(seed)
        mix = torch.zeros(self.allowed.shape)
        parameters = [mix, torch.ones(self.count, 1, 1)]
        sizes = [self._width, *([self._units] if self._units else []), len(self.classes)]
        for inner, outer in zip(sizes, sizes[1:], strict=False):
            bound = 1 / math.sqrt(inner)
            for shape in ((inner, outer), (1, outer)):
                drawn = torch.empty(shape).uniform_(-bound, bound, generator=random)
                parameters.append(drawn.expand(self.count, *shape).clone())
        return parameters

    def losses(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """Cross entropy in nats, summed over the labels that training has."""
        label = self._labels(batch)
        known = np.flatnonzero(label != UNKNOWN)
        if not len(known):
            return parameters[0].sum(1) * 0, 0
        scores = self._logits(parameters, which, batch, known)
        gold = torch.from_numpy(label[known]).to(scores.device)
        likely = scores.log_softmax(-1).gather(-1, gold.expand(len(which), -1).unsqueeze(-1))
        return -likely.squeeze(-1).sum(1), len(known)

    def right(self, parameters: list[Tensor], batch: Batch) -> Ints:
        """How many labels of each sentence all probes tell.

        Args:
            parameters: of all probes.
            batch: sentences.

        Returns:
            (probes, sentences)
        """
        label, sizes = self._labels(batch), [len(self.labels(s)) for s in batch.sentences]
        sentence = np.repeat(np.arange(len(sizes)), sizes)
        found = np.zeros((self.count, len(sizes)), np.int64)
        if len(label):
            which = torch.arange(self.count, device=batch.states.device)
            scores = self._logits(parameters, which, batch, np.arange(len(label)))
            hit = scores.argmax(-1).cpu().numpy() == label
            for row, told in zip(found, hit, strict=True):
                row += np.bincount(sentence[told], minlength=len(sizes))
        return found

    def weights(self, mix: Tensor, which: Tensor | None = None) -> Tensor:
        """(some, layers) the share of each layer in the mixes.

        Args:
            mix: (some, layers) what is learned.
            which: (some,) numbers of the probes; all by default.
        """
        allowed = self.allowed.to(mix.device)
        allowed = allowed if which is None else allowed[which]
        return mix.masked_fill(~allowed, -torch.inf).softmax(-1)

    @staticmethod
    @abstractmethod
    def labels(sentence: ParsedSentence) -> tuple[str, ...]:
        """The labels of a sentence, in the order of its words."""

    @abstractmethod
    def _inputs(self, mixed: Tensor, batch: Batch, rows: Ints) -> Tensor:
        """What the classifier reads.

        Args:
            mixed: (some, words, hidden)
            batch: whose words they are.
            rows: numbers of some labels of the batch.

        Returns:
            (some, rows, width)
        """

    def _labels(self, batch: Batch) -> Ints:
        named = (name for sentence in batch.sentences for name in self.labels(sentence))
        return np.array([self._number.get(name, UNKNOWN) for name in named], np.int64)

    def _logits(self, parameters: list[Tensor], which: Tensor, batch: Batch, rows: Ints) -> Tensor:
        """Scores of the classes, (some, rows, classes)."""
        mix, gamma, *classifier = parameters
        shares = self.weights(mix, which)
        layers, words, hidden = batch.states.shape
        mixed = (shares @ batch.states.reshape(layers, -1)).reshape(-1, words, hidden)
        x = self._inputs(gamma * mixed, batch, rows)
        for i in range(0, len(classifier), 2):
            x = torch.baddbmm(classifier[i + 1], x.tanh() if i else x, classifier[i])
        return x


class UposProbes(EdgeProbes):
    """The universal part of speech of a word."""

    words = 1

    @staticmethod
    def labels(sentence: ParsedSentence) -> tuple[str, ...]:
        """Those of all words."""
        return sentence.upos

    def _inputs(self, mixed: Tensor, batch: Batch, rows: Ints) -> Tensor:
        return mixed[:, torch.from_numpy(rows).to(mixed.device)]


class RelationProbes(EdgeProbes):
    """The relation of an arc, of which head and dependent are given."""

    words = 2

    @staticmethod
    def labels(sentence: ParsedSentence) -> tuple[str, ...]:
        """Those of all words but the root, which hangs on none."""
        both = zip(sentence.relations, sentence.heads, strict=True)
        return tuple(relation for relation, head in both if head)

    def _inputs(self, mixed: Tensor, batch: Batch, rows: Ints) -> Tensor:
        ends, begin = [], 0
        for sentence in batch.sentences:
            ends += [(begin + h - 1, begin + i) for i, h in enumerate(sentence.heads) if h]
            begin += len(sentence.words)
        places = torch.tensor(ends, device=mixed.device)[torch.from_numpy(rows)]
        return torch.cat([mixed[:, places[:, 0]], mixed[:, places[:, 1]]], -1)


def centre_of_gravity(weights: Floats, layers: Sequence[int]) -> Floats:
    """Σ l · s_l (Tenney et al. 2019, equation 2).

    Args:
        weights: (…, layers) shares s_l, which sum to 1.
        layers: their numbers l.

    Returns:
        (…,); the mean of the numbers where the shares are uniform.
    """
    found: Floats = weights @ np.asarray(layers, np.float64)
    return found


def expected_layer(scores: Floats, layers: Sequence[int]) -> Floats:
    """Σ l · Δ_l / Σ Δ_l, with Δ_l what layer l adds (Tenney et al. 2019, equations 3 and 4).

    Where a layer takes from the score, Δ is negative, and the result may lie outside of the layers.

    Args:
        scores: (…, layers) of probes of all layers up to each.
        layers: their numbers l.

    Returns:
        (…,); NaN where the last score is not above the first.
    """
    gains = np.diff(scores, axis=-1)
    total = gains.sum(axis=-1)
    weighted = gains @ np.asarray(layers[1:], np.float64)
    found: Floats = np.divide(weighted, total, out=np.full_like(total, np.nan), where=total > 0)
    return found
