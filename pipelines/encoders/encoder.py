"""A snapshot's encoder: windows in, hidden states out, of all tokens or pooled.

BERT and the families like it compute packed windows, without padding; any other encoder computes
windows of like length, padded (see docs/encoders.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bertvision.pipelines.encoders.kept_states import KeptStates, kept_tokens
from bertvision.pipelines.encoders.packed_forward import PackedForward, can_pack
from bertvision.pipelines.encoders.padded_forward import PaddedForward
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.tasks.windows import Windows


class HiddenStateSource(Protocol):
    """What gives the hidden states of windows: an `Encoder`, or the store (`StoredTokens`)."""

    device: torch.device
    """Where it computes."""
    tokens: tuple[TokenPooling, ...]
    """What it gives out of each window."""
    attention: str
    """Name of the attention that is computed, for the provenance of a split."""

    def kept(
        self, tokens: TokenPooling, lengths: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.integer]:
        """See `Encoder.kept`."""

    def batches(self, lengths: npt.NDArray[np.integer]) -> list[slice]:
        """See `Encoder.batches`."""

    def __call__(self, windows: Windows, rows: npt.NDArray[np.int64]) -> list[Tensor]:
        """See `Encoder.__call__`."""


class Encoder:
    """A snapshot's encoder on this machine's device: windows in, hidden states out.

    Args:
        model: the encoder, without a task's output layer (``base_model`` of what has one). It
            belongs to this object from now on: moved, cast, and perhaps cut after the last layer
            that is kept.
        layers: what to give out of each window: of ``all`` its tokens, or of poolings of them, the
            indices of the hidden states, ascending; 0 is the embedding output. The index after the
            last layer is the pooler output, of a model that has one, and stands with ``cls`` alone.
        precision: of the forward pass.
        sites: names of sites (see `sites.names`), which then stand in the place of the hidden
            states: ``layers`` counts them from 0.

    Attributes:
        device: where it computes.
        model: what it computes with.
        tokens: what it gives out of each window, in the order of ``layers``.
        attention: name of the attention that it computes, for the provenance of a split.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[TokenPooling, Sequence[int]],
        precision: Precision,
        sites: Sequence[str] = (),
    ) -> None:
        self.device = device()
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.tokens: tuple[TokenPooling, ...] = tuple(layers)
        self._precision = precision
        self._kept = KeptStates(layers, int(model.config.hidden_size), self.device)
        wanted = sorted({layer for of in layers.values() for layer in of})
        self._forward: PackedForward | PaddedForward = (
            PackedForward(self.model, wanted, precision, sites)
            if can_pack(self.model)
            else PaddedForward(self.model, wanted, sites)
        )
        # what is kept of a batch takes no more memory than hidden states do
        self._share = max(1, ceil(len(sites) / (int(model.config.num_hidden_layers) + 1)))
        self.attention = self._forward.attention

    def kept(
        self, tokens: TokenPooling, lengths: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.integer]:
        """How many tokens it gives out of windows of these lengths, (windows,) each."""
        return kept_tokens(tokens, lengths)

    def batches(self, lengths: npt.NDArray[np.integer]) -> list[slice]:
        """Cut a sequence of windows into batches that suit the device.

        Args:
            lengths: (windows,) tokens of each.
        """
        most = self._forward.batch_tokens[self.device.type] // self._share
        batches, start, tokens = [], 0, 0
        for i, n in enumerate(lengths.tolist()):
            if i > start and tokens + n > most:
                batches.append(slice(start, i))
                start, tokens = i, 0
            tokens += n
        return [*batches, slice(start, len(lengths))]

    def forward(self, windows: Windows, rows: npt.NDArray[np.int64]) -> None:
        """The forward pass of some windows, and nothing else (see `__call__`)."""
        windows, rows = windows.separated(rows)
        with torch.inference_mode(), autocast(self._precision, self.device):
            self._forward(windows, rows, None)

    def __call__(self, windows: Windows, rows: npt.NDArray[np.int64]) -> list[Tensor]:
        """Hidden states of some windows, one window after another.

        Args:
            windows: of a split. Items that one window holds are computed each by itself.
            rows: (batch,) which of them.

        Returns:
            For each of ``tokens``, (tokens, layers, hidden) of all tokens or (windows, layers,
            hidden) of a pooling: float32 on the device, in memory that the next call reuses (fresh
            memory takes several times as long to fill); each layer is contiguous. What is pooled
            is never held for all tokens and layers.

        Raises:
            InputError: the model does not give the hidden states that its layers promise.
        """
        windows, rows = windows.separated(rows)
        self._kept.begin(windows.n_tokens[rows])
        with torch.inference_mode(), autocast(self._precision, self.device):
            self._forward(windows, rows, self._kept)
        return self._kept.result()
