"""The encoder's forward pass over ragged windows, with hardly any padding."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import BertModel

from bertvision.errors import InputError
from bertvision.featurestore.encoding import ChannelStats, ChannelStatsAccumulator
from bertvision.pipelines.batching import collate
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.tasks.windows import Windows

CALIBRATION_WINDOWS = 64
"""Windows that channel statistics are taken from, evenly spread over the split: about 10,000
tokens of SQuAD fix a channel's deviation to 1 %, and the scale per token takes up the rest."""
_PADDING = 0.85  # windows shorter than this part of a batch's longest open a new batch


class Encoder:
    """A snapshot's encoder on this machine's device: windows in, packed hidden states out."""

    def __init__(
        self, model: BertModel, layers: Sequence[int], pad_id: int, precision: Precision
    ) -> None:
        self._device = device()
        self._model = model.eval().to(self._device)
        self._layers = tuple(layers)
        self._states = int(model.config.num_hidden_layers) + 1
        self._pad_id = pad_id
        self._precision = precision
        self.seconds = 0.0

    @torch.inference_mode()
    def __call__(self, windows: Windows, rows: npt.NDArray[np.int64]) -> Tensor:
        """Hidden states of the real tokens of some windows, one window after another.

        Args:
            windows: of a split.
            rows: (batch,) which of them.

        Returns:
            (tokens, layers, hidden) on the device.
        """
        started = time.perf_counter()
        batch = collate(windows, windows.first_token, rows, self._pad_id)
        mask = batch.attention_mask.to(self._device)
        with autocast(self._precision, self._device):
            output = self._model(
                input_ids=batch.input_ids.to(self._device),
                token_type_ids=batch.token_type_ids.to(self._device),
                attention_mask=mask,
                output_hidden_states=True,
            )
        states = output.hidden_states
        if states is None or len(states) != self._states:
            raise InputError(
                f"the encoder gave {len(states or ())} hidden states instead of {self._states}: "
                "this version of transformers is not supported"
            )
        real = mask.bool()
        packed = torch.stack([states[layer][real] for layer in self._layers], dim=1)
        self.seconds += time.perf_counter() - started
        return packed


def length_groups(lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Batches of similar length, longest first, so that padding costs at most a few per cent."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or lengths[order[i]] < _PADDING * lengths[order[start]]:
            groups.append(order[start:i])
            start = i
    return groups


def channel_stats(encoder: Encoder, windows: Windows) -> ChannelStats:
    """Channel statistics of a sample of a split's windows, for the quantised encodings."""
    count = min(CALIBRATION_WINDOWS, len(windows))
    rows = np.linspace(0, len(windows) - 1, count).astype(np.int64)
    rows = rows[np.argsort(windows.n_tokens[rows], kind="stable")]
    accumulator = ChannelStatsAccumulator()
    for batch in np.array_split(rows, -(-count // 8)):
        accumulator.add(encoder(windows, batch))
    return accumulator.result()
