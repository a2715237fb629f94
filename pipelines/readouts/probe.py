"""Probes: classifiers on pooled hidden states, trained as SentEval trains them.

A linear probe, or one with a hidden layer, reads the label of a sentence from a pooled layer
(Conneau & Kiela 2018, LREC).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    Rule,
    Stack,
    TorchOptimiser,
    standard_scale,
)
from bertvision.pipelines.readouts.batched import train as train_batched
from bertvision.pipelines.readouts.options import Criterion, ProbeOptions

_LOGITS_AT_ONCE = 1 << 23  # bounds the memory of scoring: 32 MB

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


def train(
    inputs: Inputs,
    labels: Tensor,
    rows: Tensor,
    held_out: Tensor,
    classes: int,
    options: ProbeOptions,
    *,
    criterion: Criterion = "accuracy",
    done: Done = lambda probes: None,
) -> Trained:
    """Train a probe on every input with every weight decay, and keep the best of each input.

    Of weight decays that do equally well on the held-out examples the smallest is taken, as in
    SentEval. SentEval then trains the chosen probe again; with its seed that gives the same probe,
    and is left out here.

    Args:
        inputs: Features of all examples.
        labels: (examples,) index of the class.
        rows: (training examples,) their numbers.
        held_out: (held-out examples,) their numbers.
        classes: Number of classes.
        options: Settings of the training.
        criterion: Score on the held-out examples that stops and chooses.
        done: Is told how many probes ended.
    """
    every = np.arange(inputs.count)
    stacks = [
        _stack(
            *(inputs, every, classes, options, decay),
            EarlyStopping(inputs.count, options.tenacity + 1),
            criterion,
        )
        for decay in options.weight_decays
    ]
    # all inputs are taken, and those in use of them: at most `size` × inputs vectors at a time
    size = 1024 if criterion == "accuracy" else 256
    train_batched(
        stacks,
        _batches(inputs, labels, rows, options),
        lambda: (Batch(inputs.take(part), labels[part]) for part in held_out.split(size)),
        epochs=options.max_epochs,
        every=options.epoch_size,
        done=done,
    )
    best = np.array([stack.top for stack in stacks])
    places = [(int(stack), i) for i, stack in enumerate(best.argmax(axis=0))]
    return _gathered(stacks, options.weight_decays, places)


def train_alike(
    inputs: Inputs,
    labels: Tensor,
    rows: Tensor,
    classes: int,
    options: ProbeOptions,
    *,
    weight_decay: Floats,
    epochs: Ints,
    done: Done = lambda probes: None,
) -> Trained:
    """Train probes with the weight decays of others, for as many epochs as those.

    Args:
        inputs: Features of all examples.
        labels: (examples,) index of the class.
        rows: (training examples,) their numbers.
        classes: Number of classes.
        options: Settings of the training.
        weight_decay: (inputs,) weight decay of each probe.
        epochs: (inputs,) epochs of each probe.
        done: Is told how many probes ended.

    Returns:
        The probes; ``held_out`` is NaN.
    """
    decays = np.unique(weight_decay).tolist()
    groups = [np.flatnonzero(weight_decay == decay) for decay in decays]
    stacks = [
        _stack(inputs, group, classes, options, decay, FixedEpochs(epochs[group]))
        for decay, group in zip(decays, groups, strict=True)
    ]
    most = max(1, int(epochs.max()))
    train_batched(stacks, _batches(inputs, labels, rows, options), epochs=most, done=done)
    which = [decays.index(decay) for decay in weight_decay.tolist()]
    places = [(k, int(np.searchsorted(groups[k], i))) for i, k in enumerate(which)]
    return _gathered(stacks, decays, places)


def _stack(
    inputs: Inputs,
    which: Ints,
    classes: int,
    options: ProbeOptions,
    decay: float,
    rule: Rule,
    criterion: Criterion = "accuracy",
) -> Stack[Batch]:
    """The probes of one weight decay, at their start."""
    adam = partial(torch.optim.Adam, lr=options.lr, weight_decay=decay, fused=True)
    return Stack(
        Classifiers(inputs.width, classes, options.hidden, which, criterion),
        options.seed,
        lambda parameters: TorchOptimiser(parameters, adam),
        rule,
        device=inputs.values.device,
    )


def _batches(
    inputs: Inputs, labels: Tensor, rows: Tensor, options: ProbeOptions
) -> Callable[[int], Iterable[Batch]]:
    random = torch.Generator().manual_seed(options.seed)

    def batches(epoch: int) -> Iterator[Batch]:
        order = rows[torch.randperm(len(rows), generator=random).to(rows.device)]
        for batch in order.split(options.batch_size):
            yield Batch(inputs.take(batch), labels[batch])

    return batches


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


def _each_chunk(
    parameters: list[Tensor], inputs: Inputs, rows: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Parts of ``rows``, and their (inputs, part, classes) logits, so that memory stays bounded."""
    size = max(1, _LOGITS_AT_ONCE // (inputs.count * parameters[-1].shape[-1]))
    size = min(size, 1024)
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        yield part, logits(parameters, inputs.take(rows[part]))


def predictions(parameters: list[Tensor], inputs: Inputs, rows: Tensor) -> Ints:
    """The most likely class of each example: (inputs, examples).

    Args:
        parameters: Parameters of a probe for each input.
        inputs: Features of all examples.
        rows: (examples,) numbers of some examples.
    """
    found = torch.empty(inputs.count, len(rows), dtype=torch.int64, device=rows.device)
    for part, scores in _each_chunk(parameters, inputs, rows):
        found[:, part] = scores.argmax(-1)
    return found.cpu().numpy()


def log_likelihoods(
    parameters: list[Tensor], inputs: Inputs, rows: Tensor, labels: Tensor
) -> Floats:
    """Log-probability of each example's label in nats: (inputs, examples)."""
    found = torch.empty(inputs.count, len(rows), dtype=torch.float64, device=rows.device)
    for part, scores in _each_chunk(parameters, inputs, rows):
        gold = labels[rows[part]].expand(inputs.count, -1).unsqueeze(-1)
        found[:, part] = scores.double().log_softmax(-1).gather(-1, gold).squeeze(-1)
    return found.cpu().numpy()
