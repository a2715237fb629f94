"""Length-grouped batches of windows: one sequence for one seed, with hardly any padding.

Random batches of SQuAD windows are more than half padding; sorted by length inside large random
groups they hold almost none, and the order is still random at the scale of the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.tasks.windows import Batch, Int64Array, Windows, collate
from bertvision.pipelines.workspace.config import Order


class Step(NamedTuple):
    """Batches of one optimiser step."""

    number: int
    """Steps taken before this one, over all epochs."""
    batches: list[Batch]
    """One, or several whose gradients add up; of several ranks this one's share of each."""
    rows: list[Int64Array]
    """Numbers of the windows of each batch."""
    windows: int
    """How many the step is computed from, on all ranks."""


def plan_batches(
    n_tokens: npt.NDArray[np.integer],
    batch_size: int,
    *,
    order: Order = "shuffled",
    seed: int,
    epoch: int,
    group: int = 50,
) -> list[Int64Array]:
    """Group windows into batches; a pure function of its arguments.

    Shuffled, a random permutation is cut into runs of ``group`` batches, each run is sorted by
    length and cut into batches, and all batches are shuffled. By length, the shortest windows come
    first, those of one length as they are given: the curriculum of Kocmi & Bojar (2017).

    Args:
        n_tokens: (windows,) length of each window in tokens.
        batch_size: windows per batch; one batch may be smaller.
        order: shuffled, or the same in every epoch: as given, or by length.
        seed: decides a shuffled order, together with ``epoch``.
        epoch: number of the epoch, from 0.
        group: batches per run.

    Returns:
        ceil(windows / batch_size) arrays of window indices; each window is in exactly one.
    """
    if order != "shuffled":
        by_length = order == "length"
        rows = np.argsort(n_tokens, kind="stable") if by_length else np.arange(len(n_tokens))
        return _cut(rows, batch_size)
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(len(n_tokens))
    batches: list[Int64Array] = []
    for start in range(0, len(shuffled), group * batch_size):
        run = shuffled[start : start + group * batch_size]
        batches += _cut(run[np.argsort(n_tokens[run], kind="stable")], batch_size)
    return [batches[i] for i in random.permutation(len(batches))]


def _cut(rows: Int64Array, batch_size: int) -> list[Int64Array]:
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]


class StepLoader:
    """The steps of a whole run, over all its epochs, resumable at any step.

    Lightning sees one long epoch, so that gradient accumulation ends with each real epoch and the
    position in the run is a single number. It is counted when a step is handed out, so a state
    taken while a step is being worked on resumes after it.
    """

    def __init__(
        self,
        windows: Windows,
        labels: Mapping[str, npt.NDArray[Any]],
        *,
        batch_size: int,
        accumulate: int,
        steps: int,
        seed: int,
        order: Order = "shuffled",
        pad_id: int,
        token_types: bool = True,
        share: Callable[[Int64Array], Int64Array] = lambda rows: rows,
    ) -> None:
        """Prepare ``steps`` optimiser steps over ``windows`` with ``labels``, (windows,) each.

        Of each batch a rank gets the ``share`` of its windows; where that is none, no batch.
        """
        self.windows = windows
        self.labels = labels
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.steps = steps
        self.seed = seed
        self.order = order
        self.pad_id = pad_id
        self.token_types = token_types
        self.share = share
        self.steps_per_epoch = steps_per_epoch(len(windows), batch_size, accumulate)
        self._first_token = windows.first_token
        self._next = 0

    def __len__(self) -> int:
        return self.steps

    def first(self) -> tuple[Batch, Int64Array]:
        """The first batch of the run, and the numbers of its windows; the position is not moved."""
        rows = self._plan(0)[0]
        return self._batch(rows), rows

    def _plan(self, epoch: int) -> list[Int64Array]:
        lengths, size = self.windows.n_tokens, self.batch_size
        return plan_batches(lengths, size, order=self.order, seed=self.seed, epoch=epoch)

    def _batch(self, rows: Int64Array) -> Batch:
        return collate(
            *(self.windows, self._first_token, rows, self.pad_id, self.labels),
            token_types=self.token_types,
        )

    def __iter__(self) -> Iterator[Step]:
        while self._next < self.steps:
            epoch, step = divmod(self._next, self.steps_per_epoch)
            plan = self._plan(epoch)
            while step < self.steps_per_epoch and self._next < self.steps:
                together = plan[step * self.accumulate : (step + 1) * self.accumulate]
                rows = [own for own in map(self.share, together) if len(own)]
                batches = [self._batch(r) for r in rows]
                number = self._next
                self._next += 1
                step += 1
                yield Step(number, batches, rows, sum(map(len, together)))

    def state_dict(self) -> dict[str, int]:
        """The number of steps handed out."""
        return {"step": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after ``state["step"]`` steps."""
        self._next = state["step"]


def steps_per_epoch(windows: int, batch_size: int, accumulate: int) -> int:
    """Optimiser steps in one epoch: ceil(ceil(windows / batch_size) / accumulate)."""
    batches = ceil(windows / batch_size)
    return ceil(batches / accumulate)
