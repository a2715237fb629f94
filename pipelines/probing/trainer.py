"""Train probes on all inputs and with all weight decays at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.pipelines.probing.batch import Inputs, ProbeBatch, logits
from bertvision.pipelines.probing.early_stopping import EarlyStopping
from bertvision.pipelines.probing.options import Criterion, ProbeOptions

_LOGITS_AT_ONCE = 1 << 23  # bounds the memory of scoring: 32 MB

Done = Callable[[int], object]
"""Is told how many probes have just ended."""


class Trained(NamedTuple):
    """A probe on each input: the one whose weight decay did best on the held-out examples."""

    parameters: list[Tensor]
    """As `ProbeBatch` has them, (inputs, …) each."""
    weight_decay: npt.NDArray[np.float64]
    """(inputs,)"""
    epochs: npt.NDArray[np.int64]
    """(inputs,) after how many the parameters were like this."""
    held_out: npt.NDArray[np.float64]
    """(inputs,) share of right held-out examples, or minus their mean loss in nats."""


class _Lot:
    """The probes of one weight decay: those that are still trained, and the best of all."""

    def __init__(
        self,
        inputs: Inputs,
        which: Sequence[int],
        classes: int,
        options: ProbeOptions,
        decay: float,
    ) -> None:
        device = inputs.values.device
        self.decay, self.which = decay, np.asarray(which)
        self.alive = np.arange(len(self.which))
        self.batch = ProbeBatch(
            len(self.which),
            inputs.width,
            classes,
            hidden=options.hidden,
            lr=options.lr,
            weight_decay=decay,
            seed=options.seed,
            device=device,
        )
        self.best = [p.clone() for p in self.batch.parameters]
        self.epochs = np.zeros(len(self.which), np.int64)
        self._all = len(self.which) == inputs.count
        self._taken = torch.from_numpy(self.which).to(device)

    def of(self, x: Tensor) -> Tensor:
        """The part of a batch that is still needed, (alive, batch, width)."""
        return x if self._all else x[self._taken]

    def remember(self, improved: npt.NDArray[np.bool_], epoch: int) -> None:
        """Keep the parameters of these as the best."""
        now = torch.from_numpy(np.flatnonzero(improved)).to(self._taken.device)
        there = torch.from_numpy(self.alive[improved]).to(self._taken.device)
        for best, parameter in zip(self.best, self.batch.parameters, strict=True):
            best[there] = parameter[now]
        self.epochs[self.alive[improved]] = epoch

    def leave(self, over: npt.NDArray[np.bool_]) -> None:
        """Train these no longer."""
        self.alive = self.alive[~over]
        self._all = False
        self._taken = torch.from_numpy(self.which[self.alive]).to(self._taken.device)
        self.batch.keep(torch.from_numpy(np.flatnonzero(~over)).to(self._taken.device))


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
        inputs: of all examples.
        labels: (examples,) index of the class.
        rows: (training examples,) their numbers.
        held_out: (held-out examples,) their numbers.
        classes: number of classes.
        options: settings.
        criterion: what of the held-out examples stops and chooses.
        done: told of probes that ended.
    """
    everything = range(inputs.count)
    lots = [_Lot(inputs, everything, classes, options, d) for d in options.weight_decays]
    rules = [EarlyStopping(inputs.count, options.tenacity) for _ in lots]
    best = np.full((len(lots), inputs.count), -np.inf)

    def look(i: int, epoch: int) -> npt.NDArray[np.bool_]:
        lot, last = lots[i], epoch >= options.max_epochs
        if epoch % options.epoch_size and not last:
            return np.zeros(len(lot.alive), bool)
        scores = _held_out(lot, inputs, labels, held_out, criterion)
        improved, stopped = rules[i].look(scores)
        lot.remember(improved, epoch)
        best[i, lot.alive[improved]] = scores[improved]
        over = stopped | last
        rules[i].keep(~over)
        return over

    _run(lots, inputs, labels, rows, options, look, done)
    chosen = best.argmax(axis=0)
    return _gathered(lots, [(int(lot), i) for i, lot in enumerate(chosen)], best.max(axis=0))


def train_alike(
    inputs: Inputs,
    labels: Tensor,
    rows: Tensor,
    classes: int,
    options: ProbeOptions,
    like: Trained,
    *,
    done: Done = lambda probes: None,
) -> Trained:
    """Train probes with the weight decays of others, for as many epochs as those.

    Args:
        inputs: of all examples.
        labels: (examples,) index of the class.
        rows: (training examples,) their numbers.
        classes: number of classes.
        options: settings.
        like: whose weight decays and epochs to take, input by input.
        done: told of probes that ended.

    Returns:
        The probes; ``held_out`` is NaN.
    """
    groups = [np.flatnonzero(like.weight_decay == d) for d in np.unique(like.weight_decay)]
    lots = [
        _Lot(inputs, group.tolist(), classes, options, float(like.weight_decay[group[0]]))
        for group in groups
    ]

    def look(i: int, epoch: int) -> npt.NDArray[np.bool_]:
        lot = lots[i]
        over: npt.NDArray[np.bool_] = like.epochs[lot.which[lot.alive]] <= epoch
        lot.remember(over, epoch)
        return over

    _run(lots, inputs, labels, rows, options, look, done)
    places = {int(i): (lot, at) for lot, group in enumerate(groups) for at, i in enumerate(group)}
    return _gathered(lots, [places[i] for i in range(inputs.count)], np.full(inputs.count, np.nan))


def each_chunk(
    parameters: list[Tensor], inputs: Inputs, rows: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Logits of examples, a part of them at a time so that memory stays bounded.

    Args:
        parameters: of a probe for each input.
        inputs: of all examples.
        rows: (examples,) which of them.

    Yields:
        Which part of ``rows``, and (inputs, part, classes) logits.
    """
    size = max(1, _LOGITS_AT_ONCE // (inputs.count * parameters[-1].shape[-1]))
    size = min(size, 1024)
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        yield part, logits(parameters, inputs.take(rows[part]))


def predictions(parameters: list[Tensor], inputs: Inputs, rows: Tensor) -> npt.NDArray[np.int64]:
    """The most likely class of each example, (inputs, examples); see `each_chunk`."""
    found = torch.empty(inputs.count, len(rows), dtype=torch.int64, device=rows.device)
    for part, scores in each_chunk(parameters, inputs, rows):
        found[:, part] = scores.argmax(-1)
    return found.cpu().numpy()


def log_likelihoods(
    parameters: list[Tensor], inputs: Inputs, rows: Tensor, labels: Tensor
) -> npt.NDArray[np.float64]:
    """Log-probability of each example's label in nats, (inputs, examples); see `each_chunk`."""
    found = torch.empty(inputs.count, len(rows), dtype=torch.float64, device=rows.device)
    for part, scores in each_chunk(parameters, inputs, rows):
        gold = labels[rows[part]].expand(inputs.count, -1).unsqueeze(-1)
        found[:, part] = scores.double().log_softmax(-1).gather(-1, gold).squeeze(-1)
    return found.cpu().numpy()


def _run(
    lots: list[_Lot],
    inputs: Inputs,
    labels: Tensor,
    rows: Tensor,
    options: ProbeOptions,
    look: Callable[[int, int], npt.NDArray[np.bool_]],
    done: Done,
) -> None:
    """Train until all have left; ``look`` says after an epoch which of a lot leave."""
    random = torch.Generator().manual_seed(options.seed)
    epoch = 0
    while any(len(lot.alive) for lot in lots):
        order = rows[torch.randperm(len(rows), generator=random).to(rows.device)]
        for batch in order.split(options.batch_size):
            x, y = inputs.take(batch), labels[batch]
            for lot in lots:
                if len(lot.alive):
                    lot.batch.step(lot.of(x), y)
        epoch += 1
        for i, lot in enumerate(lots):
            if len(lot.alive) and (over := look(i, epoch)).any():
                lot.leave(over)
                done(int(over.sum()))


def _held_out(
    lot: _Lot, inputs: Inputs, labels: Tensor, rows: Tensor, criterion: Criterion
) -> npt.NDArray[np.float64]:
    """(alive,) share of right examples, or minus their mean loss."""
    total = torch.zeros(len(lot.alive), dtype=torch.float64, device=rows.device)
    # all inputs are taken, and those in use of them: at most `size` × inputs vectors at a time
    for part in rows.split(1024 if criterion == "accuracy" else 256):
        scores = logits(lot.batch.parameters, lot.of(inputs.take(part)))
        gold = labels[part]
        if criterion == "accuracy":
            total += (scores.argmax(-1) == gold).sum(-1)
        else:
            likely = scores.log_softmax(-1).gather(-1, gold.expand(len(total), -1).unsqueeze(-1))
            total += likely.squeeze(-1).sum(-1, dtype=torch.float64)
    return (total / len(rows)).cpu().numpy()


def _gathered(
    lots: list[_Lot], places: list[tuple[int, int]], held_out: npt.NDArray[np.float64]
) -> Trained:
    """The best probes from where they stand: lot, and position in it, of each input."""
    return Trained(
        [
            torch.stack([lots[lot].best[k][at] for lot, at in places])
            for k in range(len(lots[0].best))
        ],
        np.array([lots[lot].decay for lot, _ in places]),
        np.array([lots[lot].epochs[at] for lot, at in places]),
        held_out,
    )
