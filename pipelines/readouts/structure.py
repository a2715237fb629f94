"""Probes of trees: structural probes and edge probes of every layer, trained from one stream.

A structural probe is a linear map under which squared distances and norms are those of a tree
(Hewitt & Manning 2019, *A Structural Probe for Finding Syntax in Word Representations*, equations 1
to 3). The distance probe learns B such that ‖B(h_i − h_j)‖² is the number of edges between two
words, the depth probe one such that ‖B h_i‖² is the depth of a word.

Edge probes tell parts of speech and relations from a mix of layers (Tenney et al. 2019, *BERT
Rediscovers the Classical NLP Pipeline* and *What do you learn from context?*): a classifier reads
γ Σ_l s_l h_l, with weights s = softmax(a) that are learned with it (equation 1 of the former). Here
a span is one word, its vector the mean of its tokens; of an arc those of the head and of the
dependent stand end to end. The classifier has one hidden layer with tanh, or none.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertvision.errors import InputError
from bertvision.pipelines.precision import device
from bertvision.pipelines.readouts.batched import (
    EarlyStopping,
    Floats,
    Ints,
    Readout,
    Stack,
    StackedAdam,
)
from bertvision.pipelines.readouts.batched import train as train_batched
from bertvision.pipelines.readouts.options import (
    Baseline,
    StructureOptions,
    SyntaxMetric,
)
from bertvision.pipelines.readouts.trees import (
    LONGEST,
    SHORTEST,
    Batch,
    ByLength,
    Gold,
    Share,
    TreeStates,
    chain,
    depths,
    distance_correlation,
    distances,
    finds_root,
    n_edges,
    random_tree,
    rank_correlation,
    right_edges,
)
from bertvision.pipelines.tasks.treebank import ParsedSentence

Array = npt.NDArray[Any]
Name = TypeVar("Name", bound=str)
RANDOM_TREES = 10
"""Random trees of each sentence; scores are their means."""
UNKNOWN = -1
"""Class of a label that training has not: never told, never learned."""
_START = 0.05  # weights start uniform in ± this, as in the authors' code
_MISSES = 4  # epochs without a new minimum of the loss on dev that end a training
_BETTER = 1e-4  # by how much a loss must fall to be a new minimum, as in the authors' code


class StructuralProbes(Readout[Batch]):
    """Base of distance and depth probes: a projection of each layer."""

    def __init__(self, layers: int, hidden: int, rank: int) -> None:
        """One probe for each layer.

        Args:
            layers: Number of layers that are read.
            hidden: Width of a hidden state.
            rank: Number of rows of B, at most ``hidden``.
        """
        self.count, self._shape = layers, (hidden, min(rank, hidden))

    def start(self, seed: int) -> list[Tensor]:
        """See `Readout`."""
        random = torch.Generator().manual_seed(seed)
        weight = torch.empty(self._shape).uniform_(-_START, _START, generator=random)
        return [weight.expand(self.count, *self._shape).clone()]

    def losses(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The L1 loss of each sentence, divided by its number of pairs or words, summed."""
        predictions = self.predicted(parameters, which, batch)
        target, weight = np.zeros((2, *predictions.shape[1:]), np.float32)
        for i, values in enumerate(self._gold(batch)):
            part = (i, *(slice(n) for n in values.shape))
            target[part] = values
            weight[part] = 1 / values.size
        gold, share = (torch.from_numpy(x).to(predictions.device) for x in (target, weight))
        loss = ((predictions - gold).abs() * share).flatten(1).sum(1)
        return loss, len(batch.sentences)

    @abstractmethod
    def predicted(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """Distances or depths of the sentences, padded to the longest; see `losses`."""

    @abstractmethod
    def _gold(self, batch: Batch) -> Sequence[Array]:
        """Distances or depths in the tree of each sentence."""

    def by_sentence(self, parameters: list[Tensor], batch: Batch) -> list[Array]:
        """Predictions of all probes for each sentence: (probes, words) or (probes, words, words).

        They are rounded to four decimals of an edge: distances that are equal in the tree, and but
        for float32 in its embedding, are to have the same rank.

        Args:
            parameters: Parameters of all probes.
            batch: Sentences.
        """
        which = torch.arange(self.count, device=batch.states.device)
        predictions = self.predicted(parameters, which, batch).cpu().numpy().round(4)
        parts: list[Any] = [
            (slice(None), i, *map(slice, values.shape))
            for i, values in enumerate(self._gold(batch))
        ]
        return [predictions[part] for part in parts]

    def _projected(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """(some, sentences, longest, rank) projected words; behind the last of a sentence zeros."""
        states = batch.states if len(which) == self.count else batch.states[which]
        words = torch.bmm(states, parameters[0]).transpose(0, 1)
        return pad_sequence(words.split(batch.lengths), batch_first=True).permute(2, 0, 1, 3)


class DistanceProbes(StructuralProbes):
    """Squared distances of words are edges between them."""

    def predicted(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """Distances, (some, sentences, longest, longest)."""
        x = self._projected(parameters, which, batch)
        # moved near the origin, so that little is lost where squares of norms cancel
        words = torch.tensor(batch.lengths, device=x.device).view(-1, 1, 1)
        x = x - x.detach().sum(dim=2, keepdim=True) / words
        squares = (x * x).sum(-1)
        between = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * x @ x.transpose(-1, -2)
        return between.clamp(min=0)

    def _gold(self, batch: Batch) -> Sequence[Array]:
        return [gold.distances for gold in batch.golds]


class DepthProbes(StructuralProbes):
    """Squared norms of words are their depths."""

    def predicted(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """Depths, (some, sentences, longest)."""
        return self._projected(parameters, which, batch).square().sum(-1)

    def _gold(self, batch: Batch) -> Sequence[Array]:
        return [gold.depths for gold in batch.golds]


class EdgeProbes(Readout[Batch]):
    """Classifiers on mixes: first of each layer alone, then of the layers up to each but the first.

    Attributes:
        classes: Names of the classes, in the order of their logits.
        allowed: (probes, layers) whether each mixes a layer.
    """

    words: int
    """Number of words that a label is of."""

    def __init__(self, layers: int, hidden: int, units: int, classes: Sequence[str]) -> None:
        """Two probes for each layer but the first, which has one.

        Args:
            layers: Number of layers that are read.
            hidden: Width of a hidden state.
            units: Units of the hidden layer of the classifier; 0 for none.
            classes: Names of the classes.
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
        """Number of labels of each sentence that each probe gets right.

        Args:
            parameters: Parameters of all probes.
            batch: Sentences.

        Returns:
            (probes, sentences)
        """
        label, sizes = self._labels(batch), [len(self.labels(s)) for s in batch.sentences]
        sentence = np.repeat(np.arange(len(sizes)), sizes)
        right = np.zeros((self.count, len(sizes)), np.int64)
        if len(label):
            which = torch.arange(self.count, device=batch.states.device)
            scores = self._logits(parameters, which, batch, np.arange(len(label)))
            hit = scores.argmax(-1).cpu().numpy() == label
            for row, told in zip(right, hit, strict=True):
                row += np.bincount(sentence[told], minlength=len(sizes))
        return right

    def weights(self, mix: Tensor, which: Tensor | None = None) -> Tensor:
        """(some, layers) the share of each layer in the mixes.

        Args:
            mix: (some, layers) parameters of the mix.
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
        """The vectors that the classifier reads.

        Args:
            mixed: (some, words, hidden) mixes of layers.
            batch: Batch with these words.
            rows: Numbers of some labels of the batch.

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
        """The labels of all words."""
        return sentence.upos

    def _inputs(self, mixed: Tensor, batch: Batch, rows: Ints) -> Tensor:
        return mixed[:, torch.from_numpy(rows).to(mixed.device)]


class RelationProbes(EdgeProbes):
    """The relation of an arc, of which head and dependent are given."""

    words = 2

    @staticmethod
    def labels(sentence: ParsedSentence) -> tuple[str, ...]:
        """The labels of all words but the root, which hangs on none."""
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
        layers: Numbers l of the layers.

    Returns:
        (…,); the mean of the numbers where the shares are uniform.
    """
    centres: Floats = weights @ np.asarray(layers, np.float64)
    return centres


def expected_layer(scores: Floats, layers: Sequence[int]) -> Floats:
    """Σ l · Δ_l / Σ Δ_l, with Δ_l the gain by layer l (Tenney et al. 2019, equations 3 and 4).

    Where a layer takes from the score, Δ is negative, and the result may lie outside of the layers.

    Args:
        scores: (…, layers) scores of probes of all layers up to each.
        layers: Numbers l of the layers.

    Returns:
        (…,); NaN where the last score is not above the first.
    """
    gains = np.diff(scores, axis=-1)
    total = gains.sum(axis=-1)
    weighted = gains @ np.asarray(layers[1:], np.float64)
    layers_expected: Floats = np.divide(
        weighted, total, out=np.full_like(total, np.nan), where=total > 0
    )
    return layers_expected


EDGE_PROBES: dict[SyntaxMetric, type[EdgeProbes]] = {"upos": UposProbes, "relation": RelationProbes}

Scored = dict[SyntaxMetric, Share | ByLength]
"""Scores of sentences by metric; in front of the axis of sentences stand systems."""


def train(
    kinds: Mapping[Name, Readout[Batch]],
    learned: TreeStates,
    held_out: TreeStates,
    options: StructureOptions,
    seed: int,
    done: Callable[[int], object] = lambda epochs: None,
) -> dict[Name, list[Tensor]]:
    """Train probes of several kinds from one stream of sentences, each until it no longer learns.

    The schedule is Hewitt & Manning's (2019, appendix): after an epoch without a new minimum of its
    loss on dev a probe goes on with a tenth of its learning rate and an Adam that has forgotten its
    moments. It ends when that has happened four times, since the steps are then too small to
    matter; the parameters of the minimum are kept.

    Args:
        kinds: Probes by name.
        learned: Sentences to learn from.
        held_out: Sentences that the learning rate and the epoch are chosen on.
        options: Settings of the training.
        seed: Seed of the starts, and of the order of the sentences.
        done: Is told of each epoch that ended.

    Returns:
        By name the best parameters, (probes, …) each.

    Raises:
        CorruptStoreError: what is stored is damaged.
    """
    stacks = {
        name: Stack(
            kind,
            seed,
            partial(StackedAdam, lr=options.lr),
            EarlyStopping(kind.count, _MISSES, margin=_BETTER),
            device(),
        )
        for name, kind in kinds.items()
    }
    shuffled = learned.shuffled(options.batch_size, seed)
    in_order = held_out.in_order(options.batch_size)
    train_batched(
        list(stacks.values()),
        lambda epoch: learned.batches(shuffled),
        lambda: held_out.batches(in_order),
        epochs=options.epochs,
        done=lambda stopped: done(1),
    )
    return {name: stack.best for name, stack in stacks.items()}


class Parts(NamedTuple):
    """The sentences of a snapshot by what they are for."""

    train: TreeStates
    dev: TreeStates
    """Learning rates and epochs are chosen on these."""
    scored: TreeStates


class Measured(NamedTuple):
    """Scores of the probes of one seed."""

    scored: Scored
    """(probes, sentences): of edge probing each layer alone, then mixes up to each layer but the
    first; otherwise a probe for each layer."""
    weights: Floats
    """(tasks, layers) shares of the layers in the mix of all, in the order of `EDGE_PROBES`."""


def measure(
    parts: Parts,
    options: StructureOptions,
    seed: int,
    done: Callable[[int], object] = lambda epochs: None,
) -> Measured:
    """Train the probes of all layers with one seed, and score the sentences.

    Args:
        parts: Sentences of one snapshot.
        options: Settings of the training.
        seed: Seed of starts and batches.
        done: Is told of each epoch that ended, of ``options.epochs`` at most.

    Raises:
        InputError: training has fewer than two parts of speech or relations.
        CorruptStoreError: what is stored is damaged.
    """
    layers, hidden = len(parts.train.layers), parts.train.split.record.hidden_size
    distance = DistanceProbes(layers, hidden, options.rank)
    depth = DepthProbes(layers, hidden, options.rank)
    edges: dict[SyntaxMetric, EdgeProbes] = {
        name: kind(layers, hidden, options.units, classes_of(parts.train, name))
        for name, kind in EDGE_PROBES.items()
    }
    kinds: dict[str, Readout[Batch]] = {"distance": distance, "depth": depth}
    kinds |= {str(name): kind for name, kind in edges.items()}
    best = train(kinds, parts.train, parts.dev, options, seed, done)
    scored = parts.scored
    trees: list[Floats] = [np.empty(0)] * len(scored)
    right = {name: np.zeros((kind.count, len(scored))) for name, kind in edges.items()}
    for batch in scored.batches(scored.in_order(options.batch_size)):
        between = distance.by_sentence(best["distance"], batch)
        deep = depth.by_sentence(best["depth"], batch)
        for i, number in enumerate(batch.numbers):
            trees[number] = structural(between[i], deep[i], batch.golds[i])
        for name, kind in edges.items():
            right[name][:, batch.numbers] = kind.right(best[name], batch)
    scores = structural_scores(trees, scored.golds)
    for name in edges:
        scores[name] = Share(right[name], n_labels(scored, name))
    mixes = [kind.weights(best[name][0])[-1].cpu().numpy() for name, kind in edges.items()]
    return Measured(scores, np.array(mixes, np.float64))


def structural(
    between: npt.NDArray[np.floating], deep: npt.NDArray[np.floating], gold: Gold
) -> Floats:
    """The four structural scores of a sentence, of some systems.

    Args:
        between: (systems, words, words) predicted distances.
        deep: (systems, words) predicted depths.
        gold: Tree of the sentence.

    Returns:
        (4, systems): right edges, correlation of distances, whether the root is scores, correlation
        of depths; correlations are 0 of sentences whose length does not count.
    """
    scores = np.zeros((4, len(between)))
    scores[0], scores[2] = right_edges(between, gold), finds_root(deep, gold)
    if SHORTEST <= len(gold.depths) <= LONGEST:
        scores[1] = distance_correlation(between, gold)
        scores[3] = rank_correlation(deep, gold.depths)
    return scores


def structural_scores(predictions: Sequence[Floats], golds: Sequence[Gold]) -> Scored:
    """Scores of all sentences.

    Args:
        predictions: (sentences,) scores of `structural`.
        golds: (sentences,) their trees.
    """
    values = np.stack(predictions, axis=-1)
    lengths = np.array([len(gold.depths) for gold in golds])
    return {
        "uuas": Share(values[0], np.array([n_edges(gold) for gold in golds], np.float64)),
        "dspr": ByLength(values[1], lengths),
        "root": Share(values[2], np.ones(len(golds))),
        "nspr": ByLength(values[3], lengths),
    }


def labels_of(states: TreeStates, task: SyntaxMetric) -> list[tuple[str, ...]]:
    """(sentences,) labels of each."""
    return [EDGE_PROBES[task].labels(sentence) for sentence in states.sentences]


def classes_of(states: TreeStates, task: SyntaxMetric) -> tuple[str, ...]:
    """The labels that training sentences have, in the order of their names.

    Raises:
        InputError: there are fewer than two.
    """
    classes = sorted(set().union(*labels_of(states, task)))
    if len(classes) < 2:
        raise InputError(
            f"{states.split.name} has {len(classes)} different labels of {task}: a classifier "
            "needs two or more; give a treebank with more sentences"
        )
    return tuple(classes)


def n_labels(states: TreeStates, task: SyntaxMetric) -> Floats:
    """(sentences,) number of labels of each."""
    return np.array([len(labels) for labels in labels_of(states, task)], np.float64)


def tree_baselines(scored: TreeStates, seed: int) -> dict[Baseline, Scored]:
    """Structural scores of trees that know nothing but the number of words.

    Args:
        scored: The sentences.
        seed: Seed of the random trees.

    Returns:
        By baseline; (trees, sentences) of one chain, or of `RANDOM_TREES` trees.
    """
    random = np.random.default_rng(seed)
    scores: dict[Baseline, list[Floats]] = {"chain": [], "random": []}
    for gold in scored.golds:
        words = len(gold.depths)
        drawn = [random_tree(words, random) for _ in range(RANDOM_TREES)]
        trees: dict[Baseline, list[list[int]]] = {"chain": [chain(words)], "random": drawn}
        for name, heads in trees.items():
            between = np.array([distances(tree) for tree in heads])
            deep = np.array([depths(tree) for tree in heads])
            scores[name].append(structural(between, deep, gold))
    return {name: structural_scores(each, scored.golds) for name, each in scores.items()}


def majority(train: TreeStates, scored: TreeStates) -> Scored:
    """Accuracy of the label that training has most often: (1, sentences)."""
    scores: Scored = {}
    for task in EDGE_PROBES:
        counts = _counts(train, task)
        most = min(counts, key=lambda label: (-counts[label], label))
        right = [labels.count(most) for labels in labels_of(scored, task)]
        scores[task] = Share(np.array([right], np.float64), n_labels(scored, task))
    return scores


class Unlearned(NamedTuple):
    """Labels that one side lacks, each with its count on the other, most frequent first."""

    untrained: tuple[tuple[str, int], ...]
    """Scored sentences have them and training has not: they count as wrong."""
    unscored: tuple[tuple[str, int], ...]
    """Training has them and scored sentences have not: nothing is known of them."""


def unlearned(train: TreeStates, scored: TreeStates, task: SyntaxMetric) -> Unlearned:
    """The labels of a task without examples on one side."""
    learned, asked = _counts(train, task), _counts(scored, task)
    return Unlearned(_lacking(asked, learned), _lacking(learned, asked))


def _counts(states: TreeStates, task: SyntaxMetric) -> Counter[str]:
    return Counter(label for labels in labels_of(states, task) for label in labels)


def _lacking(one: Counter[str], other: Counter[str]) -> tuple[tuple[str, int], ...]:
    """Labels of one side that the other has not, most frequent first."""
    lacking = [(label, n) for label, n in one.items() if label not in other]
    return tuple(sorted(lacking, key=lambda item: (-item[1], item[0])))
