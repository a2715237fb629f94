"""Many probes as one: stacked parameters, batched products, one Adam, and when each of them stops.

Every probe starts from the same seed and sees the same batches in the same order, so that what it
becomes does not depend on which others are trained beside it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


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


class Look(NamedTuple):
    """What a look at the held-out examples says of each probe."""

    improved: npt.NDArray[np.bool_]
    """(probes,) whose score is higher than ever before."""
    stopped: npt.NDArray[np.bool_]
    """(probes,) that are trained no longer."""


class EarlyStopping:
    """Keep the best, stop after too many looks without a new best.

    The rule is that of SentEval's ``PyTorchClassifier.fit``: misses are counted over the whole
    training and never forgotten at a new best, and the miss after ``tenacity`` others ends it.
    """

    def __init__(self, probes: int, tenacity: int) -> None:
        """Begin without a score.

        Args:
            probes: how many there are.
            tenacity: misses that are forgiven.
        """
        self.best = np.full(probes, -np.inf)
        self._misses = np.zeros(probes, np.int64)
        self._tenacity = tenacity

    def look(self, scores: npt.NDArray[np.float64]) -> Look:
        """Take the scores of all probes that are still trained.

        Args:
            scores: (probes,) higher is better.
        """
        improved = scores > self.best
        self.best = np.where(improved, scores, self.best)
        self._misses += ~improved
        return Look(improved, self._misses > self._tenacity)

    def keep(self, probes: npt.NDArray[np.bool_]) -> None:
        """Forget all other probes.

        Args:
            probes: (probes,) which stay.
        """
        self.best, self._misses = self.best[probes], self._misses[probes]
