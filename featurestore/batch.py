"""ActivationBatch: packed activations of several examples, still encoded, ready for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bertvision.errors import counted
from bertvision.featurestore.format.encoding import ChannelStats, decode
from bertvision.featurestore.format.logits import TopLogits


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ActivationBatch:
    """Activations of real tokens only: no padding is stored, read or sent to the device.

    ``hidden_states``, ``lengths``, ``labels`` and ``examples`` are called as in the batches that a
    Trainer's module is given, so that the same code takes both.

    Attributes:
        codes: (tokens, layers, `Encoding.codes_size`) in the encoding's dtype, examples one after
            another: (tokens, layers, hidden) but for int4. In memory each layer is contiguous.
        scale: (tokens, layers, *`Encoding.scale_shape`), or None for float encodings.
        stats: channel statistics of the split, or None for float encodings.
        lengths: (batch,) int64 tokens of each example.
        examples: (batch,) int64 position of each example in the split.
        labels: per-example arrays of the split by name, each (batch, …).
        memory: Source of memory for decoded states, by shape and dtype; new memory where it is
            None.
        logits: Log-probabilities of the next tokens, (tokens, …) each, where they were asked for.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> batch = split.read([3, 1, 4], layers=[0, -1])
        >>> batch
        <ActivationBatch: 3 examples of 143 tokens, 2 layers × 32, float32 on cpu, 0.0 MB>
          labels: answerable, end_positions, question_index, start_positions
        >>> batch.hidden_states.shape
        torch.Size([143, 2, 32])
        >>> [tuple(states.shape) for states in batch.unpack()]
        [(30, 32, 2), (83, 32, 2), (30, 32, 2)]
    """

    codes: Tensor
    scale: Tensor | None
    stats: ChannelStats | None
    lengths: Tensor
    examples: Tensor
    labels: dict[str, Tensor]
    memory: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None
    logits: TopLogits | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        tokens, layers, width = self.codes.shape
        hidden = width if self.stats is None else self.stats.mean.shape[-1]
        dtype = str(self.codes.dtype).removeprefix("torch.")
        return (
            f"<ActivationBatch: {counted(len(self), 'example')} of {counted(tokens, 'token')}, "
            f"{counted(layers, 'layer')} × {hidden}, {dtype} on {self.codes.device}, "
            f"{self.codes.nbytes / 1e6:,.1f} MB>\n"
            f"  labels: {', '.join(sorted(self.labels)) or 'none'}"
        )

    @property
    def hidden_states(self) -> Tensor:
        """(tokens, layers, hidden) float32, decoded where the codes are, anew at each access."""
        return self.decode()

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
            logits=self.logits and self.logits.map(move),
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
            logits=self.logits and self.logits.map(Tensor.pin_memory),
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Hidden states of the real tokens, (tokens, layers, hidden)."""
        out = None
        if self.memory is not None and (self.codes.dtype != dtype or self.stats is not None):
            width = self.codes.shape[2] if self.stats is None else self.stats.mean.shape[-1]
            out = self.memory((*self.codes.shape[:2], width), dtype)
        return decode(self.codes, self.scale, self.stats, dtype, out)

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
