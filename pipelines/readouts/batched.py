"""Many small models trained as one: stacked parameters, one stream of batches, early stopping.

A readout has a model for each layer, pooling, weight decay or seed. They are of one shape, so that
their parameters are stacked, and one product serves all. Models start from the same seed, see the
same batches in the same order, and each stops by itself: what becomes of a model does not depend on
which others are trained beside it, up to the rounding of products.

The loss, the optimiser and the rule of stopping differ between readouts, since each follows the
paper that it repeats. They are what a `Stack` is made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.pipelines.readouts.options import RankOptions, SimilarityOptions

B = TypeVar("B")
"""A batch, as the readout itself reads it."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class Readout(ABC, Generic[B]):
    """Small models of one shape, each with an input of its own; a `Stack` holds their parameters.

    Attributes:
        count: Number of models.
    """

    count: int

    @abstractmethod
    def start(self, seed: int) -> list[Tensor]:
        """Parameters before training, (models, …) each.

        Args:
            seed: Seed of random parameters; all models start alike.
        """

    def losses(self, parameters: list[Tensor], which: Tensor, batch: B) -> tuple[Tensor, int]:
        """Loss of each model, summed over the examples of a batch, and the number of these.

        Args:
            parameters: Parameters of some models, (some, …) each.
            which: (some,) numbers of these models.
            batch: Examples.
        """
        raise NotImplementedError

    def gradients(
        self, parameters: list[Tensor], which: Tensor, batch: B
    ) -> Sequence[Tensor] | None:
        """Gradients of the mean loss of a batch; None where it has nothing to learn from.

        Args:
            parameters: See `losses`.
            which: See `losses`.
            batch: See `losses`.
        """
        loss, size = self.losses(parameters, which, batch)
        return torch.autograd.grad(loss.sum() / size, parameters) if size else None

    def scores(self, parameters: list[Tensor], which: Tensor, batch: B) -> tuple[Tensor, int]:
        """Score of each model, summed over held-out examples, and the number of these.

        A higher score is better: by default it is minus the loss.

        Args:
            parameters: See `losses`.
            which: See `losses`.
            batch: Held-out examples.
        """
        loss, size = self.losses(parameters, which, batch)
        return -loss, size


class Look(NamedTuple):
    """The outcome of a look at the held-out examples."""

    improved: Bools
    """(models,) models whose score is a new best."""
    stopped: Bools
    """(models,) models that learn no more."""


class EarlyStopping:
    """Keep the best, stop after a number of looks without a new best.

    Args:
        models: Number of models.
        misses: Looks without a new best that end the training of a model.
        in_a_row: Whether a new best forgives the misses before it, or they are counted over the
            whole training, as in ``PyTorchClassifier.fit`` of SentEval.
        margin: Amount by which a score must exceed the best to be a new one.
    """

    def __init__(
        self, models: int, misses: int, *, in_a_row: bool = False, margin: float = 0.0
    ) -> None:
        self.best = np.full(models, -np.inf)
        self._misses = np.zeros(models, np.int64)
        self._most, self._in_a_row, self._margin = misses, in_a_row, margin

    def look(self, scores: Floats, epoch: int = 0) -> Look:
        """Take the scores of all models that are still trained, after an epoch."""
        improved = (scores > self.best + self._margin) & (self._misses < self._most)
        self.best = np.where(improved, scores, self.best)
        self._misses = np.where(improved, 0 if self._in_a_row else self._misses, self._misses + 1)
        return Look(improved, self._misses >= self._most)

    def keep(self, which: Bools) -> None:
        """Forget all other models."""
        self.best, self._misses = self.best[which], self._misses[which]


class FixedEpochs:
    """Train each model for a number of epochs of its own, whatever its scores.

    Args:
        epochs: (models,)
    """

    def __init__(self, epochs: Ints) -> None:
        self._epochs = epochs

    def look(self, scores: Floats, epoch: int) -> Look:
        """See `EarlyStopping`."""
        over = self._epochs <= epoch
        return Look(over, over)

    def keep(self, which: Bools) -> None:
        """See `EarlyStopping`."""
        self._epochs = self._epochs[which]


class StackedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) with a learning rate and a count of steps per model.

    Args:
        parameters: Stacked parameters.
        lr: Learning rate of all models at the start.
    """

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            steps = torch.zeros(len(parameter), device=parameter.device)
            moments = {name: torch.zeros_like(parameter) for name in ("first", "second")}
            self.state[parameter] = {**moments, "steps": steps, "lr": torch.full_like(steps, lr)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every model."""
        for parameter, state in self.state.items():
            gradient = parameter.grad
            assert gradient is not None
            state["steps"] += 1
            first, second = (1 - beta ** state["steps"] for beta in _BETAS)
            each = (-1, *(1,) * (parameter.ndim - 1))
            state["first"].lerp_(gradient, 1 - _BETAS[0])
            state["second"].lerp_(gradient.square(), 1 - _BETAS[1])
            scale = (state["second"] / second.view(each)).sqrt_().add_(_EPSILON)
            parameter -= (state["lr"] / first).view(each) * state["first"] / scale

    def slow_down(self, which: Tensor) -> None:
        """A tenth of the learning rate for these models, and no memory of their gradients."""
        for state in self.state.values():
            state["lr"][which] /= 10
            for name in ("steps", "first", "second"):
                state[name][which] = 0


class Stack(Generic[B]):
    """The models of a readout: those that are still trained, and each at its best look.

    Attributes:
        readout: Task of the models.
        parameters: Parameters of the models that are still trained, (some, …) each.
        best: Parameters of all models at their best look, (models, …) each.
        top: (models,) scores at their best look.
        epochs: (models,) epochs before their best look.
        is_over: Whether all models have stopped.
        optimiser: Optimiser of the models that are still trained.
    """

    def __init__(
        self,
        readout: Readout[B],
        seed: int,
        optimiser: Callable[[list[Tensor]], torch.optim.Optimizer],
        rule: EarlyStopping | FixedEpochs,
        device: torch.device,
        *,
        leaves: bool = True,
    ) -> None:
        """Start all models.

        Args:
            readout: Task of the models.
            seed: Seed of their start.
            optimiser: Makes the optimiser from stacked parameters. With `StackedAdam` a model goes
                on with a tenth of its learning rate after a look without a new best.
            rule: Rule by which models stop.
            device: Device that trains.
            leaves: Whether a model that stopped is taken out, so that it costs nothing more;
                otherwise what it goes on to learn does not count.
        """
        self.readout = readout
        self.parameters = [p.to(device).requires_grad_() for p in readout.start(seed)]
        self.best = [p.detach().clone() for p in self.parameters]
        self.top = np.full(readout.count, -np.inf)
        self.epochs = np.zeros(readout.count, np.int64)
        self.is_over = False
        self.optimiser = optimiser(self.parameters)
        self._which = torch.arange(readout.count, device=device)
        self._make, self._rule, self._leaves = optimiser, rule, leaves
        self._total: Tensor | float = 0.0
        self._seen = 0

    def step(self, batch: B) -> None:
        """Learn from a batch."""
        gradients = self.readout.gradients(self.parameters, self._which, batch)
        if gradients is not None:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimiser.step()

    @torch.no_grad()
    def look(self, batch: B) -> None:
        """Add the scores of held-out examples."""
        scores, size = self.readout.scores(self.parameters, self._which, batch)
        self._total = self._total + scores.double()
        self._seen += size

    @torch.no_grad()
    def close(self, epoch: int, *, last: bool) -> int:
        """End an epoch: keep new bests, and stop models.

        Args:
            epoch: Number of the epoch.
            last: Whether all models stop now.

        Returns:
            The number of models that stopped.
        """
        scores = np.full(len(self._which), np.nan)
        if isinstance(self._total, Tensor):
            scores = (self._total / max(self._seen, 1)).cpu().numpy()
        self._total, self._seen = 0.0, 0
        improved, stopped = self._rule.look(scores, epoch)
        new = torch.from_numpy(improved).to(self._which.device)
        for best, parameter in zip(self.best, self.parameters, strict=True):
            best[self._which[new]] = parameter[new]
        numbers = self._which[new].cpu().numpy()
        self.top[numbers], self.epochs[numbers] = scores[improved], epoch
        if isinstance(self.optimiser, StackedAdam):
            self.optimiser.slow_down(~new)
        over = stopped | last
        self.is_over = bool(over.all())
        if self._leaves and over.any():
            self._leave(~over)
        return int(over.sum())

    def _leave(self, left: Bools) -> None:
        """Go on with these models as if the others had never been there."""
        rows = torch.from_numpy(left).to(self._which.device)
        states = [self.optimiser.state[p] for p in self.parameters]
        models, self._which = len(self._which), self._which[rows]
        self.parameters = [p[rows].requires_grad_() for p in self.parameters]
        self.optimiser = self._make(self.parameters)
        for parameter, state in zip(self.parameters, states, strict=True):
            self.optimiser.state[parameter] = {
                key: value[rows] if value.shape[:1] == (models,) else value
                for key, value in state.items()
            }
        self._rule.keep(left)


def train(
    stacks: Sequence[Stack[B]],
    batches: Callable[[int], Iterable[B]],
    held_out: Callable[[], Iterable[B]] = lambda: (),
    *,
    epochs: int,
    every: int = 1,
    from_start: bool = False,
    done: Callable[[int], object] = lambda stopped: None,
) -> None:
    """Train all models of all stacks, until each has stopped.

    Args:
        stacks: Models that read the same batches.
        batches: Batches of an epoch, by its number from 1.
        held_out: Batches of the held-out examples; none for models that do not look at any.
        epochs: Number of epochs at most.
        every: Number of epochs between two looks at the held-out examples.
        from_start: Whether there is a look before the first epoch, so that the start may be best.
        done: Is told after each look how many models stopped.
    """

    def look(epoch: int) -> None:
        running = [stack for stack in stacks if not stack.is_over]
        for batch in held_out():
            for stack in running:
                stack.look(batch)
        done(sum(stack.close(epoch, last=epoch >= epochs) for stack in running))

    if from_start:
        look(0)
    for epoch in range(1, epochs + 1):
        running = [stack for stack in stacks if not stack.is_over]
        if not running:
            break
        for batch in batches(epoch):
            for stack in running:
                stack.step(batch)
        if epoch % every == 0 or epoch == epochs:
            look(epoch)


def train_patiently(
    readout: Readout[B],
    seed: int,
    options: RankOptions | SimilarityOptions,
    device: torch.device,
    batches: Callable[[int], Iterable[B]],
    held_out: Callable[[], Iterable[B]],
    *,
    from_start: bool = False,
) -> Stack[B]:
    """Train by AdamW until some epochs bring no better score; see `train`."""
    adam = partial(torch.optim.AdamW, lr=options.lr, weight_decay=options.weight_decay)
    rule = EarlyStopping(readout.count, options.patience, in_a_row=True)
    stack = Stack(readout, seed, adam, rule, device, leaves=False)
    train([stack], batches, held_out, epochs=options.epochs, from_start=from_start)
    return stack


def standard_scale(values: Tensor, rows: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Mean of every feature over some examples, and 1 / its deviation, in float32.

    A feature that does not vary there gets the scale 0.

    Args:
        values: (examples, inputs, width)
        rows: (some,) numbers of the examples.
        tolerance: Deviation, beside 1 + |mean|, up to which a feature counts as constant.

    Returns:
        (inputs, 1, width) each.
    """
    total = torch.zeros(values.shape[1:], dtype=torch.float64, device=values.device)
    square = torch.zeros_like(total)
    for part in rows.split(1024):
        total += values.index_select(0, part).sum(0, dtype=torch.float64)
    mean = total / len(rows)
    for part in rows.split(1024):
        square += (values.index_select(0, part).double() - mean).square().sum(0)
    deviation = (square / len(rows)).sqrt()
    scale = torch.where(deviation > tolerance * (1 + mean.abs()), 1 / deviation, 0)
    return mean.float().unsqueeze(1), scale.float().unsqueeze(1)
