"""How far stored hidden states are from computed ones, and how far they may be."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.split import ActivationSplit

_OF_ENCODING = 1.5


class Yardstick(NamedTuple):
    """What distances are measured in.

    Attributes:
        mean: (hidden states, hidden) of the computed states of the sample. States of most encoders
            lie far from 0 on one side, where those of any two tokens are alike; from the mean they
            are not.
        spread: (hidden states,) median distance of a state from it.
    """

    mean: Tensor
    spread: Tensor


def yardstick(states: list[Tensor]) -> Yardstick:
    """The yardstick of a sample: (tokens, hidden states, hidden) of each example."""
    joined = torch.cat(states)
    mean = joined.mean(dim=0)
    spread = (joined - mean).norm(dim=-1).median(dim=0).values
    return Yardstick(mean, spread.clamp_min(torch.finfo(torch.float32).tiny))


def distances(one: Tensor, other: Tensor, measure: Yardstick, layers: list[int]) -> Tensor:
    """How far states are from each other, token by token.

    Args:
        one: (tokens, layers, hidden).
        other: (tokens, layers, hidden), those that should be there.
        measure: of the sample.
        layers: (layers,) which hidden states ``other`` are.

    Returns:
        (tokens, layers): ‖one − other‖ in parts of the distance of ``other`` from the mean, or of
        the median distance where that is larger.
    """
    size = torch.linalg.vector_norm(other - measure.mean[layers], dim=-1)
    apart: Tensor = torch.linalg.vector_norm(one - other, dim=-1)
    return apart / torch.maximum(size, measure.spread[layers])


def encoded_again(split: ActivationSplit, computed: Tensor) -> Tensor:
    """Computed states (tokens, layers, hidden) as the encoding of a split keeps them."""
    encoded = encode(computed, split.encoding, split.stats, nonfinite="record")
    return decode(encoded.codes, encoded.scale, split.stats)


def allowed(
    again: Tensor,
    computed: Tensor,
    measure: Yardstick,
    layers: list[int],
    tolerance: float,
) -> Tensor:
    """How far the stored states of an example may be from computed ones, token by token.

    What the encoding loses of these very states is computed, and not guessed.

    Args:
        again: the computed states as the encoding keeps them (see `encoded_again`).
        computed: (tokens, layers, hidden) of the stored layers.
        measure: of the sample.
        layers: (layers,) which hidden states they are.
        tolerance: what the encoder may give otherwise.

    Returns:
        (tokens, layers) in the units of `distances`.
    """
    return tolerance + _OF_ENCODING * distances(again, computed, measure, layers)
