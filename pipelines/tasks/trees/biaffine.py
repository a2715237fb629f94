"""The output layer of a parser: scores of every word as the head of every other, and of relations.

Dozat & Manning (2017, arXiv:1611.01734), *Deep Biaffine Attention for Neural Dependency Parsing*,
without its LSTMs, on the first token of each word: as Kondratyuk & Straka (2019, arXiv:1904.02099),
*75 Languages, 1 Model*, put it on BERT.

The best tree over words: the spanning tree of the largest sum of scores, with one root.

Chu & Liu (1965) and Edmonds (1967), as McDonald et al. (2005, HLT-EMNLP) use them for parsing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bertvision.errors import InputError
from bertvision.models.outputs import without_autocast
from bertvision.pipelines.tasks.own_output import OutputLayer

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


def best_tree(scores: npt.NDArray[np.floating]) -> Int64Array:
    """The head of each word in the tree with one root whose arcs have the largest sum.

    Softmax over each word's heads, which is a constant for the word, would not change the tree.

    Args:
        scores: (words, words + 1), of each word with each head; column 0 is the root. The score of
            a word with itself, column word + 1, is not read.

    Returns:
        (words,) int64: 0 of the root, else the number of the head, from 1.

    Raises:
        InputError: the scores are of another shape, or not finite.
    """
    words = len(scores)
    if scores.shape != (words, words + 1):
        raise InputError(
            f"scores of shape {scores.shape} are of no tree: give (words, words + 1), one for each "
            "word with the root and with each word"
        )
    if not np.isfinite(np.delete(scores.reshape(-1), np.arange(words) * (words + 2) + 1)).all():
        raise InputError("the scores hold NaN or infinity: the model that made them diverged")
    if not words:
        return np.zeros(0, np.int64)
    arcs = np.full((words + 1, words + 1), -np.inf)
    arcs[1:] = scores
    np.fill_diagonal(arcs, -np.inf)
    # a second root costs more than any choice of other arcs can bring
    held = arcs[np.isfinite(arcs)]
    arcs[1:, 0] -= 1.0 + 2.0 * words * (held.max() - held.min())
    heads: Int64Array = _arborescence(arcs)[1:]
    return heads


def _arborescence(arcs: Float64Array) -> Int64Array:
    """The best head of each node, (nodes,); node 0 is the root, whose entry says nothing.

    Args:
        arcs: (nodes, nodes) score of each node's arc from each head, −inf where there is none.
    """
    heads: Int64Array = arcs.argmax(axis=1)
    heads[0] = 0
    cycle = _cycle(heads)
    if cycle is None:
        return heads
    # the cycle becomes one node, the last: what enters it breaks it at the node that is entered
    inside = np.zeros(len(arcs), bool)
    inside[cycle] = True
    outside = np.flatnonzero(~inside)
    kept = arcs[cycle, heads[cycle]]
    entering = arcs[np.ix_(cycle, outside)] - kept[:, None]
    leaving = arcs[np.ix_(outside, cycle)]
    smaller = np.full((len(outside) + 1, len(outside) + 1), -np.inf)
    smaller[:-1, :-1] = arcs[np.ix_(outside, outside)]
    smaller[-1, :-1] = entering.max(axis=0)
    smaller[:-1, -1] = leaving.max(axis=1)
    found = _arborescence(smaller)
    whole: Int64Array = heads.copy()
    enters = found[-1]  # position in outside of the head of the cycle
    whole[cycle[entering[:, enters].argmax()]] = outside[enters]
    for node, head in enumerate(found[:-1]):
        at_cycle = head == len(outside)
        whole[outside[node]] = cycle[leaving[node].argmax()] if at_cycle else outside[head]
    whole[0] = 0
    return whole


def _cycle(heads: Int64Array) -> Int64Array | None:
    """The nodes of a circle of heads; None where all lead to node 0."""
    reached = np.zeros(len(heads), np.int64)  # number of the walk that came by; 0: none
    reached[0] = -1
    for start in range(1, len(heads)):
        at = start
        while not reached[at]:
            reached[at] = start
            at = int(heads[at])
        if reached[at] == start:
            circle = [at]
            while (at := int(heads[at])) != circle[0]:
                circle.append(at)
            return np.array(circle, np.int64)
    return None


ARC, RELATION, DROPOUT = 500, 100, 0.33
"""Widths of what is compared for heads and for relations, and the dropout there, as theirs."""


class ParseOutput(NamedTuple):
    """Output of the layer for a batch."""

    logits: Tensor
    """(batch, seq, seq) scores: of the token in the second dimension, the first token of a word,
    for having its head at the token in the third; 0 where that cannot be (see `allowed_arcs`)."""
    dependents: Tensor
    """(batch, seq, RELATION) of each token as a dependent, for its relation."""
    heads: Tensor
    """(batch, seq, RELATION) of each token as a head."""
    relations: RelationScorer
    """Scores the relations of pairs of them."""
    hidden_states: tuple[Tensor, ...] | None = None
    """The hidden states of the encoder, where they were asked for."""
    attentions: tuple[Tensor, ...] | None = None
    """Likewise."""


class RelationScorer(nn.Module):
    """The paper's fixed-class biaffine classifier: a product of dependent and head, and their sum.

    Args:
        relations: how many there are.
    """

    def __init__(self, relations: int) -> None:
        super().__init__()
        self.product = nn.Linear(RELATION, relations * RELATION, bias=False)
        self.sum = nn.Linear(2 * RELATION, relations)

    def forward(self, dependents: Tensor, heads: Tensor) -> Tensor:
        """Logits (words, relations), float32.

        Args:
            dependents: (words, RELATION) of some words.
            heads: (words, RELATION) of the head of each.
        """
        left = self.product(dependents).unflatten(-1, (-1, RELATION))  # (words, relations, width)
        with without_autocast(left):
            product = (left.float() * heads.float()[:, None]).sum(-1)
        alone: Tensor = self.sum(torch.cat([dependents, heads], dim=-1)).float()
        logits: Tensor = product + alone
        return logits


class Biaffine(OutputLayer):
    """The paper's deep biaffine attention for heads, `RelationScorer` for relations.

    Each stands on layers of its own.

    Args:
        config: of the encoder; ``num_labels`` is the number of relations.
    """

    reads = ("words",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()

        def part(width: int) -> nn.Module:
            layers = nn.Linear(config.hidden_size, width), nn.ReLU(), nn.Dropout(DROPOUT)
            return nn.Sequential(*layers)

        self.arc_dependent, self.arc_head = part(ARC), part(ARC)
        self.relation_dependent, self.relation_head = part(RELATION), part(RELATION)
        self.arc = nn.Linear(ARC, ARC)  # its bias is what a head has by itself
        self.relations = RelationScorer(config.num_labels or 0)

    def forward(self, states: Tensor, words: Tensor) -> ParseOutput:
        """Score all pairs of words.

        Args:
            states: (batch, seq, hidden) the last hidden state.
            words: (batch, seq) number of the word that begins at a token, −1 elsewhere.
        """
        dependents, heads = self.arc(self.arc_dependent(states)), self.arc_head(states)
        with without_autocast(states):
            arcs = dependents.float() @ heads.float().transpose(1, 2)
        return ParseOutput(
            arcs.masked_fill(~allowed_arcs(words), 0.0),
            self.relation_dependent(states),
            self.relation_head(states),
            self.relations,
        )


def allowed_arcs(words: Tensor) -> Tensor:
    """Say which tokens may be the head of which, (batch, seq, seq): rows are dependents.

    A word may hang on every other word, and on the root, for which the first token stands.

    Args:
        words: (batch, seq) number of the word that begins at a token, −1 elsewhere.
    """
    begins = words >= 0
    may_head = begins.clone()
    may_head[:, 0] = True
    itself = torch.eye(words.shape[1], dtype=torch.bool, device=words.device)
    return begins[:, :, None] & may_head[:, None, :] & ~itself
