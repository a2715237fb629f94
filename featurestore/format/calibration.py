"""Channel statistics of a calibration sample, for the quantised encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.format.encoding import ChannelStats


class ChannelStatsAccumulator:
    """Streams (tokens, layers, hidden) blocks into `ChannelStats`, in float64 about a shift.

    Subtracting the first block's mean before squaring keeps the digits that the plain sum of
    squares loses on channels whose mean is far larger than their spread (Chan et al. 1983).
    """

    def __init__(self) -> None:
        self._n = 0
        self._shift: Tensor | None = None
        self._sum: Tensor
        self._square: Tensor

    def add(self, hidden_states: Tensor) -> None:
        """Add a block of hidden states, (tokens, layers, hidden)."""
        x = hidden_states.double()
        if self._shift is None:
            self._shift = x.mean(dim=0)
            self._sum = torch.zeros_like(self._shift)
            self._square = torch.zeros_like(self._shift)
        x = x - self._shift
        self._n += x.shape[0]
        self._sum += x.sum(dim=0)
        self._square += x.square().sum(dim=0)

    def result(self) -> ChannelStats:
        """Mean and standard deviation; a constant channel gets std 1, so that it stays exact.

        Raises:
            InputError: nothing was added.
            NonFiniteError: the sample holds NaN or infinity.
        """
        if self._shift is None:
            raise InputError("no hidden states were given to calibrate on")
        mean = self._sum / self._n
        std = (self._square / self._n - mean.square()).clamp_min(0).sqrt()
        mean = mean + self._shift
        if not bool(torch.isfinite(mean).all() and torch.isfinite(std).all()):
            raise NonFiniteError("the calibration sample holds NaN or infinity: check the snapshot")
        std[std < 1e-6 * mean.abs().clamp_min(1e-6)] = 1.0
        return ChannelStats(mean.float().cpu(), std.float().cpu())
