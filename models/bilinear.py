"""A span head whose end depends on its start."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from bertvision.models.heads import SpanHead, span_output
from bertvision.models.outputs import SpanOutput, pad_packed
from bertvision.models.pooling import Pooling, make_pooling


class BilinearSpanHead(SpanHead):
    """Low-rank bilinear: the score of an end is also a product with the expected start.

    With x_i the pooled state of token i and p = softmax(start logits) over the window::

        start_i = w_s · x_i + b_s
        c       = Σ_i p_i U x_i                                    what the start is expected to be
        end_j   = w_e · x_j + b_e + (V x_j) · c / √rank

    A score for each pair (i, j) would be x_i Uᵀ V x_j; its expectation over the start keeps two
    logits per token, so that the loss and the decoding of every span head apply. The pointer
    networks of Wang & Jiang (2017, *Machine Comprehension Using Match-LSTM and Answer Pointer*,
    boundary model) condition the end on the attention-weighted start likewise; the low-rank
    product is that of Kim et al. (2017, *Hadamard Product for Low-rank Bilinear Pooling*,
    equation 2), the linear terms beside it those of the biaffine scorer of Dozat & Manning (2017,
    *Deep Biaffine Attention for Neural Dependency Parsing*). U and V begin as N(0, 0.02).

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        pooling: Way in which the layers become one.
        rank: rows of U and V.
    """

    def __init__(self, *, layers: int, hidden: int, pooling: Pooling, rank: int) -> None:
        super().__init__(layers=layers, hidden=hidden, width=hidden)
        self.pooling = make_pooling(pooling, layers, hidden)
        self.start = nn.Linear(hidden, rank, bias=False)  # U
        self.end = nn.Linear(hidden, rank, bias=False)  # V
        nn.init.normal_(self.start.weight, std=0.02)
        nn.init.normal_(self.end.weight, std=0.02)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The pooled state: (tokens, hidden)."""
        return [self.pooling(hidden_states)]

    def forward(self, hidden_states: Tensor, lengths: Tensor) -> SpanOutput:
        """Logits of every token, as `SpanHead.forward`."""
        self.check(hidden_states)
        parts = self.features(hidden_states, lengths)
        output = span_output(self.logits(parts), lengths)
        # Of padding the logit is the smallest number, so its p is 0; and 0 is what it adds here.
        start, end = output
        p = start.softmax(dim=1)  # (batch, seq); float32 under autocast
        starts = pad_packed(self.start(parts[0]), lengths, fill=0.0)  # (batch, seq, rank)
        ends = pad_packed(self.end(parts[0]), lengths, fill=0.0)
        context = p.to(starts.dtype).unsqueeze(1) @ starts  # (batch, 1, rank)
        product = (ends @ context.transpose(1, 2)).squeeze(2) / math.sqrt(starts.shape[2])
        return SpanOutput(start, end + product)
