"""The output layer for pairs of phrases: the class of two spans, one of each sentence of a pair.

Arase & Tsujii (2019, arXiv:1909.00931), *Transfer Fine-Tuning: A BERT Case Study*, fine-tune an
encoder on phrases that paraphrase each other before the task that is meant. Here a phrase is the
largest value of each channel over its tokens, and a pair is compared as Conneau et al. (2017,
arXiv:1705.02364, section 3.2) compare sentences: (u, v, |u − v|, u ∗ v).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bertvision.pipelines.tasks.own_output import OutputLayer

FIRST, SECOND = 0, 1
"""Marks of the tokens of the phrase in the first sentence, and of that in the second."""


class PhraseOutput(NamedTuple):
    """What the layer says of a batch."""

    logits: Tensor
    """(batch, classes)"""
    hidden_states: tuple[Tensor, ...] | None = None
    """Those of the encoder, where they were asked for."""
    attentions: tuple[Tensor, ...] | None = None
    """Likewise."""


class PhrasePairLayer(OutputLayer):
    """A linear layer on what two phrases have in common and apart.

    Args:
        config: of the encoder; ``num_labels`` is the number of classes.
    """

    reads = ("phrases",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)  # that of Devlin et al. (2019) on what classes are told from
        self.classes = nn.Linear(4 * config.hidden_size, config.num_labels or 0)

    def forward(self, states: Tensor, phrases: Tensor) -> PhraseOutput:
        """Tell the class of each window's pair.

        Args:
            states: (batch, seq, hidden) the last hidden state.
            phrases: (batch, seq) `FIRST`, `SECOND`, or −1 of other tokens.
        """
        states = states.float()
        lowest = torch.finfo(states.dtype).min
        u, v = (
            states.masked_fill((phrases != which)[..., None], lowest).amax(1)  # (batch, hidden)
            for which in (FIRST, SECOND)
        )
        pair = torch.cat([u, v, (u - v).abs(), u * v], dim=-1)
        return PhraseOutput(self.classes(self.dropout(pair)))
