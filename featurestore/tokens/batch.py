"""TokenBatch: vectors of single tokens in a few layers, still encoded, and where they are from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertvision.errors import counted
from bertvision.featurestore.format.encoding import ChannelStats, decode


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenBatch:
    """Vectors of single tokens, in the order they were drawn.

    Attributes:
        codes: (n, layers, `Encoding.codes_size`) in the encoding's dtype. In memory each layer is
            contiguous.
        scale: (n, layers, *`Encoding.scale_shape`), or None for float encodings.
        stats: channel statistics, times the scale factors, or None for float encodings.
        factors: (layers,) float32 that decoded vectors are multiplied by, or None.
        examples: (n,) int64 the example of the split that each token is of.
        positions: (n,) int64 its place in that example.
        side_by_side: whether vectors have an axis of layers.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> batch = next(iter(split.tokens([0, -1], batch_size=256)))
        >>> batch
        <TokenBatch: 256 tokens, 2 layers × 32, float32 on cpu>
        >>> batch.vectors.shape
        torch.Size([256, 2, 32])
        >>> example, position = int(batch.examples[0]), int(batch.positions[0])
        >>> bool((split[example][position, :, -1] == batch.vectors[0, -1]).all())
        True
        >>> split.text(example)[position]  # what the token stands for
        '1902'
    """

    codes: Tensor
    scale: Tensor | None
    stats: ChannelStats | None
    factors: Tensor | None
    examples: Tensor
    positions: Tensor
    side_by_side: bool

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        tokens, layers, hidden = self.shape
        dtype = str(self.codes.dtype).removeprefix("torch.")
        return (
            f"<TokenBatch: {counted(tokens, 'token')}, {counted(layers, 'layer')} × {hidden}, "
            f"{dtype} on {self.codes.device}>"
        )

    @property
    def vectors(self) -> Tensor:
        """(n, hidden), or (n, layers, hidden) side by side; float32, decoded at each access."""
        return self.decode()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, layers and channels."""
        tokens, layers, width = self.codes.shape
        return tokens, layers, width if self.stats is None else self.stats.mean.shape[-1]

    def decode(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """The vectors, (n, hidden) or (n, layers, hidden), where the codes are.

        Args:
            dtype: of the vectors.
            out: contiguous memory for them, of the batch's `shape`; new memory by default.
        """
        states = decode(self.codes, self.scale, self.stats, dtype, out)
        if self.factors is not None:
            states = torch.mul(states, self.factors.to(dtype)[:, None], out=out)
        return states if self.side_by_side else states[:, 0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """The batch on a device: codes travel, decoding happens there."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return replace(
            self,
            codes=move(self.codes),
            scale=None if self.scale is None else move(self.scale),
            stats=None if self.stats is None else ChannelStats(*map(move, self.stats)),
            factors=None if self.factors is None else move(self.factors),
            examples=move(self.examples),
            positions=move(self.positions),
        )
