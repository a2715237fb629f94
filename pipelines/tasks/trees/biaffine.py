"""The output layer of a parser: scores of every word as the head of every other, and of relations.

Dozat & Manning (2017, arXiv:1611.01734), *Deep Biaffine Attention for Neural Dependency Parsing*,
without its LSTMs, on the first token of each word: as Kondratyuk & Straka (2019, arXiv:1904.02099),
*75 Languages, 1 Model*, put it on BERT.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bertvision.models.outputs import without_autocast
from bertvision.pipelines.tasks.own_output import OutputLayer

ARC, RELATION, DROPOUT = 500, 100, 0.33
"""Widths of what is compared for heads and for relations, and the dropout there, as theirs."""


class ParseOutput(NamedTuple):
    """What the layer says of a batch."""

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
    """Those of the encoder, where they were asked for."""
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
