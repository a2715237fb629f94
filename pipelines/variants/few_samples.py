"""Variants that steady fine-tuning on few examples.

Zhang et al. (2021, arXiv:2006.05987), *Revisiting Few-sample BERT Fine-tuning*; Mosbach et al.
(2021, arXiv:2006.04884), *On the Stability of Fine-tuning BERT*; Lee et al. (2020,
arXiv:1909.11299), *Mixout*.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.variants.depth import initialise
from bertvision.pipelines.variants.variant import (
    Groups,
    Variant,
    embeddings,
    fraction,
    integer,
    transformer_layers,
)


class Reinitialise(Variant):
    """``reinit:N``: the pooler and the last N layers begin with new weights (Zhang et al., 4)."""

    needs = "layers"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        if integer(self, 0) > layers:
            raise InputError(
                f"--variant {self}: the encoder has {layers} layers; re-initialise 0 to {layers}"
            )

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        layers = list(transformer_layers(model))
        parts: list[nn.Module] = layers[len(layers) - integer(self, 0) :]
        pooler = getattr(model.base_model, "pooler", None)
        for part in [*parts, *([pooler] if pooler is not None else [])]:
            initialise(model, part)


class NoBiasCorrection(Variant):
    """``no-bias-correction``: Adam as the code of Devlin et al. (2019) has it.

    Its first steps are then far larger, which Zhang et al. (section 3) hold for what makes
    fine-tuning on few examples fail.
    """

    def optimizer(self, groups: Groups, lr: float) -> torch.optim.Optimizer:
        """See `Variant.optimizer`."""
        return PlainAdam(groups, lr)


class PlainAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) without lines 9 and 10: moments as they are.

    The update is lr · m / (√v + ε), and of a group with ``weight_decay`` lr · decay · p more.
    """

    def __init__(self, groups: Groups, lr: float) -> None:
        """Optimise ``groups`` at rate ``lr``, with β of 0.9 and 0.999 and ε of 1e-8."""
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step along the gradients."""
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            if not moving:
                continue
            for p in moving:
                if not self.state[p]:
                    self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            slopes = [p.grad for p in moving]
            m, v = ([self.state[p][key] for p in moving] for key in ("m", "v"))
            torch._foreach_lerp_(m, slopes, 1 - 0.9)
            torch._foreach_mul_(v, 0.999)
            torch._foreach_addcmul_(v, slopes, slopes, 1 - 0.999)
            if group["weight_decay"]:
                torch._foreach_mul_(moving, 1 - group["lr"] * group["weight_decay"])
            roots = torch._foreach_sqrt(v)
            torch._foreach_add_(roots, 1e-8)
            torch._foreach_addcdiv_(moving, m, roots, -group["lr"])


class LayerwiseDecay(Variant):
    """``layer-decay:F``: each layer learns F times as fast as the one above it, embeddings least.

    Howard & Ruder (2018, arXiv:1801.06146) and ELECTRA's code; Zhang et al. compare with it.
    """

    needs = "factor"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        fraction(self, one=True)

    def groups(self, model: PreTrainedModel, groups: Groups) -> Groups:
        """See `Variant.groups`."""
        layers, factor = list(transformer_layers(model)), fraction(self, one=True)
        scale = {
            id(p): factor ** (len(layers) - i)
            for i, layer in enumerate(layers)
            for p in layer.parameters()
        }
        lowest = factor ** (len(layers) + 1)
        scale |= {id(p): lowest for module in embeddings(model) for p in module.parameters()}
        groups_of_scale = []
        for group in groups:
            by_scale: dict[float, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_scale.setdefault(scale.get(id(p), 1.0), []).append(p)
            groups_of_scale += [
                {**group, "params": parameters, "scale": s} for s, parameters in by_scale.items()
            ]
        return groups_of_scale


class Mixout(Variant):
    """``mixout:P``: in each forward pass of training, weights are the pretrained ones by chance P.

    Of every linear layer of the encoder (Lee et al., equation 5): with W the weight, U the
    pretrained one and M of ones by chance P, the layer computes with
    ((1 − M) ⊙ W + M ⊙ U − P · U) / (1 − P), whose mean is W. Dropout is left as it is.
    """

    needs = "probability"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        fraction(self)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        for module in model.base_model.modules():
            if type(module) is nn.Linear:
                module.__class__ = MixoutLinear  # weights and names stay
                module.register_buffer("pretrained", module.weight.detach().clone(), False)
                module.probability = fraction(self)  # type: ignore[assignment]


class MixoutLinear(nn.Linear):
    """A linear layer whose weights are in part those that it began with, while it is trained."""

    pretrained: Tensor
    probability: float

    def forward(self, x: Tensor) -> Tensor:
        """(…, outputs) of (…, inputs)."""
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        p = self.probability
        is_pretrained = (torch.rand_like(self.weight) >= p).to(self.weight.dtype)
        mixed = torch.lerp(self.pretrained, self.weight, is_pretrained)
        return F.linear(x, (mixed - p * self.pretrained) / (1 - p), self.bias)
