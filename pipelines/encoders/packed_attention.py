"""Attention of windows that lie one after another on one token axis, without any padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

PACKED_ATTENTION = "sdpa-packed"
"""Name of the attention below in transformers' registry, and in the provenance of a split."""


class Packing(NamedTuple):
    """Where windows lie on the token axis of a batch, and in a padded frame (batch × seq).

    Attributes:
        lengths: tokens of each window.
        place: (tokens,) int64 of each token in the frame; None on a CPU, which needs no frame.
        mask: (batch, 1, 1, seq) true for real tokens; None likewise.
    """

    lengths: list[int]
    place: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, lengths: list[int], where: torch.device) -> Packing:
        """The packing of windows of these lengths, for a device."""
        if where.type == "cpu":
            return cls(lengths)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        place = mask.flatten().nonzero().squeeze(1)
        return cls(lengths, place.to(where), mask[:, None, None].to(where))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each window to itself, as transformers calls it.

    A CPU computes window after window; on a GPU that would be too many small kernels, so windows
    are padded to the longest, for this alone: attention is a small part of BERT's arithmetic.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, channels).
        key: likewise.
        value: likewise.
        attention_mask: none is needed.
        packing: which tokens are a window.
        scaling: of the scores.

    Returns:
        (1, tokens, heads, channels), and no weights.
    """
    if packing.place is None or packing.mask is None:
        windows = zip(*(x.split(packing.lengths, 2) for x in (query, key, value)), strict=True)
        done = [
            F.scaled_dot_product_attention(q, k, v, scale=scaling)  # (1, heads, seq, channels)
            for q, k, v in windows
        ]
        return torch.cat(done, dim=2).transpose(1, 2), None
    place, mask = packing.place, packing.mask
    batch, seq = len(mask), mask.shape[-1]

    def framed(x: Tensor) -> Tensor:
        tokens = x.squeeze(0).transpose(0, 1)
        frame = x.new_zeros(batch * seq, *tokens.shape[1:]).index_copy(0, place, tokens)
        return frame.view(batch, seq, *tokens.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        framed(query), framed(key), framed(value), attn_mask=mask, scale=scaling
    )
    return out.transpose(1, 2).flatten(0, 1)[place].unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, lambda *args, **kwargs: None)
