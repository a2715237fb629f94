"""BatchCollector: one run's examples out of a stream that several share, in batches of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from bertvision.pipelines.training.datamodule import HiddenStates


class Shared:
    """A batch of the stream, from which runs take examples; those they keep are copied once."""

    def __init__(self, batch: HiddenStates) -> None:
        self.batch = batch
        self._taken: dict[int, HiddenStates] = {}

    @cached_property
    def _first(self) -> list[int]:
        return [0, *self.batch.lengths.cumsum(0).tolist()]

    def example(self, row: int) -> HiddenStates:
        """One example, in memory of its own: a view would keep the whole batch alive."""
        if row not in self._taken:
            first, one = self._first, slice(row, row + 1)
            self._taken[row] = HiddenStates(
                self.batch.hidden_states[first[row] : first[row + 1]].clone(),
                self.batch.lengths[one],
                {name: values[one] for name, values in self.batch.labels.items()},
                self.batch.examples[one],
            )
        return self._taken[row]


def joined(examples: Sequence[HiddenStates]) -> HiddenStates:
    """Batches one after another as one batch."""
    return HiddenStates(
        torch.cat([e.hidden_states for e in examples]),
        torch.cat([e.lengths for e in examples]),
        {name: torch.cat([e.labels[name] for e in examples]) for name in examples[0].labels},
        torch.cat([e.examples for e in examples]),
    )


class BatchCollector:
    """Collects the examples of one run until they fill a batch.

    The run is then given exactly the batches that it would be given alone: those of the subsequence
    of its own examples. Nothing of the arithmetic knows of the other runs, so batch statistics and
    dropout come out the same too.

    Args:
        examples: of the run: those whose rank is below.
        total: examples of the stream's split.
        batch_size: of the run and of the stream.
    """

    def __init__(self, examples: int, total: int, batch_size: int) -> None:
        self._limit = examples
        self._everything = examples == total
        self._batch_size = batch_size
        self._pending: list[HiddenStates] = []

    def take(self, shared: Shared, ranks: torch.Tensor) -> HiddenStates | None:
        """Take what is the run's own of a batch; give out a full batch, if there is one.

        Args:
            shared: the stream's batch, of at most ``batch_size`` examples.
            ranks: (batch,) of its examples.
        """
        if self._everything and not self._pending and len(ranks) == self._batch_size:
            return shared.batch
        own = (ranks < self._limit).nonzero().flatten().tolist()
        self._pending += [shared.example(row) for row in own]
        if len(self._pending) < self._batch_size:
            return None
        full, self._pending = (
            self._pending[: self._batch_size],
            self._pending[self._batch_size :],
        )
        return joined(full)

    def rest(self) -> HiddenStates | None:
        """What is left at the end of an epoch: a smaller batch, or nothing."""
        rest, self._pending = self._pending, []
        return joined(rest) if rest else None

    @property
    def pending(self) -> list[int]:
        """Positions in the split of the examples that wait for a full batch."""
        return [int(e.examples) for e in self._pending]

    def refill(self, examples: Sequence[HiddenStates]) -> None:
        """Put the waiting examples of an interrupted training back."""
        self._pending = list(examples)
