"""The output layer of sentence ordering, a score for each sentence, and its listwise loss.

Zhu et al. (2021, arXiv:2103.13584), *BERT4SO: Neural Sentence Ordering by Fine-tuning BERT*: all
sentences in one window with a special token in front of each, a listwise loss over what is read
there. Theirs is ListMLE with a margin; here it is ListMLE itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bertvision.pipelines.tasks.own_output import OutputLayer


class OrderOutput(NamedTuple):
    """What the layer says of a batch."""

    logits: Tensor
    """(batch, seq) score of the sentence that begins at a token, the larger the earlier; 0 where
    none begins."""
    hidden_states: tuple[Tensor, ...] | None = None
    """Those of the encoder, where they were asked for."""
    attentions: tuple[Tensor, ...] | None = None
    """Likewise."""


class SentenceScores(OutputLayer):
    """A linear layer on the special token in front of each sentence.

    Args:
        config: of the encoder.
    """

    reads = ("sentences",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)  # that of Devlin et al. (2019) on what classes are told from
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, states: Tensor, sentences: Tensor) -> OrderOutput:
        """Score the sentences.

        Args:
            states: (batch, seq, hidden) the last hidden state.
            sentences: (batch, seq) number of the sentence that begins at a token, −1 elsewhere.
        """
        scores = self.score(self.dropout(states)).squeeze(-1).float()
        return OrderOutput(scores.masked_fill(sentences < 0, 0.0))


def list_mle(scores: Tensor, positions: Tensor) -> Tensor:
    """−log of the probability of the right order, for each list of a batch, (batch,) float32.

    The order is drawn as Plackett (1975) and Luce (1959) have it: the first with a probability of
    softmax over all, the next over those that are left. Xia et al. (2008, ICML), *Listwise
    Approach to Learning to Rank*, equation 9.

    Args:
        scores: (batch, seq)
        positions: (batch, seq) int64 right position of each, from 0; −1 of what is in no list.
    """
    there = positions >= 0
    last = torch.where(there, positions, positions.shape[1])  # what is in no list stands behind
    order = last.argsort(dim=1, stable=True)
    lowest = torch.finfo(torch.float32).min
    ranked = scores.float().masked_fill(~there, lowest).gather(1, order)
    listed = there.gather(1, order)
    left = ranked.flip(1).logcumsumexp(1).flip(1)  # log of the sum over those that are left
    return (left - ranked).masked_fill(~listed, 0.0).sum(1)
