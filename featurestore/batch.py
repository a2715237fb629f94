"""ActivationBatch: packed activations of several examples, still encoded, ready for a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bertvision.featurestore.format.encoding import ChannelStats, decode


@dataclass(frozen=True, slots=True, eq=False)
class ActivationBatch:
    """Activations of real tokens only: no padding is stored, read or sent to the device.

    Attributes:
        codes: (tokens, layers, `Encoding.codes_size`) in the encoding's dtype, examples one after
            another: (tokens, layers, hidden) but for int4. In memory each layer is contiguous.
        scale: (tokens, layers, *`Encoding.scale_shape`), or None for float encodings.
        stats: channel statistics of the split, or None for float encodings.
        lengths: (batch,) int64 tokens of each example.
        examples: (batch,) int64 position of each example in the split.
        labels: per-example arrays of the split by name, each (batch, …).
    """

    codes: Tensor
    scale: Tensor | None
    stats: ChannelStats | None
    lengths: Tensor
    examples: Tensor
    labels: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ActivationBatch:
        """The batch on a device: codes travel, decoding happens there."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return ActivationBatch(
            codes=move(self.codes),
            scale=None if self.scale is None else move(self.scale),
            stats=None if self.stats is None else ChannelStats(*map(move, self.stats)),
            lengths=move(self.lengths),
            examples=move(self.examples),
            labels={name: move(x) for name, x in self.labels.items()},
        )

    def pin_memory(self) -> ActivationBatch:
        """The batch in page-locked memory, for asynchronous copies to a CUDA device."""
        return ActivationBatch(
            codes=self.codes.pin_memory(),
            scale=None if self.scale is None else self.scale.pin_memory(),
            stats=self.stats,
            lengths=self.lengths.pin_memory(),
            examples=self.examples.pin_memory(),
            labels={name: x.pin_memory() for name, x in self.labels.items()},
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Hidden states of the real tokens, (tokens, layers, hidden)."""
        return decode(self.codes, self.scale, self.stats, dtype)

    def padded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Hidden states as (batch, seq, hidden, layers), zeros after each example's last token."""
        hidden_states = self.decode(dtype)
        seq = int(self.lengths.max())
        position = torch.arange(seq, device=hidden_states.device)
        mask = position < self.lengths.unsqueeze(1)
        frame = hidden_states.new_zeros(len(self), seq, *hidden_states.shape[1:])
        frame[mask] = hidden_states
        return frame.transpose(2, 3)

    def unpack(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Hidden states of each example, views of shape (seq, hidden, layers)."""
        parts = self.decode(dtype).split(self.lengths.tolist())
        return [part.transpose(1, 2) for part in parts]
