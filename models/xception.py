"""Xception bodies: residual blocks of separable convolutions, over tokens or over [CLS] alone.

Chollet (2017, *Xception: Deep Learning with Depthwise Separable Convolutions*, figure 5), with
strides along the width only, and average instead of maximum pooling.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from bertvision.errors import InputError
from bertvision.models.convolution import (
    Conv,
    ConvNorm,
    Rows,
    SeparableNorm,
    average_pool,
    flatten,
    same,
    to_image,
)
from bertvision.models.heads import ClassificationHead, SpanHead, check_dimensions
from bertvision.models.pooling import Reduction

_SMALLEST = 9  # (9 - 3) / 3 + 1 = 3 positions after the first convolution, as the second needs


class Residual(nn.Module):
    """Separable convolutions with ReLU between them, plus their input.

    Args:
        channels: Channels of the input and after each convolution.
        kernel: (tokens, width) of the convolutions.
        halve: also pool the width by 2, and bring the input there by a 1×1 convolution; else the
            input is added as it is.
        activated: the input has passed a ReLU already.
    """

    def __init__(
        self,
        channels: Sequence[int],
        kernel: tuple[int, int],
        *,
        halve: bool = True,
        activated: bool = False,
    ) -> None:
        super().__init__()
        self.activated = activated
        self.separable = nn.ModuleList(SeparableNorm(a, b, kernel) for a, b in pairwise(channels))
        first, last = channels[0], channels[-1]
        self.shortcut = ConvNorm(Conv(first, last, (1, 1), stride=2)) if halve else None

    def forward(self, image: Tensor, rows: Rows | None = None) -> Tensor:
        """Add: (tokens, channels, 1, width) → (tokens, last channels, 1, width or ⌈width / 2⌉)."""
        result = image
        for i, separable in enumerate(self.separable):
            if i or not self.activated:
                result = F.relu(result)
            result = separable(result, rows)
        if self.shortcut is None:
            return result + image
        added: Tensor = average_pool(result) + self.shortcut(image)
        return added


class XceptionSpanHead(SpanHead):
    """An Xception body of 3×3 kernels on learned pooling and an adapter, keeping the token axis.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        size: width of the adapter, at least 5.
    """

    def __init__(self, *, layers: int, hidden: int, size: int = 386) -> None:
        check_dimensions(layers, hidden)
        width = same(same(same(size, 2) - 2, 2), 2)
        super().__init__(layers=layers, hidden=hidden, width=1536 * width)
        self.reduction = Reduction(layers, hidden, "learned", size)
        square = (3, 3)
        self.first = ConvNorm(Conv(1, 64, square, stride=2))
        self.second = ConvNorm(Conv(64, 128, square, valid=True))
        self.blocks = nn.ModuleList(
            [
                Residual((128, 728, 728), square, activated=True),
                Residual((728, 728, 728, 728), square, halve=False),
                Residual((728, 728, 1024), square),
            ]
        )
        self.last = SeparableNorm(1024, 1536, square)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """Features of each token: (tokens, 1536 × width / 8)."""
        rows = Rows.between(lengths, len(hidden_states), 1, hidden_states.device)
        image = F.relu(self.first(to_image(self.reduction(hidden_states)), rows))
        image = F.relu(self.second(image, rows))
        for block in self.blocks:
            image = block(image, rows)
        return [flatten(F.relu(self.last(image, rows)))]


class _XceptionClassHead(ClassificationHead):
    """Two convolutions, blocks, mean over the width: 1×3 kernels, a channel per state.

    Args:
        layers: number of states of [CLS].
        hidden: width of the states, at least 9.
        stem: channels of the two convolutions; the first has stride 3, neither is padded.
        blocks: Blocks that follow them.
        features: channels at the end.
        skip: concatenate the last state.
        classes: logits.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        stem: tuple[int, int],
        blocks: Sequence[nn.Module],
        features: int,
        skip: bool = False,
        classes: int = 2,
    ) -> None:
        width = features + hidden * skip
        super().__init__(layers=layers, hidden=hidden, width=width, classes=classes)
        if hidden < _SMALLEST:
            raise InputError(
                f"hidden={hidden}: the convolutions of an Xception head need hidden states of "
                f"width {_SMALLEST} or more; take another head (`bertvision heads`)"
            )
        first, second = stem
        self.first = ConvNorm(Conv(layers, first, (1, 3), stride=3, valid=True))
        self.second = ConvNorm(Conv(first, second, (1, 3), valid=True))
        self.blocks = nn.Sequential(*blocks)
        self.skip = skip

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """Mean of each channel (batch, features); with skip, the last state (batch, hidden)."""
        image = F.relu(self.second(F.relu(self.first(to_image(hidden_states)))))
        mean = self.blocks(image).mean(dim=(2, 3))
        return [mean, hidden_states[:, -1]] if self.skip else [mean]


class XceptionAbbreviatedClassHead(_XceptionClassHead):
    """The entry of Xception: two convolutions and one residual block.

    Args:
        layers: number of states of [CLS].
        hidden: width of the states, at least 9.
        skip: concatenate the last state before the output layer.
        classes: logits.
    """

    def __init__(self, *, layers: int, hidden: int, skip: bool = False, classes: int = 2) -> None:
        block = Residual((128, 256, 512), (1, 3), activated=True)
        super().__init__(
            layers=layers,
            hidden=hidden,
            stem=(64, 128),
            blocks=[block],
            features=512,
            skip=skip,
            classes=classes,
        )


class XceptionFullClassHead(_XceptionClassHead):
    """The whole of Xception: entry, eight middle blocks, exit.

    Args:
        layers: number of states of [CLS].
        hidden: width of the states, at least 9.
        classes: logits.
    """

    def __init__(self, *, layers: int, hidden: int, classes: int = 2) -> None:
        row = (1, 3)
        blocks = [
            Residual((64, 128, 128), row, activated=True),
            Residual((128, 256, 256), row),
            Residual((256, 728, 728), row),
            *(Residual((728, 728, 728, 728), row, halve=False) for _ in range(8)),
            Residual((728, 728, 1024), row),
            SeparableNorm(1024, 1536, row),
            nn.ReLU(),
            SeparableNorm(1536, 2048, row),
            nn.ReLU(),
        ]
        super().__init__(
            layers=layers,
            hidden=hidden,
            stem=(32, 64),
            blocks=blocks,
            features=2048,
            classes=classes,
        )
