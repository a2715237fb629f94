"""Convolutions over packed tokens: an image with a row per token and a channel per layer.

An image is (tokens, channels, 1, width), channels last in memory. A kernel of one row (1×k) then
is an ordinary convolution on a batch of tokens. One of several rows needs a token's neighbours in
its window: for it alone the rows are laid out under one another with empty rows between windows,
as many as the kernel reaches over, so that no window sees another one. What comes out at the empty
rows is dropped at once. All else (normalisation, activation, pooling, 1×1) sees real tokens only:
padding has no part in the statistics of BatchNorm, and a window's result does not depend on how
long the others are. Nothing ever strides over tokens.

Measured on an AMD EPYC core with AVX-512 and bf16: the three layers of ``cnn-1xn``, forward and
backward, CPU microseconds per token (float32 / bfloat16 autocast; medians of interleaved runs on a
busy machine):

=========================================  =============  ===============
layout                                     7 × 384        25 × 1024
=========================================  =============  ===============
conv1d, channels first                     475 / 258      1292 / 522
strided view and matmul, channels last     917 / 557      2288 / 990
conv2d, channels last, tokens as height    496 / 215      1035 / 459
conv2d, channels last, tokens as batch     363 / 155      724 / 430
=========================================  =============  ===============
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from bertvision.models.outputs import example_lengths


class Rows(NamedTuple):
    """Where the packed tokens of a batch lie when empty rows stand between its windows."""

    place: Tensor
    """(tokens,) int64, the row of each token."""
    total: int
    """Rows, the empty ones included."""

    @classmethod
    def between(cls, lengths: Tensor, tokens: int, gap: int, device: torch.device) -> Rows:
        """Rows with a gap between windows.

        Args:
            lengths: (batch,) integers, tokens per window.
            tokens: number of packed tokens.
            gap: empty rows between windows: half the height of the highest kernel.
            device: Device of the packed tokens.

        Raises:
            InputError: the lengths do not describe the tokens.
        """
        batch = len(example_lengths(lengths, tokens))
        windows = torch.arange(batch, device=device)
        gaps = gap * windows.repeat_interleave(lengths.to(device), output_size=tokens)
        return cls(torch.arange(tokens, device=device) + gaps, tokens + gap * (batch - 1))


def to_image(states: Tensor) -> Tensor:
    """An image: (tokens, channels, width) → (tokens, channels, 1, width), channels last."""
    return states.unsqueeze(2).contiguous(memory_format=torch.channels_last)


def flatten(image: Tensor) -> Tensor:
    """Features of each token: (tokens, channels, 1, width) → (tokens, width × channels)."""
    return image.squeeze(2).transpose(1, 2).flatten(1)  # as they lie in memory


def same(width: int, stride: int) -> int:
    """Width after a convolution or pooling with 'same' padding: ⌈width / stride⌉."""
    return -(-width // stride)


class Conv(nn.Conv2d):
    """A convolution without bias that keeps all tokens.

    Weights begin uniform as Glorot & Bengio (2010, equation 16) have them, the default of Keras.
    'Same' padding is (kernel - 1) / 2 on both sides, which gives ⌈width / stride⌉ for odd kernels.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        kernel: (tokens, width), both odd.
        stride: along the width.
        dilation: along the width.
        groups: Groups of channels.
        valid: no padding along the width: it shrinks by the kernel less 1 before the stride.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int],
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        valid: bool = False,
    ) -> None:
        rows, columns = kernel
        sides = 0 if valid else dilation * (columns - 1) // 2
        super().__init__(
            inputs,
            outputs,
            kernel,
            stride=(1, stride),
            padding=((rows - 1) // 2, sides),
            dilation=(1, dilation),
            groups=groups,
            bias=False,
        )
        nn.init.xavier_uniform_(self.weight)

    def forward(self, image: Tensor, rows: Rows | None = None) -> Tensor:
        """Convolve: (tokens, inputs, 1, width) → (tokens, outputs, 1, its width).

        Args:
            image: Image of packed tokens.
            rows: Rows with gaps of at least half the kernel; needed if it spans several tokens.
        """
        if rows is None or self.kernel_size[0] == 1:
            return super().forward(image)
        return over_windows(super().forward, image, rows)


def over_windows(convolve: Callable[[Tensor], Tensor], image: Tensor, rows: Rows) -> Tensor:
    """Let a convolution of several rows see a token's neighbours in its window.

    Args:
        convolve: (1, channels, rows, width) → (1, its channels, rows, its width).
        image: (tokens, channels, 1, width).
        rows: Rows of the tokens.

    Returns:
        (tokens, its channels, 1, its width).
    """
    packed = image.squeeze(2).transpose(1, 2)  # (tokens, width, channels), as it lies in memory
    spread = packed.new_zeros(rows.total, *packed.shape[1:]).index_copy(0, rows.place, packed)
    result = convolve(spread.permute(2, 0, 1).unsqueeze(0)).squeeze(0)  # (channels, rows, width)
    return result.permute(1, 2, 0).index_select(0, rows.place).transpose(1, 2).unsqueeze(2)


class ConvNorm(nn.Module):
    """A `Conv`, then BatchNorm (Ioffe & Szegedy 2015) over all tokens and positions.

    Args:
        conv: the convolution.
    """

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(conv.out_channels)

    def forward(self, image: Tensor, rows: Rows | None = None) -> Tensor:
        """As `Conv.forward`."""
        normed: Tensor = self.norm(self.conv(image, rows))
        return normed


class SeparableNorm(nn.Module):
    """A separable convolution: each channel by itself, then 1×1 across channels, then BatchNorm.

    Chollet (2017, *Xception: Deep Learning with Depthwise Separable Convolutions*, section 2). Only
    its input is kept for the backward pass, which computes it again (Chen et al. 2016,
    arXiv:1604.06174): kept whole, a step of the span head on 16 windows of SQuAD took more than
    19 GB.

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        kernel: (tokens, width) of the first, both odd.
    """

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int]) -> None:
        super().__init__()
        self.depthwise = Conv(inputs, inputs, kernel, groups=inputs)
        self.pointwise = ConvNorm(Conv(inputs, outputs, (1, 1)))

    def forward(self, image: Tensor, rows: Rows | None = None) -> Tensor:
        """As `Conv.forward`, the width unchanged."""
        if not (torch.is_grad_enabled() and image.requires_grad):
            return self._mixed(image, rows)
        # running statistics take each batch in twice so, until they are computed anew
        states: Tensor = checkpoint(
            self._mixed, image, rows, use_reentrant=False, preserve_rng_state=False
        )
        return states

    def _mixed(self, image: Tensor, rows: Rows | None) -> Tensor:
        mixed: Tensor = self.pointwise(self.depthwise(image, rows))
        return mixed


def average_pool(image: Tensor) -> Tensor:
    """Mean of 3 along the width, stride 2, 'same'; padding is not counted."""
    return F.avg_pool2d(image, (1, 3), (1, 2), (0, 1), count_include_pad=False)


def recompute_statistics(head: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set running means and variances of BatchNorm to those that the present weights give.

    The running ones are of the last steps, in each of which weights were others. In a body of
    twenty layers that learned for few steps, errors add up from layer to layer until what the head
    says is worthless. So they are the mean over some batches here, with nothing dropped out
    (*precise BatchNorm*, Wu & Johnson 2021, arXiv:2105.07576, section 3). Steps do not use them:
    training goes on as if this had not been called.

    Args:
        head: Head with or without BatchNorm; without, no batch is asked for.
        batches: hidden states (tokens, layers, hidden) and lengths (batch,) of training examples,
            at least one batch.
    """
    norms = [
        module
        for module in head.modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    if not norms:
        return
    training, momenta = head.training, [norm.momentum for norm in norms]
    head.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    with torch.no_grad():
        for hidden_states, lengths in batches:
            head(hidden_states, lengths)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    head.train(training)
