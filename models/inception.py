"""An Inception body that keeps the token axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertvision.models.convolution import Conv, ConvNorm, Rows, flatten, same, to_image
from bertvision.models.heads import SpanHead, check_dimensions
from bertvision.models.pooling import Reduction

# Channels of the branches of each module: 1×1; 1×1 → 3×3; 1×1 → 5×5; pooling → 1×1 (table 1 of
# Szegedy et al.). An empty one halves the width by pooling.
_MODULES: tuple[tuple[int, ...], ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


class Inception(nn.Module):
    """Four branches on the same image, side by side.

    Szegedy et al. (2015, *Going Deeper with Convolutions*, figure 2b), with BatchNorm before each
    ReLU as Ioffe & Szegedy (2015) added it; the pooling is along the width.

    Args:
        inputs: channels of the input.
        sizes: channels of the convolutions: 1×1; 1×1, 3×3; 1×1, 5×5; 1×1 after pooling.
    """

    def __init__(self, inputs: int, sizes: Sequence[int]) -> None:
        super().__init__()
        one, reduced3, three, reduced5, five, pooled = sizes
        self.one = ConvNorm(Conv(inputs, one, (1, 1)))
        self.reduced3 = ConvNorm(Conv(inputs, reduced3, (1, 1)))
        self.three = ConvNorm(Conv(reduced3, three, (3, 3)))
        self.reduced5 = ConvNorm(Conv(inputs, reduced5, (1, 1)))
        self.five = ConvNorm(Conv(reduced5, five, (5, 5)))
        self.pooled = ConvNorm(Conv(inputs, pooled, (1, 1)))
        self.outputs = one + three + five + pooled

    def forward(self, image: Tensor, rows: Rows) -> Tensor:
        """Convolve: (tokens, inputs, 1, width) → (tokens, outputs, 1, width)."""
        branches = [
            self.one(image),
            self.three(F.relu(self.reduced3(image)), rows),
            self.five(F.relu(self.reduced5(image)), rows),
            self.pooled(F.max_pool2d(image, (1, 3), 1, (0, 1))),
        ]
        return F.relu(torch.cat(branches, dim=1))


class InceptionSpanHead(SpanHead):
    """The body of Inception v1 on learned pooling and an adapter, strides along the width only.

    7×7 of 64 with stride 2, pooling, 1×1 of 64, 3×3 of 192, pooling, nine `Inception` modules with
    pooling after the second and the seventh; flattened, then the output layer.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        size: width of the adapter.
    """

    def __init__(self, *, layers: int, hidden: int, size: int = 386) -> None:
        check_dimensions(layers, hidden)
        width = size
        for _ in range(5):
            width = same(width, 2)
        super().__init__(layers=layers, hidden=hidden, width=1024 * width)
        self.reduction = Reduction(layers, hidden, "learned", size)
        self.first = ConvNorm(Conv(1, 64, (7, 7), stride=2))
        self.second = ConvNorm(Conv(64, 64, (1, 1)))
        self.third = ConvNorm(Conv(64, 192, (3, 3)))
        self.body = nn.ModuleList()
        inputs = 192
        for sizes in _MODULES:
            if not sizes:
                self.body.append(nn.MaxPool2d((1, 3), (1, 2), (0, 1)))
            else:
                module = Inception(inputs, sizes)
                self.body.append(module)
                inputs = module.outputs

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """Features of each token: (tokens, 1024 × width / 32)."""
        rows = Rows.between(lengths, len(hidden_states), 3, hidden_states.device)
        image = _halve(F.relu(self.first(to_image(self.reduction(hidden_states)), rows)))
        image = F.relu(self.third(F.relu(self.second(image)), rows))
        image = _halve(image)
        for module in self.body:
            image = module(image, rows) if isinstance(module, Inception) else module(image)
        return [flatten(image)]


def _halve(image: Tensor) -> Tensor:
    return F.max_pool2d(image, (1, 3), (1, 2), (0, 1))
