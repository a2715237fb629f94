"""Train probes of several kinds from one stream of sentences, each until it no longer learns.

The schedule is Hewitt & Manning's (2019, appendix): after an epoch without a new minimum of its
loss on dev a probe goes on with a tenth of its learning rate and an Adam that has forgotten its
moments. It ends when that has happened `_MISSES` times, since the steps are then too small to
matter; the parameters of the minimum are kept. What becomes of a probe does not depend on which
others are trained beside it, up to the rounding of products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bertvision.pipelines.analysis.structure.options import StructureOptions
from bertvision.pipelines.analysis.structure.probes import Probes
from bertvision.pipelines.analysis.structure.states import Batch, TreeStates
from bertvision.pipelines.precision import device

Name = TypeVar("Name", bound=str)

_MISSES = 4
_BETTER = 1e-4  # by how much a loss must fall to be a new minimum, as in the authors' code
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


def train(
    kinds: Mapping[Name, Probes],
    learned: TreeStates,
    held_out: TreeStates,
    options: StructureOptions,
    seed: int,
    done: Callable[[int], object] = lambda epochs: None,
) -> dict[Name, list[Tensor]]:
    """Train all probes.

    Args:
        kinds: by name.
        learned: sentences to learn from.
        held_out: sentences that the learning rate and the epoch are chosen on.
        options: settings.
        seed: of the starts, and of the order of the sentences.
        done: told of each epoch that ended.

    Returns:
        By name the best parameters, (probes, …) each.

    Raises:
        CorruptStoreError: what is stored is damaged.
    """
    running = {name: _Training(kind, options.lr, seed) for name, kind in kinds.items()}
    shuffled = learned.shuffled(options.batch_size, seed)
    in_order = held_out.in_order(options.batch_size)
    for _ in range(options.epochs):
        alive = [training for training in running.values() if len(training.which)]
        if not alive:
            break
        for batch in learned.batches(shuffled):
            for training in alive:
                training.step(batch)
        for batch in held_out.batches(in_order):
            for training in alive:
                training.look(batch)
        for training in alive:
            training.close()
        done(1)
    return {name: training.best for name, training in running.items()}


class _Training:
    """The probes of one kind: those that are still trained, and the best of all."""

    def __init__(self, kind: Probes, lr: float, seed: int) -> None:
        self.kind = kind
        self.which = torch.arange(kind.count, device=device())
        self.parameters = [p.to(device()).requires_grad_() for p in kind.start(seed)]
        self.best = [p.detach().clone() for p in self.parameters]
        self._adam = StackedAdam(self.parameters, lr)
        self._lowest = np.full(kind.count, np.inf)
        self._misses = np.zeros(kind.count, np.int64)
        self._loss, self._seen = torch.zeros(kind.count, dtype=torch.float64, device=device()), 0

    def step(self, batch: Batch) -> None:
        """One step of Adam on the mean loss of a batch."""
        loss, size = self.kind.losses(self.parameters, self.which, batch)
        if size:
            gradients = torch.autograd.grad(loss.sum() / size, self.parameters)
            self._adam.step(self.parameters, gradients)

    @torch.no_grad()
    def look(self, batch: Batch) -> None:
        """Add the loss of held-out sentences."""
        loss, size = self.kind.losses(self.parameters, self.which, batch)
        self._loss += loss
        self._seen += size

    @torch.no_grad()
    def close(self) -> None:
        """End an epoch: keep what is better, slow down what is not, leave what is too slow."""
        which = self.which.cpu().numpy()
        loss = self._loss.cpu().numpy() / max(self._seen, 1)
        better = loss < self._lowest[which] - _BETTER
        self._lowest[which[better]] = loss[better]
        self._misses[which[~better]] += 1
        kept = torch.from_numpy(better).to(self.which.device)
        for best, parameter in zip(self.best, self.parameters, strict=True):
            best[self.which[kept]] = parameter[kept]
        self._adam.slow_down(~kept)
        alive = torch.from_numpy(self._misses[which] < _MISSES).to(self.which.device)
        if not bool(alive.all()):
            self.which = self.which[alive]
            self.parameters = [p[alive].requires_grad_() for p in self.parameters]
            self._adam.keep(alive)
        self._loss = self._loss.new_zeros(len(self.which))
        self._seen = 0


class StackedAdam:
    """Adam (Kingma & Ba 2015, algorithm 1) with a learning rate and a count of steps per probe."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        self._moments = [[torch.zeros_like(p) for p in parameters] for _ in _BETAS]
        self._steps = torch.zeros(len(parameters[0]), device=parameters[0].device)
        self._lr = torch.full_like(self._steps, lr)

    @torch.no_grad()
    def step(self, parameters: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
        """Change the parameters in place."""
        self._steps += 1
        first, second = (1 - beta**self._steps for beta in _BETAS)
        for parameter, gradient, m, v in zip(parameters, gradients, *self._moments, strict=True):
            each = (-1, *(1,) * (parameter.ndim - 1))
            m.lerp_(gradient, 1 - _BETAS[0])
            v.lerp_(gradient.square(), 1 - _BETAS[1])
            scale = (v / second.view(each)).sqrt_().add_(_EPSILON)
            parameter -= (self._lr / first).view(each) * m / scale

    def slow_down(self, which: Tensor) -> None:
        """A tenth of the learning rate for these probes, and no memory of their gradients."""
        self._lr[which] /= 10
        self._steps[which] = 0
        for moments in self._moments:
            for moment in moments:
                moment[which] = 0

    def keep(self, which: Tensor) -> None:
        """Forget all other probes."""
        self._moments = [[moment[which] for moment in moments] for moments in self._moments]
        self._steps, self._lr = self._steps[which], self._lr[which]
