"""A snapshot's encoder: windows in, hidden states out, of all tokens or pooled.

BERT and the families like it compute packed windows, without padding; any other encoder computes
windows of like length, padded, as far as that changes no state (see docs/encoders.md).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bertvision.featurestore.format.logits import TopLogits
from bertvision.pipelines.encoders.families import position_offset
from bertvision.pipelines.encoders.forward import PackedForward, PaddedForward, can_pack
from bertvision.pipelines.encoders.kept_states import KeptStates, kept_tokens
from bertvision.pipelines.encoders.loading import embedded_words
from bertvision.pipelines.encoders.padding_trial import (
    BATCHINGS,
    PACKED,
    PADDED,
    Batching,
    Compute,
    choose_batching,
    first_batching,
    trial_rows,
    trial_windows,
)
from bertvision.pipelines.encoders.sites.names import width_of
from bertvision.pipelines.encoders.vocabulary_head import NextTokens
from bertvision.pipelines.poolings import SpecialEnds, TokenPooling, column_of
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.tasks.windows import Windows


class HiddenStateSource(Protocol):
    """Source of the hidden states of windows: an `Encoder`, or the store (`StoredTokens`)."""

    device: torch.device
    """Where it computes."""
    tokens: tuple[TokenPooling, ...]
    """Poolings that it gives of each window."""
    attention: str
    """Name of the attention that is computed, for the provenance of a split."""

    @property
    def logits(self) -> TopLogits | None:
        """See `Encoder.logits`."""

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
        precision: Precision of the forward pass.
        sites: names of sites (see `sites.names`), which then stand in the place of the hidden
            states: ``layers`` counts them from 0.
        alone: Whether each window is computed by itself, by the model's own forward pass: slower,
            and what all else is compared with.
        special: Special tokens at the ends of each window, which `poolings` ask for.
        next_tokens: Reader of the next token from a decoder's last hidden states.

    Raises:
        InputError: The model cannot compute texts, or computes other states of the same window each
            time (see `padding_trial`), or the sites are of several widths.

    Attributes:
        device: Device that computes.
        model: Model that computes.
        tokens: Tokens or poolings of each window, in the order of ``layers``.
        attention: name of the attention that it computes, for the provenance of a split.
        logits: Log-probabilities of the tokens that the last call gave, with ``next_tokens``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[TokenPooling, Sequence[int]],
        precision: Precision,
        sites: Sequence[str] = (),
        *,
        alone: bool = False,
        special: SpecialEnds = (True, True),
        next_tokens: NextTokens | None = None,
    ) -> None:
        self.device = device()
        self.logits: TopLogits | None = None
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.tokens: tuple[TokenPooling, ...] = tuple(layers)
        self._precision = precision
        width, hidden = width_of(sites, model.config), width_of((), model.config)
        self._kept = KeptStates(layers, width, self.device, special)
        wanted = sorted(
            {layer for layers_of_pooling in layers.values() for layer in layers_of_pooling}
        )
        self._forward: PackedForward | PaddedForward = (
            PackedForward(self.model, wanted, precision, sites)
            if can_pack(self.model) and not alone
            else PaddedForward(self.model, wanted, sites, next_tokens)
        )
        # what is kept of a batch takes no more memory than hidden states do
        self._share = max(
            1, ceil(len(sites) * width / hidden / (int(model.config.num_hidden_layers) + 1))
        )
        self.attention = self._forward.attention
        is_padded = isinstance(self._forward, PaddedForward)
        trial = trial_windows(PADDED if is_padded else PACKED, *_sizes(self.model))
        pointed = {p: np.zeros(len(trial), np.int32) for p in self.tokens if column_of(p)}
        trial = replace(trial, places=pointed)
        if isinstance(self._forward, PaddedForward):
            self._forward.batching = "single" if alone else first_batching(model.config)
        self._try(trial, np.arange(len(trial)))
        if isinstance(self._forward, PaddedForward):
            self._batching = self._forward.batching

    def check(self, windows: Windows) -> None:
        """Try windows of a split too, for models whose arithmetic depends on the length.

        Args:
            windows: Windows that are going to be computed.

        Raises:
            InputError: As of the encoder itself.
        """
        if not isinstance(self._forward, PaddedForward) or not len(windows):
            return
        if windows.parts is not None:
            windows, _ = windows.separated(np.arange(min(len(windows), 16)))
        self._settle(self._batching)  # not what another split's lengths asked for
        if len(rows := trial_rows(windows.n_tokens, self._forward.group_tokens)):
            self._try(windows, rows)

    def _try(self, windows: Windows, rows: npt.NDArray[np.int64]) -> None:
        """Choose the windows that are computed together, so that none has other states for it."""
        forward = self._forward
        given = forward.batching if isinstance(forward, PaddedForward) else "single"

        def compute(batching: Batching) -> Compute:
            if isinstance(forward, PaddedForward):
                forward.batching = batching
            return self._given

        batching = choose_batching(
            compute,
            *(windows, rows),
            allowed=BATCHINGS[BATCHINGS.index(given) :],
            precision=self._trial_precision,
            model=f"a {self.model.config.model_type} model",
        )
        self._settle(batching)

    def _settle(self, batching: Batching) -> None:
        """Compute windows together like this from now on, where they are padded at all."""
        if isinstance(self._forward, PaddedForward):
            self._forward.batching = batching
            # so that states of before, which padding may have changed, are never added to
            together = {"like": "", "equal": "-of-equal-lengths", "single": "-one-by-one"}[batching]
            self.attention = self._forward.attention + together

    @property
    def _trial_precision(self) -> Precision:
        """Rounding would hide a difference: but weights that were cast are as they are."""
        return self._precision if isinstance(self._forward, PackedForward) else "32"

    def _given(self, windows: Windows, rows: npt.NDArray[np.int64]) -> list[Tensor]:
        """The hidden states of some windows, in the precision of a trial."""
        return self._states(windows, rows, self._trial_precision)

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
        most = self._forward.batch_tokens.on(self.device) // self._share
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
            windows: Windows of a split. Items that one window holds are computed each by itself.
            rows: (batch,) which of them.

        Returns:
            For each of ``tokens``, (tokens, layers, hidden) of all tokens, or of those that
            ``windows.keep`` keeps, or (windows, layers, hidden) of a pooling: float32 on the
            device, in memory that the next call reuses (fresh memory takes several times as long
            to fill); each layer is contiguous. What is pooled is never held for all tokens and
            layers.

        Raises:
            InputError: the model does not give the hidden states that its layers promise.
        """
        return self._states(windows, rows, self._precision)

    def _states(
        self, windows: Windows, rows: npt.NDArray[np.int64], precision: Precision
    ) -> list[Tensor]:
        chosen = windows.kept_of(rows)
        windows, rows = windows.separated(rows)
        self._kept.begin(windows.n_tokens[rows], windows.places_of(rows))
        with torch.inference_mode(), autocast(precision, self.device):
            self._forward(windows, rows, self._kept)
        states = self._kept.result()
        if isinstance(self._forward, PaddedForward):
            self.logits = self._forward.logits
        if chosen is None:
            return states
        self.logits = self.logits and self.logits.map(itemgetter(chosen))
        here = torch.from_numpy(chosen).to(self.device)
        # each layer stays contiguous
        return [kept.transpose(0, 1)[:, here].transpose(0, 1) for kept in states]


def _sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Rows of a model's embedding matrix, and the tokens of its longest window."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return embedded_words(model), sys.maxsize
    return embedded_words(model), max(1, positions - position_offset(model))
