"""Trees: gold trees as distances and depths, scores beside them, and the words of a treebank.

The scores are those of Hewitt & Manning (2019), *A Structural Probe for Finding Syntax in Word
Representations*, section 3, as their code has them (``structural-probes/reporter.py``): UUAS
without punctuation, correlations of ranks that are averaged by the length of sentences.

Hidden states of words are read out of the store batch by batch, so that memory is that of a few
batches whatever the size of the treebank; those of the tokens of a word are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.precision import device
from bertvision.pipelines.readouts.batched import Bools, Floats, Ints
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.treebank import (
    NO_WORD,
    PUNCTUATION,
    TREEBANK,
    ParsedSentence,
    is_cut,
    words_of_tokens,
)
from bertvision.pipelines.uncertainty import percentiles, resampled

SHORTEST, LONGEST = 5, 50
"""Lengths of the sentences whose correlations are averaged."""


def depths(heads: Sequence[int]) -> Ints:
    """Edges between each word and the root.

    Args:
        heads: Number of the head of each word, from 1; 0 of the root.

    Returns:
        (words,)
    """
    depth_of_word = np.zeros(len(heads), np.int64)
    for word in range(len(heads)):
        above = heads[word]
        while above:
            depth_of_word[word] += 1
            above = heads[above - 1]
    return depth_of_word


def distances(heads: Sequence[int]) -> Ints:
    """Edges on the path between every two words.

    Args:
        heads: See `depths`.

    Returns:
        (words, words), symmetric.
    """
    distance_of_words = np.zeros((len(heads), len(heads)), np.int64)
    done: list[int] = []
    for word in np.argsort(depths(heads), kind="stable").tolist():
        if done:
            distance_of_words[word, done] = distance_of_words[done, word] = (
                distance_of_words[heads[word] - 1, done] + 1
            )
        done.append(word)
    return distance_of_words


def chain(words: int) -> list[int]:
    """The heads of a chain: each word hangs on the one before it, the first is the root."""
    return list(range(words))


def random_tree(words: int, random: np.random.Generator) -> list[int]:
    """The heads of a tree drawn uniformly from all labelled trees, with a root drawn uniformly.

    By the sequences of Prüfer (1918), of which each stands for one tree.

    Args:
        words: Number of words.
        random: Generator of the draw.
    """
    if words < 3:
        first = int(random.integers(words))
        return [0 if word == first else first + 1 for word in range(words)]
    sequence = random.integers(words, size=words - 2)
    degree = 1 + np.bincount(sequence, minlength=words)
    beside: list[list[int]] = [[] for _ in range(words)]

    def join(a: int, b: int) -> None:
        beside[a].append(b)
        beside[b].append(a)

    for word in sequence.tolist():
        leaf = int(np.flatnonzero(degree == 1)[0])
        join(leaf, word)
        degree[[leaf, word]] -= 1
    join(*np.flatnonzero(degree == 1).tolist())
    heads = [-1] * words
    root = int(random.integers(words))
    heads[root] = 0
    reached = [root]
    for word in reached:
        for other in beside[word]:
            if heads[other] < 0:
                heads[other] = word + 1
                reached.append(other)
    return heads


def spanning_trees(lengths: npt.NDArray[np.floating]) -> Ints:
    """The minimum spanning tree of every matrix, by the algorithm of Prim (1957), from node 0.

    Of edges of the same length the one to the lower node is taken.

    Args:
        lengths: (…, nodes, nodes) lengths of the edges, symmetric; the diagonal does not enter.

    Returns:
        (…, nodes − 1, 2) the two nodes of each edge.
    """
    *outer, nodes, _ = lengths.shape
    flat = lengths.reshape(-1, nodes, nodes)
    every = np.arange(len(flat))
    nearest = np.zeros((len(flat), nodes), np.int64)  # node of the tree that each is nearest to
    far = flat[:, 0].astype(np.float64)  # and how far off it is; infinite of those in the tree
    far[:, :1] = np.inf
    edges = np.empty((len(flat), max(nodes - 1, 0), 2), np.int64)
    for step in range(nodes - 1):
        new = far.argmin(axis=1)
        edges[:, step, 0], edges[:, step, 1] = nearest[every, new], new
        closer = flat[every, new] < far
        outside = np.isfinite(far)
        nearest = np.where(closer & outside, new[:, None], nearest)
        far = np.where(closer & outside, flat[every, new], far)
        far[every, new] = np.inf
    return edges.reshape(*outer, max(nodes - 1, 0), 2)


class Gold(NamedTuple):
    """The tree that a sentence is scored against."""

    distances: Ints
    """(words, words) edges between two words."""
    depths: Ints
    """(words,) edges between a word and the root."""
    counted: Ints
    """Indices of the words that are no punctuation."""
    edges: Bools
    """(counted, counted) whether the tree has an edge between two of these."""


def gold_of(sentence: ParsedSentence) -> Gold:
    """The tree that a sentence is scored against."""
    distances_of_words = distances(sentence.heads)
    counted = np.flatnonzero(np.array(sentence.upos) != PUNCTUATION)
    return Gold(
        distances_of_words,
        depths(sentence.heads),
        counted,
        distances_of_words[np.ix_(counted, counted)] == 1,
    )


def right_edges(predicted: npt.NDArray[np.floating], gold: Gold) -> Ints:
    """Edges of the spanning tree of predicted distances that the gold tree has too.

    Directions do not count, and punctuation is in neither of the trees.

    Args:
        predicted: (…, words, words) distances.
        gold: Tree of the sentence.

    Returns:
        (…,) how many; `n_edges` is how many there are.
    """
    if not len(gold.counted):
        return np.zeros(predicted.shape[:-2], np.int64)
    among = predicted[..., gold.counted[:, None], gold.counted]
    tree = spanning_trees(among)
    right: Ints = gold.edges[tree[..., 0], tree[..., 1]].sum(axis=-1)
    return right


def n_edges(gold: Gold) -> int:
    """Edges of the gold tree between words that are no punctuation."""
    return int(gold.edges.sum()) // 2


def finds_root(predicted: npt.NDArray[np.floating], gold: Gold) -> Bools:
    """Whether the word of the smallest predicted depth, of those no punctuation, is the root.

    Args:
        predicted: (…, words) depths.
        gold: Tree of the sentence.
    """
    if not len(gold.counted):
        return np.zeros(predicted.shape[:-1], bool)
    is_root: Bools = gold.depths[gold.counted[predicted[..., gold.counted].argmin(axis=-1)]] == 0
    return is_root


def rank_correlation(predicted: npt.NDArray[np.floating], gold: npt.NDArray[np.integer]) -> Floats:
    """Spearman's correlation along the last axis, −1 to 1; ties share their mean rank.

    0 where either side is constant, which tells nothing.

    Args:
        predicted: (…, words)
        gold: (…, words), broadcast to it.
    """
    from scipy.stats import rankdata  # late: its import takes longer than most commands

    x, y = (rankdata(side, axis=-1) for side in (predicted, gold))
    x, y = (side - side.mean(axis=-1, keepdims=True) for side in (x, y))
    scale = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    products = (x * y).sum(-1)
    correlations: Floats = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    return correlations


def distance_correlation(predicted: npt.NDArray[np.floating], gold: Gold) -> Floats:
    """Mean over words of the rank correlation of their distances to all words of the sentence.

    As in the code of Hewitt & Manning the word itself is one of these, at distance 0 in both.

    Args:
        predicted: (…, words, words) distances.
        gold: Tree of the sentence.
    """
    correlations: Floats = rank_correlation(predicted, gold.distances).mean(axis=-1)
    return correlations


class Share(NamedTuple):
    """A score that is a sum over sentences divided by another: UUAS, root, accuracy of words."""

    right: Floats
    """(…, sentences)"""
    total: Floats
    """(sentences,)"""

    def of_samples(self, counts: Floats) -> Floats:
        """(…, resamples) scores of samples that have each sentence so often.

        Args:
            counts: (resamples, sentences)
        """
        return _divide(self.right @ counts.T, counts @ self.total)


class ByLength(NamedTuple):
    """A score of sentences, averaged among those of one length, then over lengths."""

    values: Floats
    """(…, sentences)"""
    lengths: Ints
    """(sentences,) number of words."""

    def of_samples(self, counts: Floats) -> Floats:
        """See `Share`."""
        values = [np.full((*self.values.shape[:-1], len(counts)), np.nan)]
        for length in range(SHORTEST, LONGEST + 1):
            rows = np.flatnonzero(self.lengths == length)
            if len(rows):
                own = counts[:, rows]
                values.append(_divide(self.values[..., rows] @ own.T, own.sum(1)))
        each = np.stack(values)
        there = np.isfinite(each)  # a sample may have no sentence of a length
        return _divide(np.where(there, each, 0).sum(0), there.sum(0).astype(float))


def score(correct: Share | ByLength) -> Floats:
    """The score of all sentences: (…,); NaN where no sentence counts."""
    one: Floats = correct.of_samples(np.ones((1, len(correct[1]))))[..., 0]
    return one


def interval(correct: Share | ByLength, resamples: int, seed: int = 0) -> Floats:
    """95 % percentile intervals over sentences, which are drawn with replacement.

    Args:
        correct: The score.
        resamples: Number of draws.
        seed: Seed of the draws: scores of the same sentences are of the same draws.

    Returns:
        (…, 2) lower and upper end.
    """
    drawn = resampled(correct.of_samples, [np.arange(len(correct[1]))], resamples, seed)
    return np.moveaxis(percentiles(drawn), 0, -1)


def _divide(a: Floats, b: Floats) -> Floats:
    b = np.broadcast_to(b, a.shape)
    quotients: Floats = np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)
    return quotients


class Batch(NamedTuple):
    """Some sentences, their words one after another."""

    states: Tensor
    """(layers, words, hidden) float32."""
    numbers: list[int]
    """(sentences,) their places in `TreeStates.sentences`."""
    sentences: list[ParsedSentence]
    """(sentences,)"""
    golds: list[Gold]
    """(sentences,)"""

    @property
    def lengths(self) -> list[int]:
        """(sentences,) words of each."""
        return [len(sentence.words) for sentence in self.sentences]


class TreeStates:
    """The sentences of a stored split whose words all have hidden states.

    Attributes:
        split: A stored split.
        sentences: Sentences that are whole; a batch names them by their place in here.
        cut: Number of sentences that were left out since they are longer than their window.
        wordless: Number of others that were left out since a word of theirs has no token, such as a
            control character alone.
    """

    def __init__(self, split: ActivationSplit) -> None:
        """Find the tokens of every word.

        Args:
            split: A complete split of all tokens of a treebank.

        Raises:
            InputError: it is none of a treebank, or no sentence of it is whole.
            CorruptStoreError: its table or an array is damaged.
        """
        self.split = split.require_complete()
        table, task = split.table(), load_task(TREEBANK)
        if not {"words", "heads"} <= set(table.column_names):
            raise InputError(
                f"{split.name} holds no trees: store those of a treebank with `bertvision extract "
                f"--checkpoint {split.tag} --task {TREEBANK} --data FOLDER`"
            )
        items, plan = task.items_of(table), split.plan
        offsets = split.array("offset_mapping")
        longest = int(str(split.record.provenance.get("max_length", 0))) or int(plan.n_tokens.max())
        self.sentences: list[ParsedSentence] = []
        self.cut = self.wordless = 0
        self._number: dict[int, int] = {}  # of a stored example, among the sentences
        self._words: list[Ints] = []  # of each sentence, those of its tokens
        for example in np.argsort(plan.example_id, kind="stable").tolist():
            item: ParsedSentence = items[int(plan.example_id[example])]
            begin = int(plan.first_token[example])
            own = offsets[begin : begin + int(plan.n_tokens[example])]
            words = words_of_tokens(item.words, own)
            if is_cut(item.text, own, longest):
                self.cut += 1
            elif len(set(words.tolist()) - {NO_WORD}) < len(item.words):
                self.wordless += 1
            else:
                self._number[example] = len(self.sentences)
                self.sentences.append(item)
                self._words.append(words)
        if not self.sentences:
            raise InputError(
                f"of {len(items)} sentences of {split.name} none is whole ({self.cut} are longer "
                f"than {longest} tokens): give longer windows, --max-length, into another workspace"
            )

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are stored (0 = embedding output)."""
        return self.split.record.layers

    @cached_property
    def golds(self) -> list[Gold]:
        """(sentences,) tree that each is scored against."""
        return [gold_of(sentence) for sentence in self.sentences]

    def shuffled(self, size: int, seed: int) -> ActivationLoader:
        """A loader for `batches`, in another order each time, which depends on the seed alone.

        Args:
            size: Number of sentences of a batch.
            seed: Seed of the order.
        """
        return ActivationLoader(self.split, batch_size=size, seed=seed)

    def in_order(self, size: int) -> ActivationLoader:
        """A loader for `batches`, in the stored order.

        Args:
            size: Number of sentences of a batch.
        """
        return ActivationLoader(self.split, batch_size=size, shuffle=False)

    def batches(self, loader: ActivationLoader) -> Iterator[Batch]:
        """One pass over the sentences.

        Args:
            loader: A loader of `shuffled` or `in_order`.

        Raises:
            CorruptStoreError: the stored split is damaged.
        """
        for read in loader:
            states = read.to(device()).decode()  # (tokens, layers, hidden)
            numbers, places, words = [], [], 0
            for example, tokens in zip(read.examples.tolist(), read.lengths.tolist(), strict=True):
                number = self._number.get(example)
                if number is None:
                    places.append(np.full(tokens, NO_WORD))
                    continue
                own = self._words[number]
                places.append(np.where(own == NO_WORD, NO_WORD, own + words))
                words += len(self.sentences[number].words)
                numbers.append(number)
            if numbers:
                place = torch.from_numpy(np.concatenate(places)).to(states.device)
                averaged = _averaged(states, place, words)
                sentences = [self.sentences[i] for i in numbers]
                yield Batch(averaged, numbers, sentences, [self.golds[i] for i in numbers])


def _averaged(states: Tensor, word: Tensor, words: int) -> Tensor:
    """The mean of the tokens of each word.

    Args:
        states: (tokens, layers, hidden)
        word: (tokens,) number of the word; `NO_WORD` of tokens of none.
        words: Number of words.

    Returns:
        (layers, words, hidden)
    """
    is_word = word != NO_WORD
    word, states = word[is_word], states[is_word]
    sums = states.new_zeros(words, *states.shape[1:]).index_add_(0, word, states)
    counts = torch.bincount(word, minlength=words).to(states.dtype)
    return (sums / counts[:, None, None]).transpose(0, 1).contiguous()
