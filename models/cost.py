"""Costs of a head: its parameters, and its arithmetic beside that of the encoder."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bertvision.models import Kind

_TOKENS = 64  # of a window, so that convolutions over tokens see what they usually see
_COSTLY = {"span": 0.25, "classification": 8.0}
"""Multiplications per token that are too many where all heads are meant, in parts of the encoder's.
A span head then takes about as long to train as the encoder to run; a classification head sees one
token of a window of a hundred and more."""


def count_parameters(head: nn.Module) -> tuple[int, int]:
    """Parameters that receive gradients, and all with floating-point buffers.

    BatchNorm's running mean and variance are such buffers; the paper counts them.
    """
    trainable = sum(p.numel() for p in head.parameters() if p.requires_grad)
    total = sum(p.numel() for p in head.parameters())
    return trainable, total + sum(b.numel() for b in head.buffers() if b.is_floating_point())


def multiplications(head: nn.Module, kind: Kind, *, layers: int, hidden: int) -> int | None:
    """Multiplications of a forward pass per token, of matrix products and convolutions.

    Args:
        head: on the meta device: nothing is computed, operations are counted.
        kind: of the head.
        layers: number of hidden states that it takes.
        hidden: width of the hidden states.

    Returns:
        None where it does what the meta device cannot, as a head of one's own may.
    """
    states = torch.empty(_TOKENS, layers, hidden, device="meta")
    lengths = torch.tensor([_TOKENS]) if kind == "span" else torch.ones(_TOKENS, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            head(states, lengths)
    except Exception:  # code of the user's own may raise anything
        return None
    return int(counter.get_total_flops()) // 2 // _TOKENS


def encoder_multiplications(layers: int, hidden: int) -> int:
    """Multiplications per token of the linear layers of BERT with so many hidden states.

    12 · hidden² in each layer: query, key, value, output, and twice 4 · hidden² around the
    activation. Attention's own products, which depend on the window, come on top.
    """
    return 12 * hidden**2 * max(layers - 1, 1)


def is_costly(kind: Kind, count: int | None, layers: int, hidden: int) -> bool:
    """Whether a head is so expensive beside its encoder that it is trained only when named."""
    return count is not None and count > _COSTLY[kind] * encoder_multiplications(layers, hidden)
