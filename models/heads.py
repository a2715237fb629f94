"""Span heads: from the hidden states of packed tokens to start and end logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertvision.errors import InputError
from bertvision.models.adapters import IndependentAdapter, SharedAdapter
from bertvision.models.outputs import SpanOutput, pad_packed
from bertvision.models.pooling import AveragePooling, LearnedPooling


class SpanHead(nn.Module, ABC):
    """Base of the span heads: features of each token → Linear 2 → start and end logits.

    A sub-class says in `features` what it computes per token. The output layer begins as
    N(0, 0.02) with zero bias, the initialisation of BERT's own layers (Devlin et al. 2019 code,
    ``initializer_range``).

    Args:
        layers: number of hidden states, the embedding output included (25 for BERT-large).
        hidden: width of the hidden states (1024 for BERT-large).
        width: features per token.

    Raises:
        InputError: ``layers`` or ``hidden`` is below 1.
    """

    def __init__(self, *, layers: int, hidden: int, width: int) -> None:
        super().__init__()
        if layers < 1 or hidden < 1:
            raise InputError(f"layers={layers}, hidden={hidden}: both must be at least 1")
        self.layers = layers
        self.hidden = hidden
        self.output = nn.Linear(width, 2)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    @abstractmethod
    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """Features of each token, to be concatenated.

        Args:
            hidden_states: (tokens, layers, hidden), the tokens of all examples one after the other.
            lengths: (batch,) tokens per example.

        Returns:
            Parts, each (tokens, width of the part); the widths sum to ``width``.
        """

    def forward(self, hidden_states: Tensor, lengths: Tensor) -> SpanOutput:
        """Logits of every token.

        Args:
            hidden_states: (tokens, layers, hidden), the tokens of all examples one after the other,
                without padding.
            lengths: (batch,) int64, tokens per example.

        Returns:
            Logits, each (batch, max(lengths)), padded with the dtype's smallest finite number.

        Raises:
            InputError: the shapes do not fit this head or each other.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[1:] != (self.layers, self.hidden):
            raise InputError(
                f"hidden states of shape {tuple(hidden_states.shape)} given to a head for (tokens, "
                f"{self.layers} layers, {self.hidden} hidden): build the head for this encoder, "
                "with layers = its number of hidden states (the embedding output included)"
            )
        parts = self.features(hidden_states, lengths)
        # W [a, b] = W_a a + W_b b: the concatenation, without copying the features.
        weights = torch.split(self.output.weight, [part.shape[1] for part in parts], dim=1)
        logits = F.linear(parts[0], weights[0], self.output.bias)  # (tokens, 2)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            logits = logits + F.linear(part, weight)
        padded = pad_packed(logits, lengths, fill=torch.finfo(logits.dtype).min)
        return SpanOutput(*padded.unbind(-1))


class PoolingSpanHead(SpanHead):
    """Pool the layers, then the output layer.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        learned: `LearnedPooling` if true, else `AveragePooling`.
    """

    def __init__(self, *, layers: int, hidden: int, learned: bool) -> None:
        super().__init__(layers=layers, hidden=hidden, width=hidden)
        self.pooling = LearnedPooling(layers) if learned else AveragePooling()

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The pooled state: (tokens, hidden)."""
        return [self.pooling(hidden_states)]


class AdapterSpanHead(SpanHead):
    """Compress each layer with an adapter, flatten the layers, then the output layer.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        size: width of the compressed states.
        shared: one `SharedAdapter` for all layers if true, else an `IndependentAdapter`.
        skip: also give the output layer the last hidden state itself, concatenated.
    """

    def __init__(self, *, layers: int, hidden: int, size: int, shared: bool, skip: bool) -> None:
        super().__init__(layers=layers, hidden=hidden, width=layers * size + hidden * skip)
        self.skip = skip
        self.adapter: SharedAdapter | IndependentAdapter
        if shared:
            self.adapter = SharedAdapter(hidden, size)
        else:
            self.adapter = IndependentAdapter(layers, hidden, size)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The compressed layers (tokens, layers × size); with skip, also (tokens, hidden)."""
        compressed = self.adapter(hidden_states).flatten(1)
        return [compressed, hidden_states[:, -1]] if self.skip else [compressed]
