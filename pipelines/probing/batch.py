"""Many probes as one: inputs side by side, stacked parameters, batched products, one fused Adam.

Every probe starts from the same seed and sees the same batches in the same order, so that what it
becomes does not depend on which others are trained beside it.
"""

from __future__ import annotations

import math
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


class ProbeBatch:
    """Softmax classifiers of one shape and one weight decay, each on an input of its own.

    A linear probe is x ↦ W x + b; with hidden units it is x ↦ V σ(W x + b) + c, as SentEval's
    ``MLP`` has it (Conneau & Kiela 2018). Weights start as those of `torch.nn.Linear` do. The
    gradient of the mean cross-entropy over the batch is written out, into buffers that are made
    once: with a thousand classes, allocating it for every batch costs as much as computing it.
    """

    def __init__(
        self,
        probes: int,
        width: int,
        classes: int,
        *,
        hidden: int,
        lr: float,
        weight_decay: float,
        seed: int,
        device: torch.device,
    ) -> None:
        """Make untrained probes.

        Args:
            probes: how many, one for each input.
            width: of the inputs.
            classes: number of classes.
            hidden: units of the hidden layer, 0 for none.
            lr: learning rate of Adam.
            weight_decay: added to the gradient, times the parameter.
            seed: of the starting weights.
            device: where.
        """
        random = torch.Generator().manual_seed(seed)
        sizes = [(hidden, width), (classes, hidden)] if hidden else [(classes, width)]
        self.parameters: list[Tensor] = []
        for rows, columns in sizes:
            bound = 1 / math.sqrt(columns)
            for shape in ((rows, columns), (rows,)):
                start = torch.empty(shape).uniform_(-bound, bound, generator=random)
                self.parameters.append(start.to(device).expand(probes, *shape).contiguous())
        self._lr, self._weight_decay = lr, weight_decay
        self._adam = self._optimiser()

    def __len__(self) -> int:
        return len(self.parameters[0])

    def step(self, x: Tensor, labels: Tensor) -> None:
        """One step of Adam on a batch.

        Args:
            x: (probes, batch, width)
            labels: (batch,) index of the class, of all probes alike.
        """
        hidden = _hidden(self.parameters, x)  # (probes, batch, units)
        inner = x if hidden is None else hidden
        slope = _affine(self.parameters[-2:], inner).softmax(-1)  # (probes, batch, classes)
        slope[:, torch.arange(len(labels), device=x.device), labels] -= 1
        slope /= len(labels)
        self._accumulate(-2, slope, inner)
        if hidden is not None:
            slope = torch.bmm(slope, self.parameters[-2]) * hidden * (1 - hidden)
            self._accumulate(0, slope, x)
        self._adam.step()

    def keep(self, probes: Tensor) -> None:
        """Train only these from now on, as if the others had never been there.

        Args:
            probes: (kept,) their positions.
        """
        state = [self._adam.state[p] for p in self.parameters]
        self.parameters = [p[probes] for p in self.parameters]
        self._adam = self._optimiser()
        for parameter, held in zip(self.parameters, state, strict=True):
            self._adam.state[parameter] = {
                key: value[probes] if key.startswith("exp_avg") else value
                for key, value in held.items()
            }

    def _accumulate(self, at: int, slope: Tensor, x: Tensor) -> None:
        """Write the gradient of an affine map with weight ``at``, and of its bias beside it."""
        weight, bias = (parameter.grad for parameter in self.parameters[at:][:2])
        torch.bmm(slope.transpose(1, 2), x, out=weight)
        torch.sum(slope, dim=1, out=bias)

    def _optimiser(self) -> torch.optim.Adam:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        return torch.optim.Adam(
            self.parameters, lr=self._lr, weight_decay=self._weight_decay, fused=True
        )


def logits(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Scores of the classes.

    Args:
        parameters: of a `ProbeBatch`.
        x: (probes, batch, width)

    Returns:
        (probes, batch, classes)
    """
    hidden = _hidden(parameters, x)
    return _affine(parameters[-2:], x if hidden is None else hidden)


def _hidden(parameters: list[Tensor], x: Tensor) -> Tensor | None:
    return _affine(parameters[:2], x).sigmoid() if len(parameters) == 4 else None


def _affine(parameters: list[Tensor], x: Tensor) -> Tensor:
    weight, bias = parameters
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
