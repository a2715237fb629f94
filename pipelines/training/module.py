"""HeadsModule: several heads trained from one stream, each exactly as if it were alone.

BatchCollector: one run's examples out of a stream that several share, in batches of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from bertvision.errors import NonFiniteError, WorkspaceError
from bertvision.models import Kind
from bertvision.models.convolution import recompute_statistics
from bertvision.models.factory import build_head
from bertvision.pipelines.precision import autocast
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.datamodule import HiddenStates
from bertvision.pipelines.training.teacher import Teacher
from bertvision.pipelines.workspace.runs import Run


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
        examples: Examples of the run: those whose rank is below.
        total: examples of the stream's split.
        batch_size: Batch size of the run and of the stream.
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
        """Rest at the end of an epoch: a smaller batch, or nothing."""
        rest, self._pending = self._pending, []
        return joined(rest) if rest else None

    @property
    def pending(self) -> list[int]:
        """Positions in the split of the examples that wait for a full batch."""
        return [int(e.examples) for e in self._pending]

    def refill(self, examples: Sequence[HiddenStates]) -> None:
        """Put the waiting examples of an interrupted training back."""
        self._pending = list(examples)


_STATISTICS_BATCHES = 16
"""Batches that BatchNorm's means and variances are of: thousands of tokens."""


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any values, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def build_heads(
    runs: Sequence[Run],
    *,
    layers: int,
    hidden: int,
    classes: int = 2,
    kind: Kind | None = None,
    device: str = "cpu",
) -> dict[Run, nn.Module]:
    """Build heads whose initial weights depend on the run's seed and the head's name alone.

    Args:
        runs: the heads and their seeds.
        layers: number of hidden states that they take.
        hidden: width of the hidden states.
        classes: Number of classes, of an example or a token.
        kind: As in `build_head`.
        device: ``meta`` makes them without weights, to see whether they can be made.
    """
    heads = {}
    with torch.device(device):
        for run in runs:
            torch.manual_seed(seed_of(run.seed, run.head, "init"))
            heads[run] = build_head(
                run.head, layers=layers, hidden=hidden, classes=classes, kind=kind
            )
    return heads


def head_loss(head: nn.Module, batch: HiddenStates, task: Task) -> Tensor:
    """Mean loss of a head over the examples of a batch, () float32."""
    return task.head_loss(head(batch.hidden_states, batch.lengths), batch.labels)


class HeadsModule(pl.LightningModule):
    """Heads given together, each with its own part of the examples.

    A head takes its step when its own examples fill a batch (see `BatchCollector`), with its own
    loss and its own parameter group of one Adam, whose state is per parameter. Random numbers
    (dropout) are drawn from (seed, head, step): neither company nor a resumed run changes a head.

    Args:
        heads: modules by run.
        task: Task that they learn.
        ranks: (examples,) rank of every example of the split (see `runs.ranks`).
        batch_size: examples per step of a head.
        lr: learning rate of Adam (the paper: 1e-3).
        digest: Digest of the run's settings; guards the resume file.
        read: gives examples of the split again, each by itself, by their positions.
        teacher: Teacher whose logits on the split they learn from too.
    """

    def __init__(
        self,
        heads: Mapping[Run, nn.Module],
        task: Task,
        *,
        ranks: Tensor,
        batch_size: int,
        lr: float,
        digest: str,
        read: Callable[[Sequence[int]], list[HiddenStates]],
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.runs = list(heads)
        self.heads = nn.ModuleList(heads.values())
        self.task = task
        self.lr = lr
        self.digest = digest
        self.steps = dict.fromkeys(self.runs, 0)
        """Optimiser steps of each run so far."""
        self.own_seconds: dict[Run, list[float]] = {run: [] for run in self.runs}
        """Seconds of the forward and backward pass of each step of a run so far (on a GPU: of
        starting them)."""
        self.diverged: set[Run] = set()
        """Runs whose loss became NaN or infinite: they are trained no further."""
        self._ranks, self._batch_size = ranks, batch_size
        self._collectors = {
            run: BatchCollector(run.examples(len(ranks)), len(ranks), batch_size)
            for run in self.runs
        }
        self._read = read
        self._teacher = teacher
        self._waiting: dict[str, list[int]] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with a parameter group per head."""
        groups = [{"params": list(head.parameters())} for head in self.heads]
        return torch.optim.Adam([g for g in groups if g["params"]], lr=self.lr, fused=True)

    def on_train_start(self) -> None:
        """Put the examples back that waited for a full batch when the training was interrupted."""
        for run in self.runs:
            if waiting := self._waiting.get(run.name):
                self._collectors[run].refill(self._read(waiting))

    def training_step(self, batch: HiddenStates, batch_idx: int) -> dict[str, Any]:
        """One batch of the stream; logs the loss of each head that took a step, else None."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        shared, ranks = Shared(batch), self._ranks[batch.examples.cpu()]
        log: dict[str, Tensor | None] = {run.name: None for run in self.runs}
        ready = {run: collector.take(shared, ranks) for run, collector in self._collectors.items()}
        rest: dict[Run, HiddenStates | None] = {}
        if self.trainer.is_last_batch:
            rest = {run: collector.rest() for run, collector in self._collectors.items()}
            # a head that has only a smaller batch takes its step with the others
            for run in [run for run in rest if ready[run] is None]:
                ready[run] = rest.pop(run)
        log |= self._backward(optimizer, ready)
        optimizer.step()
        if losses := self._backward(optimizer, rest):
            log |= losses
            optimizer.optimizer.step()  # Lightning counts a step per batch of the stream
        if self.trainer.is_last_batch:  # heads are scored, or done
            for run, head in zip(self.runs, self.heads, strict=True):
                recompute_statistics(head, self._batches(run))
        if self.logger is not None:
            loss_by_name = {f"loss/{name}": x for name, x in log.items() if x is not None}
            self.log_dict(loss_by_name, batch_size=len(ranks))
        return {"log": log}

    def _backward(
        self, optimizer: LightningOptimizer, batches: Mapping[Run, HiddenStates | None]
    ) -> dict[str, Tensor]:
        """Gradients of the heads that have a batch, None for all others; gives their losses."""
        optimizer.zero_grad(set_to_none=True)  # Adam leaves parameters without gradient alone
        losses = {}
        for run, head in zip(self.runs, self.heads, strict=True):
            batch = batches.get(run)
            if batch is None or run in self.diverged:
                continue
            started = time.perf_counter()
            torch.manual_seed(seed_of(run.seed, run.head, self.steps[run]))
            loss = self._loss(head, batch)
            if not torch.isfinite(loss):
                self.diverged.add(run)
                continue
            if loss.requires_grad:
                with autocast("32", self.device):
                    self.manual_backward(loss)
            self.steps[run] += 1
            losses[run.name] = loss.detach()
            self.own_seconds[run].append(time.perf_counter() - started)
        if len(self.diverged) == len(self.runs):
            raise NonFiniteError(
                f"the loss of {', '.join(run.name for run in self.runs)} became NaN or infinite: "
                "the training diverged; give a lower --lr"
            )
        return losses

    def _batches(self, run: Run) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states and lengths of a run's own examples, the first by rank, in batches."""
        own = run.examples(len(self._ranks))
        first = self._ranks.argsort()[: min(own, _STATISTICS_BATCHES * self._batch_size)]
        for begin in range(0, len(first), self._batch_size):
            batch = joined(self._read(first[begin : begin + self._batch_size].tolist()))
            yield batch.hidden_states, batch.lengths

    def _loss(self, head: nn.Module, batch: HiddenStates) -> Tensor:
        """Loss, () float32."""
        if self._teacher is None:
            return head_loss(head, batch, self.task)
        output = head(batch.hidden_states, batch.lengths)
        loss = self.task.head_loss(output, batch.labels)
        return self._teacher.mixed(self.task, output, batch.examples, loss)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record what the resume file belongs to, and where each head stands."""
        checkpoint["run"] = self.digest
        checkpoint["heads"] = {
            run.name: {
                "waiting": collector.pending,
                "steps": self.steps[run],
                "own_seconds": self.own_seconds[run],
                "diverged": run in self.diverged,
            }
            for run, collector in self._collectors.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a resume file; refuse that of another run."""
        if checkpoint.get("run") != self.digest:
            raise WorkspaceError(
                f"{self.trainer.ckpt_path} belongs to another run: delete it to start again"
            )
        for run in self.runs:
            state = checkpoint["heads"][run.name]
            self.steps[run] = state["steps"]
            self.own_seconds[run] = state.get("own_seconds", [])  # earlier versions kept their sum
            self._waiting[run.name] = state["waiting"]
            if state["diverged"]:
                self.diverged.add(run)
