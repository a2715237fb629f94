"""Pilot of a training: what its parts cost on this machine, measured on a few shards of its data.

The encoder runs over some shards in the order in which a loader asks for them, and the heads train
on these for a while, by the code that trains them. Nothing is kept.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytorch_lightning as pl

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.sampler import Sampler
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import expected_bytes, free_bytes
from bertvision.pipelines.live.splits import ComputedSplit, Splits, needed_bytes
from bertvision.pipelines.progress import progress
from bertvision.pipelines.ranks import Rank
from bertvision.pipelines.training.group import Group
from bertvision.pipelines.training.lightning import quiet_lightning, trainer
from bertvision.pipelines.training.train import plan_passes
from bertvision.pipelines.training.training_pass import TrainingPass
from bertvision.pipelines.workspace.job_options import Source, TrainOptions
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

_WARM = 3
"""Steps that are not counted: the first ones allocate and open what the others use."""
_ENOUGH = 300
"""Steps whose mean no longer moves."""


class Costs(NamedTuple):
    """Measured costs of training some heads on a snapshot."""

    windows: int
    bytes: int
    """Size of the splits that heads train on, stored."""
    needed: int
    """Room that storing them asks for."""
    free: int | None
    """Bytes that are free where the store lies; None where that is not known."""
    setup_seconds: float
    """To load the encoder, cut the data into windows, and calibrate the encoding."""
    encoder_seconds: float
    """To compute, encode and write what the heads read, once."""
    live_seconds: float
    """To compute it as often as a training without a store does (`ComputedSplit.passes`)."""
    encoder_passes: float
    """How often that is, added up over the splits."""
    training_seconds: float
    """To train the heads for all their epochs, with all seeds, on what is stored."""


@dataclass(frozen=True)
class _Repeated(Sampler):
    """Some examples again and again, as many as an epoch has."""

    examples: tuple[int, ...]
    exactly_once = False

    def sequence(self, plan: ShardPlan, epoch: int, world_size: int) -> npt.NDArray[np.int64]:
        shuffled = np.random.default_rng(epoch).permutation(np.array(self.examples))
        return np.resize(shuffled, len(plan))


class _Stopwatch(pl.Callback):
    """Ends a training after some seconds, and counts what it did in them.

    Args:
        seconds: Length of the measurement, behind the first steps.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._times: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Look at the clock."""
        self._times.append(time.perf_counter())
        counted = self._times[_WARM:]
        over = bool(counted) and counted[-1] - counted[0] > self._limit
        trainer.should_stop = over or len(counted) > _ENOUGH

    @property
    def seconds_per_step(self) -> float:
        """Mean of the steps that were counted; of very few, of all but the first."""
        times = self._times[_WARM:] if len(self._times) > 2 * _WARM else self._times
        return (times[-1] - times[0]) / max(1, len(times) - 1)


def measure(
    workspace: Workspace,
    runs: Sequence[Run],
    tag: str,
    options: TrainOptions,
    *,
    seeds: int = 1,
    encoding: str | None = None,
    seconds: float = 24.0,
) -> Costs:
    """Measure what training some heads costs, from the encoder to the last step.

    Args:
        workspace: Workspace with the snapshot and the data.
        runs: The heads.
        tag: Tag of the snapshot.
        options: Options of the training.
        seeds: Number of trainings of each head, by one call.
        encoding: Encoding of what is stored; None is that of an extraction where nothing is said.
        seconds: Length of the measurements, beside what it takes to load the encoder.

    Raises:
        UnknownNameError: There is no such head or snapshot.
        InputError: A name or an option is wrong.
    """
    named, started = options.named(runs, workspace.config.model), time.perf_counter()
    with Splits(Source("live", encoding)) as splits, progress(2, "measuring", "part") as bar:
        plans = [
            plan()
            for plan in plan_passes(
                workspace, named, SnapshotTag(tag), options, overwrite=True, splits=splits
            )
        ]
        setup_seconds = time.perf_counter() - started
        opened = {plan.split.split: cast(ComputedSplit, plan.split) for plan in plans}
        examples, seconds_of = {}, {}
        for name, split in opened.items():
            shards, per_token = _encode(split, seconds / 2 / len(opened))
            examples[name] = np.flatnonzero(np.isin(split.plan.shard, shards))
            seconds_of[name] = per_token * split.plan.total_tokens
        bar.update(1)
        training_seconds = 0.0
        epochs_of = dict.fromkeys(opened, 0)
        for plan in plans:
            name, epochs = plan.split.split, plan.options.epochs * seeds
            per_step = _train(plan, examples[name], seconds / 2 / len(plans))
            training_seconds += per_step * -(-len(plan.split) // plan.options.batch_size) * epochs
            epochs_of[name] += epochs
        bar.update(1)
        passes = {name: split.passes(epochs_of[name]) for name, split in opened.items()}
        return Costs(
            windows=max(len(split) for split in opened.values()),
            bytes=sum(expected_bytes(split.plan, split.record) for split in opened.values()),
            needed=sum(needed_bytes(split.plan, split.record) for split in opened.values()),
            free=free_bytes(workspace.activations),
            setup_seconds=setup_seconds,
            encoder_seconds=sum(seconds_of.values()),
            live_seconds=sum(seconds_of[name] * n for name, n in passes.items()),
            encoder_passes=sum(passes.values()),
            training_seconds=training_seconds,
        )


def _encode(split: ActivationSplit, seconds: float) -> tuple[list[int], float]:
    """Compute shards for a while; gives their numbers, and the seconds for a token of them.

    The first is not counted where there is another one: the encoder is slower in it.
    """
    order = np.random.default_rng(0).permutation(split.plan.n_shards).tolist()
    done: list[int] = []
    tokens, spent, started = 0, 0.0, time.perf_counter()
    for shard in order:
        begun = time.perf_counter()
        split.open_shard(shard).close()
        if done or len(order) == 1:
            spent += time.perf_counter() - begun
            tokens += split.plan.tokens_of(shard)
        done.append(shard)
        if len(done) > 1 and time.perf_counter() - started > seconds:
            break
    return done, spent / tokens


def _train(plan: TrainingPass, examples: npt.NDArray[np.int64], seconds: float) -> float:
    """Train the heads of a pass on some examples for a while; gives the seconds of a step."""
    stopwatch = _Stopwatch(seconds)
    with tempfile.TemporaryDirectory(prefix="bertvision-pilot-") as folder, quiet_lightning():
        trainer(
            Path(folder),
            [stopwatch],
            Group(Rank()),
            max_epochs=-1,
            logger=False,
            precision="bf16-mixed" if plan.options.precision == "bf16" else "32-true",
        ).fit(
            plan.module(plan.build("cpu")),
            datamodule=plan.data(sampler=_Repeated(tuple(examples.tolist()))),
        )
    return stopwatch.seconds_per_step
