"""Span heads of a few convolutions: along the hidden axis of each token, or over its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertvision.models.convolution import (
    Conv,
    ConvNorm,
    Rows,
    flatten,
    over_windows,
    same,
    to_image,
)
from bertvision.models.heads import SpanHead, check_dimensions
from bertvision.models.pooling import Pooling, Reduction

_DROPOUT = 0.1


class CNNSpanHead(SpanHead):
    """Three 1×k convolutions along the hidden axis, a channel per layer: no token sees another.

    128 filters of 7 with stride 4, 128 of 5 with stride 4, 320 of 5 with stride 2, each followed by
    BatchNorm and ReLU; flattened, dropped out, then the output layer.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        pooling: Pooling of the layers into one channel before, or None to keep a channel per layer.
        size: width of an adapter before, or None.
        dilation: Dilation of the kernels.
        dropout: share of the features of a token that are dropped in training.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        pooling: Pooling | None = None,
        size: int | None = None,
        dilation: int = 1,
        dropout: float = _DROPOUT,
    ) -> None:
        check_dimensions(layers, hidden)
        reduction = Reduction(layers, hidden, pooling, size)
        width = same(same(same(reduction.width, 4), 4), 2)
        super().__init__(layers=layers, hidden=hidden, width=320 * width)
        self.reduction = reduction
        self.body = nn.Sequential()
        inputs = reduction.channels
        for filters, kernel, stride in ((128, 7, 4), (128, 5, 4), (320, 5, 2)):
            conv = Conv(inputs, filters, (1, kernel), stride=stride, dilation=dilation)
            self.body.extend([ConvNorm(conv), nn.ReLU()])
            inputs = filters
        self.dropout = nn.Dropout(dropout)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """Features of each token: (tokens, 320 × width / 32)."""
        return [self.dropout(flatten(self.body(to_image(self.reduction(hidden_states)))))]


class KernelBank(nn.Module):
    """N×N kernels for N = 1 … 7 side by side on one channel, stride 4 along the width.

    Args:
        filters: Filters of each N; 7 times as many come out.
    """

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(torch.empty(filters, 1, n, n) for n in range(1, 8))
        for kernel in self.kernels:
            nn.init.xavier_uniform_(kernel)

    def forward(self, image: Tensor, rows: Rows) -> Tensor:
        """Convolve: (tokens, 1, 1, width) → (tokens, 7 × filters, 1, ⌈width / 4⌉)."""
        padded = []
        for kernel in self.kernels:
            around = 7 - kernel.shape[-1]
            before, after = (around + 1) // 2, around // 2  # an even kernel reaches further ahead
            padded.append(F.pad(kernel, (before, after, before, after)))
        weight = torch.cat(padded)  # one convolution instead of seven
        return over_windows(
            lambda spread: F.conv2d(spread, weight, stride=(1, 4), padding=3), image, rows
        )


class NxNSpanHead(SpanHead):
    """Kernels over neighbouring tokens of the window, after learned pooling and an adapter.

    15 filters each of 1×1, 2×2, … 7×7 with stride 4 along the width, 128 of 5×5 with stride 4,
    320 of 3×3 with stride 2, each followed by BatchNorm and ReLU; flattened, dropped out, then the
    output layer. At the edge of a window the neighbours are zeros.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        size: width of the adapter.
        dropout: share of the features of a token that are dropped in training.
    """

    def __init__(
        self, *, layers: int, hidden: int, size: int = 386, dropout: float = _DROPOUT
    ) -> None:
        check_dimensions(layers, hidden)
        width = same(same(same(size, 4), 4), 2)
        super().__init__(layers=layers, hidden=hidden, width=320 * width)
        self.reduction = Reduction(layers, hidden, "learned", size)
        self.bank = KernelBank(15)
        self.norm = nn.BatchNorm2d(7 * 15)
        self.second = ConvNorm(Conv(7 * 15, 128, (5, 5), stride=4))
        self.third = ConvNorm(Conv(128, 320, (3, 3), stride=2))
        self.dropout = nn.Dropout(dropout)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """Features of each token: (tokens, 320 × width / 32)."""
        rows = Rows.between(lengths, len(hidden_states), 3, hidden_states.device)
        image = self.bank(to_image(self.reduction(hidden_states)), rows)
        image = self.second(F.relu(self.norm(image)), rows)
        image = self.third(F.relu(image), rows)
        return [self.dropout(flatten(F.relu(image)))]
