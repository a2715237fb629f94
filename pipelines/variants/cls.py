"""The vector that a sentence is classified by, normalised before the output layer reads it.

Zhou, Du and Ren (2019, arXiv:1911.03918), *Improving BERT Fine-tuning with Embedding
Normalization*; Zhou, Lin and Ren (2021, arXiv:2005.02178), *IsoBN: Fine-Tuning BERT with Isotropic
Batch Normalization*. In both, statistics are of the batches of training, and running means of them
from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.variants.variant import Variant


def output_layer(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """The linear layer that gives the classes' scores, and its name.

    Raises:
        InputError: the family's output is no such layer.
    """
    encoder = set(model.base_model.modules())
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module not in encoder
        and module.out_features == model.config.num_labels
    ]
    if not layers:
        raise InputError(
            f"{model.config.model_type} has no linear output layer to normalise the input of"
        )
    return layers[-1]


class _Normalised(Variant):
    """Normalise the input of the output layer by a layer of this kind."""

    kinds = ("classification",)
    reads_cls = True
    alone = "has statistics of whole batches"
    layer: type[nn.Module]

    def build(self, model: PreTrainedModel) -> None:
        """See `Variant.build`."""
        name, linear = output_layer(model)
        norm = self.layer(linear.in_features)
        linear.add_module("norm", norm.to(linear.weight.device))
        linear.register_forward_pre_hook(_normalise)
        self.state = tuple(f"{name}.norm.{key}" for key in norm.state_dict())


def _normalise(linear: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    norm = linear.norm
    assert isinstance(norm, nn.Module)
    return norm(args[0].float()), *args[1:]


class Standardised(nn.BatchNorm1d):
    """Mean 0 and variance 1 of each channel, over the batch; without a scale of its own."""

    def __init__(self, width: int) -> None:
        """Normalise vectors of ``width`` channels."""
        super().__init__(width, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width); a batch of one is normalised by the running statistics."""
        if self.training and len(x) == 1:
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(x)


class IsotropicNorm(nn.Module):
    """IsoBN: channels that vary much, and with many others, are scaled down.

    With σ the standard deviations, ρ the correlations and γ_i the mean of ρ_ij² over j, channel i
    is multiplied by θ_i = (σ_i γ_i + ε)^(−1/2), and all by the factor that leaves the sum of the
    variances as it was. Gradients do not pass through θ.
    """

    momentum = 0.05
    eps = 1e-3
    covariance: Tensor
    batches: Tensor

    def __init__(self, width: int) -> None:
        """Normalise vectors of ``width`` channels."""
        super().__init__()
        self.register_buffer("covariance", torch.zeros(width, width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width); as it is before any batch of two was seen."""
        if self.training and len(x) > 1:
            self._see(x.detach())
        return x * self.scale() if self.batches else x

    @torch.no_grad()
    def _see(self, x: Tensor) -> None:
        centred = x - x.mean(0)
        with torch.autocast(x.device.type, enabled=False):  # statistics are in float32
            covariance = centred.T @ centred / len(x)
        # the first batch counts in full: a mean with zeros would make correlations above 1
        self.covariance.lerp_(covariance, self.momentum if self.batches else 1.0)
        self.batches += 1

    @torch.no_grad()
    def scale(self) -> Tensor:
        """θ, (width,), of the running statistics."""
        variance = self.covariance.diagonal()
        sigma = variance.clamp_min(0).sqrt()
        rho = self.covariance / torch.outer(sigma, sigma).clamp_min(1e-12)
        theta = (sigma * rho.square().mean(1) + self.eps).rsqrt()
        left = (variance * theta.square()).sum().clamp_min(1e-12)
        return theta * (variance.sum() / left).sqrt()


class ClsNorm(_Normalised):
    """``cls-norm``: each channel of the vector has mean 0 and variance 1 over the batch."""

    layer = Standardised


class IsoBn(_Normalised):
    """``isobn``: the vector goes through `IsotropicNorm`."""

    layer = IsotropicNorm
