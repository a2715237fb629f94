"""What probes read: vectors of examples, for many inputs side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Features of one width: each input is a pooled layer, or several layers end to end."""

    values: Tensor
    """(examples, inputs, width) float32, on the device that trains."""
    mean: Tensor | None = None
    """(inputs, 1, width) to be subtracted, or None."""
    scale: Tensor | None = None
    """(inputs, 1, width) to be multiplied with afterwards."""

    @property
    def count(self) -> int:
        """How many inputs there are."""
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """Length of a vector."""
        return self.values.shape[2]

    def take(self, rows: Tensor) -> Tensor:
        """Vectors of some examples.

        Args:
            rows: (batch,) numbers of examples.

        Returns:
            (inputs, batch, width)
        """
        taken = self.values.index_select(0, rows).transpose(0, 1)
        if self.mean is None or self.scale is None:
            return taken
        return (taken - self.mean) * self.scale

    def standardised(self, rows: Tensor) -> Inputs:
        """The same, with mean 0 and deviation 1 of every feature over some examples.

        A feature that does not vary there becomes 0.

        Args:
            rows: (examples,) numbers of the examples that set the scale: those of the training.
        """
        count = len(rows)
        total = torch.zeros(self.values.shape[1:], dtype=torch.float64, device=rows.device)
        square = torch.zeros_like(total)
        for part in rows.split(1024):
            total += self.values.index_select(0, part).sum(0, dtype=torch.float64)
        mean = total / count
        for part in rows.split(1024):
            square += (self.values.index_select(0, part).double() - mean).square().sum(0)
        deviation = (square / count).sqrt()
        scale = torch.where(deviation > 1e-8 * (1 + mean.abs()), 1 / deviation, 0)
        return Inputs(self.values, mean.float().unsqueeze(1), scale.float().unsqueeze(1))
