"""Probes: classifiers on pooled hidden states, trained as SentEval trains them.

A linear probe, or one with a hidden layer, reads the label of a sentence from a pooled layer
(Conneau & Kiela 2018, LREC).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.pipelines.readouts.batched import (
    EarlyStopping,
    FixedEpochs,
    Floats,
    Ints,
    Readout,
    Stack,
    standard_scale,
)
from bertvision.pipelines.readouts.batched import train as train_batched
from bertvision.pipelines.readouts.options import Criterion, ProbeOptions

_LOGITS_AT_ONCE = 1 << 23  # bounds the memory of scoring: 32 MB
_NEVER = -1e4  # the bias of a class without examples, whose probability is 0 in float64 too
MOST_ITERATIONS = 1000
"""Iterations after which lbfgs ends, at its optimum or not."""

Done = Callable[[int], object]
"""Is told how many probes have just ended."""


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
        """Number of inputs."""
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

    def only(self, number: int) -> Inputs:
        """One of the inputs alone.

        Args:
            number: Its number.
        """
        own = slice(number, number + 1)
        mean, scale = (None if part is None else part[own] for part in (self.mean, self.scale))
        return Inputs(self.values[:, own], mean, scale)

    def without(self, bases: Sequence[Tensor]) -> Inputs:
        """The vectors without their parts in some subspaces, as they are read.

        Args:
            bases: An orthonormal basis for each input, (directions, width).
        """
        every = torch.arange(len(self.values), device=self.values.device)
        values = torch.empty_like(self.values)
        for i, basis in enumerate(bases):
            for part in every.split(1024):
                x = self.only(i).take(part)[0]
                values[part, i] = x - (x @ basis.T) @ basis
        return Inputs(values)

    def standardised(self, rows: Tensor) -> Inputs:
        """The same, with mean 0 and deviation 1 of every feature over some examples.

        A feature that does not vary there becomes 0.

        Args:
            rows: (examples,) numbers of the examples that set the scale: those of the training.
        """
        return Inputs(self.values, *standard_scale(self.values, rows, 1e-8))


class Batch(NamedTuple):
    """Some examples."""

    x: Tensor
    """(inputs, batch, width)"""
    labels: Tensor
    """(batch,) index of the class, the same for all inputs."""


class Classifiers(Readout[Batch]):
    """Softmax classifiers of one shape, each on an input of its own.

    A linear probe is x ↦ W x + b; with hidden units it is x ↦ V σ(W x + b) + c, as SentEval's
    ``MLP`` has it. Weights start as those of `torch.nn.Linear` do. The gradient of the mean
    cross-entropy over the batch is written out, into buffers that are made once: with a thousand
    classes, allocating it for every batch costs as much as computing it.

    Args:
        width: Length of a vector.
        classes: Number of classes.
        hidden: Units of the hidden layer; 0 for none.
        inputs: (models,) numbers of the inputs that the models read, ascending.
        criterion: Score on held-out examples.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        hidden: int,
        inputs: Ints,
        criterion: Criterion = "accuracy",
    ) -> None:
        self.count = len(inputs)
        self._sizes = [(hidden, width), (classes, hidden)] if hidden else [(classes, width)]
        self._inputs, self._criterion = torch.from_numpy(inputs), criterion

    def start(self, seed: int) -> list[Tensor]:
        """See `Readout`."""
        random = torch.Generator().manual_seed(seed)
        parameters: list[Tensor] = []
        for rows, columns in self._sizes:
            bound = 1 / math.sqrt(columns)
            for shape in ((rows, columns), (rows,)):
                start = torch.empty(shape).uniform_(-bound, bound, generator=random)
                parameters.append(start.expand(self.count, *shape).contiguous())
        return parameters

    @torch.no_grad()
    def gradients(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> list[Tensor]:
        """See `Readout`."""
        x = self._read(which, batch)
        hidden = _hidden(parameters, x)  # (models, batch, units)
        inner = x if hidden is None else hidden
        slope = _affine(parameters[-2:], inner).softmax(-1)  # (models, batch, classes)
        slope[:, torch.arange(len(batch.labels), device=x.device), batch.labels] -= 1
        slope /= len(batch.labels)
        gradients = _gradients(parameters[-2:], slope, inner)
        if hidden is not None:
            slope = torch.bmm(slope, parameters[-2]) * hidden * (1 - hidden)
            gradients = _gradients(parameters[:2], slope, x) + gradients
        return gradients

    def scores(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The number of right examples, or minus their summed loss."""
        scores, gold = logits(parameters, self._read(which, batch)), batch.labels
        if self._criterion == "accuracy":
            return (scores.argmax(-1) == gold).sum(-1), len(gold)
        likely = scores.log_softmax(-1).gather(-1, gold.expand(len(scores), -1).unsqueeze(-1))
        return likely.squeeze(-1).sum(-1, dtype=torch.float64), len(gold)

    def _read(self, which: Tensor, batch: Batch) -> Tensor:
        """(models, batch, width) what these models read of a batch."""
        if len(which) == len(batch.x):
            return batch.x
        return batch.x[self._inputs.to(which.device)[which]]


def logits(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Scores of the classes.

    Args:
        parameters: Parameters of `Classifiers`.
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


def _gradients(parameters: list[Tensor], slope: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of the weight and the bias of an affine map, in the buffers that are theirs."""
    weight, bias = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    torch.bmm(slope.transpose(1, 2), x, out=weight)
    torch.sum(slope, dim=1, out=bias)
    return [weight, bias]


class Trained(NamedTuple):
    """A probe on each input: the one whose weight decay did best on the held-out examples."""

    parameters: list[Tensor]
    """Parameters of `Classifiers`, (inputs, …) each."""
    weight_decay: Floats
    """(inputs,)"""
    epochs: Ints
    """(inputs,) number of epochs after which the parameters were like this."""
    held_out: Floats
    """(inputs,) share of right held-out examples, or minus their mean loss in nats."""


@dataclass(frozen=True)
class Problem:
    """Labelled examples, and how probes learn them."""

    inputs: Inputs
    """Features of all examples."""
    labels: Tensor
    """(examples,) index of the class."""
    classes: int
    """Number of classes."""
    options: ProbeOptions
    done: Done = lambda probes: None

    def rows(self, numbers: Ints) -> Tensor:
        """Numbers of examples, on the device that trains."""
        return torch.from_numpy(numbers).to(self.labels.device)

    def standardised(self, rows: Tensor) -> Problem:
        """The same with features on the scale of some examples, where the options ask for that."""
        if not self.options.standardise:
            return self
        return replace(self, inputs=self.inputs.standardised(rows))

    def train(self, rows: Tensor, held_out: Tensor, criterion: Criterion = "accuracy") -> Trained:
        """Train a probe on every input with every weight decay, and keep the best of each input.

        Of weight decays that do equally well on the held-out examples the smallest is taken, as in
        SentEval. SentEval then trains the chosen probe again; with its seed that gives the same
        probe, and is left out here.

        Args:
            rows: (training examples,) their numbers.
            held_out: (held-out examples,) their numbers.
            criterion: Score on the held-out examples that stops and chooses.
        """
        count = self.inputs.count
        if self.options.solver == "lbfgs":
            return self._train_logistic(rows, held_out)
        stacks = [
            self._stack(
                np.arange(count), decay, EarlyStopping(count, self.options.tenacity + 1), criterion
            )
            for decay in self.options.weight_decays
        ]
        # all inputs are taken, and those in use of them: at most `size` × inputs vectors at a time
        parts = held_out.split(1024 if criterion == "accuracy" else 256)
        train_batched(
            stacks,
            self._batches(rows),
            lambda: map(self._batch, parts),
            epochs=self.options.max_epochs,
            every=self.options.epoch_size,
            done=self.done,
        )
        best = np.array([stack.top for stack in stacks])
        places = [(int(stack), i) for i, stack in enumerate(best.argmax(axis=0))]
        return _gathered(stacks, self.options.weight_decays, places)

    def train_alike(self, rows: Tensor, weight_decay: Floats, epochs: Ints) -> Trained:
        """Train probes with the weight decays of others, for as many epochs as those.

        Args:
            rows: (training examples,) their numbers.
            weight_decay: (inputs,) weight decay of each probe.
            epochs: (inputs,) epochs of each probe.

        Returns:
            The probes; ``held_out`` is NaN.
        """
        if self.options.solver == "lbfgs":
            return self._fit_logistic(rows, weight_decay)
        decays = np.unique(weight_decay).tolist()
        groups = [np.flatnonzero(weight_decay == decay) for decay in decays]
        stacks = [
            self._stack(group, decay, FixedEpochs(epochs[group]))
            for decay, group in zip(decays, groups, strict=True)
        ]
        most = max(1, int(epochs.max()))
        train_batched(stacks, self._batches(rows), epochs=most, done=self.done)
        which = [decays.index(decay) for decay in weight_decay.tolist()]
        places = [(k, int(np.searchsorted(groups[k], i))) for i, k in enumerate(which)]
        return _gathered(stacks, decays, places)

    def _train_logistic(self, rows: Tensor, held_out: Tensor) -> Trained:
        """As `train`, each probe at its optimum; the most accurate weight decay is kept."""
        right = self.labels[held_out].cpu().numpy()
        fitted = [
            self._fit_logistic(rows, np.full(self.inputs.count, decay))
            for decay in self.options.weight_decays
        ]
        accuracy = np.array(
            [(self.predictions(t.parameters, held_out) == right).mean(axis=1) for t in fitted]
        )
        best = accuracy.argmax(axis=0)
        own = np.arange(self.inputs.count)
        epochs = np.stack([t.epochs for t in fitted])
        return Trained(
            [
                torch.stack([fitted[k].parameters[part][i] for i, k in enumerate(best.tolist())])
                for part in range(2)
            ],
            np.array(self.options.weight_decays)[best],
            epochs[best, own],
            accuracy[best, own],
        )

    def _fit_logistic(self, rows: Tensor, weight_decay: Floats) -> Trained:
        """Logistic regressions of scikit-learn, one on each input, with its weight decay.

        Of two classes the first has no weights. A class without training examples has a bias at
        which it is never given.
        """
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        labels = self.labels[rows].cpu().numpy()
        present = np.unique(labels)
        weight = torch.zeros(self.inputs.count, self.classes, self.inputs.width)
        bias = torch.full((self.inputs.count, self.classes), _NEVER)
        bias[:, present] = 0.0
        iterations = np.zeros(self.inputs.count, np.int64)
        for i, decay in enumerate(weight_decay.tolist() if len(present) > 1 else []):
            x = self.inputs.only(i).take(rows)[0].double().cpu().numpy()
            strength = 1 / (decay * len(rows)) if decay else np.inf
            with warnings.catch_warnings():  # whoever keeps the probes says it once, of all
                warnings.simplefilter("ignore", ConvergenceWarning)
                model = LogisticRegression(C=strength, max_iter=MOST_ITERATIONS).fit(x, labels)
            own = present if len(present) > 2 else present[1:]
            weight[i, own] = torch.from_numpy(model.coef_).float()
            bias[i, own] = torch.from_numpy(model.intercept_).float()
            iterations[i] = model.n_iter_.max()
            self.done(1)
        device = self.inputs.values.device
        parameters = [weight.to(device), bias.to(device)]
        nothing = np.full(self.inputs.count, np.nan)
        return Trained(parameters, weight_decay, iterations, nothing)

    def _stack(
        self,
        which: Ints,
        decay: float,
        rule: EarlyStopping | FixedEpochs,
        criterion: Criterion = "accuracy",
    ) -> Stack[Batch]:
        """The probes of one weight decay, at their start."""
        options, width = self.options, self.inputs.width
        adam = partial(torch.optim.Adam, lr=options.lr, weight_decay=decay, fused=True)
        readout = Classifiers(width, self.classes, options.hidden, which, criterion)
        return Stack(readout, options.seed, adam, rule, self.labels.device)

    def _batches(self, rows: Tensor) -> Callable[[int], Iterable[Batch]]:
        random = torch.Generator().manual_seed(self.options.seed)

        def batches(epoch: int) -> Iterable[Batch]:
            order = rows[torch.randperm(len(rows), generator=random).to(rows.device)]
            return map(self._batch, order.split(self.options.batch_size))

        return batches

    def _batch(self, rows: Tensor) -> Batch:
        return Batch(self.inputs.take(rows), self.labels[rows])

    def predictions(self, parameters: list[Tensor], rows: Tensor) -> Ints:
        """The most likely class of each example: (inputs, examples).

        Args:
            parameters: Parameters of a probe for each input.
            rows: (examples,) numbers of some examples.
        """
        parts = [scores.argmax(-1) for scores in self._logits(parameters, rows)]
        return torch.cat(parts, 1).cpu().numpy()

    def log_likelihoods(self, parameters: list[Tensor], rows: Tensor) -> Floats:
        """Log-probability of the label of each example in nats: (inputs, examples).

        Args:
            parameters: Parameters of a probe for each input.
            rows: (examples,) numbers of some examples.
        """
        parts, start = [], 0
        for scores in self._logits(parameters, rows):
            labels = self.labels[rows[start : start + scores.shape[1]]]
            gold = labels.expand(len(scores), -1).unsqueeze(-1)
            parts.append(scores.double().log_softmax(-1).gather(-1, gold).squeeze(-1))
            start += scores.shape[1]
        return torch.cat(parts, 1).cpu().numpy()

    def _logits(self, parameters: list[Tensor], rows: Tensor) -> Iterator[Tensor]:
        """(inputs, part, classes) logits, part by part so that memory stays bounded."""
        size = max(1, _LOGITS_AT_ONCE // (self.inputs.count * parameters[-1].shape[-1]))
        for part in rows.split(min(size, 1024)):
            yield logits(parameters, self.inputs.take(part))


def _gathered(
    stacks: list[Stack[Batch]], decays: Sequence[float], places: list[tuple[int, int]]
) -> Trained:
    """The best probes from where they stand: stack, and position in it, of each input."""
    return Trained(
        [
            torch.stack([stacks[stack].best[k][at] for stack, at in places])
            for k in range(len(stacks[0].best))
        ],
        np.array([decays[stack] for stack, _ in places]),
        np.array([stacks[stack].epochs[at] for stack, at in places]),
        np.array([stacks[stack].top[at] for stack, at in places]),
    )
