"""A task's output layers compute in float32, whatever the encoder under them computes in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.models.outputs import without_autocast


class Float32Linear(nn.Linear):
    """A linear layer that mixed precision leaves alone; its weights are as those of its base."""

    def forward(self, features: Tensor) -> Tensor:
        """Logits in float32, (…, outputs), of features (…, width) in any precision."""
        with without_autocast(features):
            return F.linear(features.float(), self.weight, self.bias)


def keep_outputs_in_float32(model: PreTrainedModel) -> None:
    """Make the linear layers above the encoder `Float32Linear`, in place.

    In bfloat16 the best tokens of a window are often equal, and which is answered is then chance.

    Args:
        model: with a task's output layer.
    """
    encoder = set(model.base_model.modules())
    for module in model.modules():
        if type(module) is nn.Linear and module not in encoder:
            module.__class__ = Float32Linear  # weights, names and hooks stay
