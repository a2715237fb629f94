"""Random hidden states and their statistics, for the tests of the encodings."""

from __future__ import annotations

import torch

from bertvision.featurestore.format.calibration import ChannelStatsAccumulator
from bertvision.featurestore.format.encoding import ChannelStats


def hidden_states(tokens: int = 200, layers: int = 3, hidden: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(tokens, layers, hidden)


def stats_of(x: torch.Tensor) -> ChannelStats:
    accumulator = ChannelStatsAccumulator()
    accumulator.add(x)
    return accumulator.result()


def identity(layers: int, hidden: int) -> ChannelStats:
    """Statistics that leave the values alone."""
    return ChannelStats(torch.zeros(layers, hidden), torch.ones(layers, hidden))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())
