"""What a training or a sweep would do: the heads, their steps, and what is trained already."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.models.registry import count_parameters
from bertvision.pipelines.planning.extraction import State
from bertvision.pipelines.planning.rates import training_rate
from bertvision.pipelines.results.sweep import asked_runs, combinations
from bertvision.pipelines.training.evaluate import is_evaluated
from bertvision.pipelines.training.module import build_heads
from bertvision.pipelines.training.plan import TrainingPass
from bertvision.pipelines.training.train import plan_passes
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace


class PlannedRun(NamedTuple):
    """A head as a training would leave it."""

    head: str
    trained_on: str
    state: State
    fraction: float
    seed: int
    parameters: int
    """All of the head's, running statistics included."""
    examples: int
    """Windows that it is trained on in an epoch."""
    epochs: int
    steps: int
    seconds: float | None
    """For all of its steps; None where no training of this head was measured in this workspace."""
    measured: str | None
    """The record that the seconds are from."""


class TrainingPlan(NamedTuple):
    """What a training, or a sweep, would do."""

    runs: list[PlannedRun]
    passes: int
    """Over the store, in each epoch; heads of a seed and snapshot share one."""
    evaluations: int
    """Scorings of a head on a snapshot that are missing; a training has none."""


def plan_training(
    workspace: Workspace,
    runs: Sequence[Run],
    tag: str,
    options: TrainOptions,
    *,
    overwrite: bool = False,
) -> TrainingPlan:
    """What `train` would do; nothing is computed or written.

    Args:
        workspace: with the activations.
        runs: heads, as they were asked for.
        tag: the snapshot.
        options: how they would be trained.
        overwrite: replace heads that were trained otherwise.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        WorkspaceError: a head of that name was trained otherwise.
        IncompleteSplitError: the extraction of the split has not ended.
    """
    named = options.named(list(runs))
    passes = plan_passes(workspace, named, SnapshotTag(tag), options, overwrite=overwrite)
    plans = [plan() for plan in passes]
    rows = {run: row for plan in plans for run, row in _rows(plan).items()}
    return TrainingPlan([rows[run] for run in named], sum(bool(plan.todo) for plan in plans), 0)


def plan_sweep(
    workspace: Workspace,
    heads: Sequence[str],
    *,
    trained_on: Sequence[str],
    checkpoints: Sequence[str],
    fractions: Sequence[float],
    seeds: Sequence[int],
    options: TrainOptions,
    split: str,
) -> TrainingPlan:
    """What `sweep` would do; nothing is computed or written.

    Args:
        workspace: with the activations.
        heads: as of `sweep`, likewise all that follow.
        trained_on: snapshots to train on.
        checkpoints: snapshots to evaluate on.
        fractions: parts of the training examples.
        seeds: of each head and part.
        options: how they would be trained.
        split: what would be scored.

    Raises:
        UnknownNameError: as of `sweep`, likewise WorkspaceError and InputError.
    """
    runs = asked_runs(workspace, heads, fractions, seeds, options)
    kinds, sources, targets = combinations(
        workspace, options.named(runs), trained_on, checkpoints, split
    )
    found: list[PlannedRun] = []
    passes = evaluations = 0
    for kind, group in kinds.items():
        for source in sources[kind]:
            planned = plan_training(workspace, group, source, options)
            found += planned.runs
            passes += planned.passes
            for run, row in zip(group, planned.runs, strict=True):
                evaluations += sum(
                    row.state != "there"
                    or not is_evaluated(
                        *(workspace, source, run.name),
                        tag=target,
                        split=split,
                        precision=options.precision,
                    )
                    for target in targets[kind]
                )
    return TrainingPlan(found, passes, evaluations)


def _rows(plan: TrainingPass) -> dict[Run, PlannedRun]:
    """The runs of a pass; those that are trained need no seconds."""
    heads = build_heads(
        list(plan.configs),
        layers=len(plan.layers),
        hidden=plan.split.record.hidden_size,
        classes=plan.classes,
        device="meta",
    )
    begun = (plan.folder / "resume.ckpt").is_file() if plan.todo else False
    total, found = len(plan.split), {}
    for run, config in plan.configs.items():
        examples, training = run.examples(total), config.training
        steps = training.epochs * ceil(examples / training.batch_size)
        todo = run in plan.todo
        rate = training_rate(plan.workspace, config) if todo and steps else None
        found[run] = PlannedRun(
            head=run.head + run.variant,
            trained_on=str(plan.tag),
            state="there" if not todo else "begun" if begun else "new",
            fraction=run.fraction,
            seed=run.seed,
            parameters=count_parameters(heads[run])[1],
            examples=examples,
            epochs=training.epochs if examples else 0,
            steps=steps,
            seconds=rate.seconds * steps if rate else None if todo and steps else 0.0,
            measured=rate.measured if rate else None,
        )
    return found
