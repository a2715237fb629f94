"""Attention heads of an encoder, switched off one by one or many at once.

What a head gives is a slice of what the output projection of its layer reads; a closed gate makes
that slice zero (Michel et al. 2019, arXiv:1905.10650, equation 1, with ξ of 0 and 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError

_PROJECTIONS = (
    "attention.output.dense",  # BERT, RoBERTa, ELECTRA, DeBERTa
    "attention.attn.o",  # MPNet
    "attention.out_lin",  # DistilBERT
    "attention.dense",  # ALBERT, whose layers are one
    "attn.Wo",  # ModernBERT
    "attn.c_proj",  # GPT-2
    "self_attn.o_proj",  # Llama and its kin
)
"""Where the families have the output projection of attention: ends of names of modules."""


@contextmanager
def gated(model: PreTrainedModel) -> Iterator[Tensor]:
    """Gates of all attention heads of a model, open at first.

    Args:
        model: an encoder, with an output layer or without.

    Yields:
        (layers, heads) float32: 1 lets a head through, 0 does not. Set its elements between
        forward passes; when the block is left the model is as it was.

    Raises:
        InputError: it is not known where the family has its attention heads.
    """
    encoder, config = model.base_model, model.config
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    found = [m for name, m in encoder.named_modules() if name.endswith(_PROJECTIONS)]
    if len(found) not in (1, layers):
        raise InputError(
            f"it is not known where {config.model_type} has its attention heads: found "
            f"{len(found)} output projections of attention for {layers} layers; BERT, RoBERTa, "
            "ELECTRA, DeBERTa, MPNet, DistilBERT, ALBERT, ModernBERT, GPT-2 and Llama can be masked"
        )
    gates = torch.ones(layers, heads)
    passes = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal passes
        passes = 0

    def close(number: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal passes
        layer = number if len(found) == layers else passes  # one that is shared comes in all places
        passes += 1
        width = args[0].shape[-1] // heads
        return (args[0] * gates[layer].to(args[0]).repeat_interleave(width), *args[1:])

    hooks = [encoder.register_forward_pre_hook(begin)]
    hooks += [m.register_forward_pre_hook(partial(close, i)) for i, m in enumerate(found)]
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()
