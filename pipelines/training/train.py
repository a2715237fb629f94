"""Train heads on the activations of a snapshot: several in one pass, without running BERT.

BestEpoch: keep each head as it was after the epoch with the lowest loss on held-out examples.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from safetensors.torch import save_file
from torch import Tensor, nn

from bertvision.errors import InputError, NonFiniteError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader, default_buffer
from bertvision.models import Kind
from bertvision.models.factory import count_parameters
from bertvision.pipelines.files import digests_in, new_folder
from bertvision.pipelines.options import LoggerName
from bertvision.pipelines.precision import Precision, autocast, device, resolve_precision
from bertvision.pipelines.progress import parts
from bertvision.pipelines.ranks import Rank
from bertvision.pipelines.records import write_record
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.datamodule import decoded
from bertvision.pipelines.training.group import Group
from bertvision.pipelines.training.lightning import (
    Clock,
    TrainingLog,
    quiet_lightning,
    run_logger,
    trainer,
)
from bertvision.pipelines.training.module import HeadsModule, head_loss
from bertvision.pipelines.training.resume import ResumeFile
from bertvision.pipelines.training.trained_head import head_lock, kind_of_run
from bertvision.pipelines.training.training_pass import SplitOpener, TrainingPass
from bertvision.pipelines.workspace.heads import head_activations
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.records import PassRecord, RunMetrics, read_run_metrics
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

_BATCH = 64


class _Best(NamedTuple):
    epoch: int
    loss: float
    weights: dict[str, Tensor]


class BestEpoch(pl.Callback):
    """Scores the heads after each epoch, and remembers the best state of each.

    The held-out examples are a part of the training data that nothing is trained on, never dev.

    Args:
        held_out: the split to score on.
        layers: indices of the hidden states that the heads take.
        precision: Precision of the heads' arithmetic.
    """

    def __init__(self, held_out: ActivationSplit, layers: list[int], precision: Precision) -> None:
        self._loader = ActivationLoader(held_out, batch_size=_BATCH, shuffle=False, layers=layers)
        self._precision = precision
        self._losses: dict[str, list[float]] = {}
        self._best: dict[str, _Best] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """At the end of an epoch: score, before the resume file of this step is written."""
        if not trainer.is_last_batch:
            return
        assert isinstance(pl_module, HeadsModule)
        scores = self._score(list(pl_module.heads), pl_module.task)
        for run, head, loss in zip(pl_module.runs, pl_module.heads, scores, strict=True):
            losses = self._losses.setdefault(run.name, [])
            losses.append(loss)
            if not math.isfinite(loss):
                pl_module.diverged.add(run)
            elif loss <= min(losses):
                weights = {k: x.detach().cpu().clone() for k, x in head.state_dict().items()}
                self._best[run.name] = _Best(len(losses), loss, weights)

    @torch.no_grad()
    def _score(self, heads: list[nn.Module], task: Task) -> list[float]:
        where = device()
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
        sums, count = [0.0] * len(heads), 0
        for head in heads:
            head.eval()
        for packed in self._loader:
            batch = decoded(packed.to(where), dtype)
            with autocast(self._precision, where):
                for i, head in enumerate(heads):
                    sums[i] += float(head_loss(head, batch, task)) * len(packed)
            count += len(packed)
        for head in heads:
            head.train()
        return [total / count for total in sums]

    def restore(self, name: str, head: nn.Module) -> tuple[int, list[float]]:
        """Give a head the weights of its best epoch.

        Returns:
            That epoch, from 1, and the held-out loss of every epoch.
        """
        best = self._best[name]
        head.load_state_dict(best.weights)
        return best.epoch, self._losses[name]

    def state_dict(self) -> dict[str, Any]:
        """Losses and best states, for the resume file."""
        return {"losses": self._losses, "best": {k: tuple(x) for k, x in self._best.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from an interrupted training's."""
        self._losses = state_dict["losses"]
        self._best = {name: _Best(*best) for name, best in state_dict["best"].items()}


log = logging.getLogger(__name__)

_FEW_STEPS = 100
_POINTS = 500
"""About so many losses of a head are told to a logger; the head's own log has every step."""


def train(
    workspace: Workspace,
    names: Sequence[str | Run],
    tag: str,
    options: TrainOptions,
    *,
    overwrite: bool = False,
    logger: LoggerName | None = None,
    readers: int | None = None,
    resume_every_seconds: float = 120.0,
    splits: SplitOpener = head_activations,
) -> list[RunMetrics]:
    """Train heads on the training split of a snapshot, with one pass over it per epoch.

    Heads of one seed share a pass, whatever part of the examples each is given, but for those whose
    names carry layers, a learning rate or epochs of their own. An interrupted training is
    continued, exactly, by the same call.

    Args:
        workspace: Workspace with the activations.
        names: heads of the registry, of plugins, or dotted paths ``package.module:Class``, each
            perhaps with a part of the examples and a seed (`Run`): ``learned-pooling@f0.3@s1``.
        tag: the snapshot.
        options: Options of training.
        overwrite: replace heads that were trained otherwise.
        logger: Place where losses go too, under ``heads/<tag>/`` (see `run_logger`).
        readers: threads that read shards; by default chosen by the size of a batch.
        resume_every_seconds: Most seconds of work that a kill loses.
        splits: Opens what heads read; by default what is stored, whole.

    Returns:
        What each head's training came to, in the order of ``names``.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        WorkspaceError: a head of that name was trained otherwise; nothing was changed.
        IncompleteSplitError: the extraction of the split has not ended.
        LockedError: another process is training the same heads.
        StoppedError: SIGINT or SIGTERM; all is saved.
    """
    runs = [name if isinstance(name, Run) else Run.parse(name) for name in names]
    runs = options.named(runs, workspace.config.model)
    tag = SnapshotTag(tag)
    plans = plan_passes(workspace, runs, tag, options, overwrite=overwrite, splits=splits)
    missing = []
    for plan in plans:  # all are checked before the first begins
        planned = plan()
        missing.append(len(planned.todo))
        for run in [run for run in planned.configs if run not in planned.todo]:
            log.info("%s was trained on %s before: nothing to do", run.name, tag)
    for plan, part in zip(plans, parts(missing, "training"), strict=True):
        with part, ExitStack() as locks:
            for run in plan().todo:
                folder = workspace.head_dir(tag, run.name)
                locks.enter_context(head_lock(folder, f"training {run.name} on {tag}"))
            if (planned := plan()).todo:  # another process may have trained some just now
                _run(planned, logger, readers, resume_every_seconds)
    return [read_run_metrics(workspace.head_dir(tag, run.name)) for run in runs]


def plan_passes(
    workspace: Workspace,
    runs: Sequence[Run],
    tag: SnapshotTag,
    options: TrainOptions,
    *,
    overwrite: bool = False,
    splits: SplitOpener = head_activations,
) -> list[Callable[[], TrainingPass]]:
    """Planners of the passes over the store, one for the runs that share it; each call looks anew.

    Args:
        workspace: Workspace with the activations.
        runs: heads, with the names that they are kept under (`TrainOptions.named`).
        tag: the snapshot.
        options: Options of training.
        overwrite: replace heads that were trained otherwise.
        splits: Opens what heads read, as `head_activations` does.

    Raises:
        InputError: there is no run, or one comes twice.
    """
    if not runs or len(set(runs)) != len(runs):
        given = ", ".join(run.name for run in runs) or "(none)"
        raise InputError(f"heads {given}: name at least one, each once")
    task, options = workspace.config.task.name, options.unnamed
    groups: dict[tuple[Kind, int, TrainOptions], list[Run]] = {}
    for run in runs:
        key = kind_of_run(run, task), run.seed, replace(options, **run.settings)
        groups.setdefault(key, []).append(run)
    return [
        partial(TrainingPass.plan, workspace, kind, group, tag, own, overwrite, splits)
        for (kind, _, own), group in groups.items()
    ]


def _run(
    planned: TrainingPass,
    logger: LoggerName | None,
    readers: int | None,
    resume_every_seconds: float,
) -> None:
    tag, options = planned.tag, planned.options
    heads = planned.build("cpu")
    names = [run.name for run in heads]
    total = len(planned.split)
    epochs = options.epochs if any(run.examples(total) for run in heads) else 0
    data = planned.data(readers=readers, seed=planned.todo[0].seed)
    module, folder = planned.module(heads), planned.folder  # a wrong teacher leaves no folder
    folder.mkdir(parents=True, exist_ok=True)
    configs = tuple(planned.configs[run] for run in planned.todo)
    write_record(folder / "pass.json", PassRecord(runs=configs))
    resume = ResumeFile(folder / "resume.ckpt", every_seconds=resume_every_seconds)
    steps = epochs * len(data.train_dataloader())
    if 0 < steps < _FEW_STEPS:
        log.warning(
            "%s is little for heads that begin with random weights, which may end at the majority: "
            "--epochs 10 or more trains for longer, --best-epoch keeps the best of them",
            counted(steps, "training step"),
        )
    training_log = TrainingLog(folder / "log.csv", steps, f"train on {tag}", names)
    clock = Clock(lambda: data.train_loader.wait_seconds if data.train_loader else 0.0)
    best = None
    if planned.held_out is not None:
        precision = resolve_precision(options.precision)
        best = BestEpoch(planned.held_out, planned.layers, precision)
    if epochs:
        told = _logger(planned, logger) if logger else nullcontext(False)
        with quiet_lightning(), resume.guard(), told as to:
            trainer(
                folder,
                [training_log, clock, *([best] if best else []), resume],
                Group(Rank()),
                max_epochs=epochs,
                logger=to,
                log_every_n_steps=max(1, steps // _POINTS),
                precision="bf16-mixed" if options.precision == "bf16" else "32-true",
            ).fit(module, datamodule=data, ckpt_path=resume.find(), weights_only=True)
    _save(planned, heads, module, training_log.rows(), clock, best)
    resume.finish()
    shutil.rmtree(folder)
    if module.diverged:
        lost = ", ".join(run.name for run in module.runs if run in module.diverged)
        raise NonFiniteError(
            f"{lost} diverged on {tag}: its loss became NaN or infinite; give a lower --lr. "
            "The other heads are saved"
        )


def _save(
    planned: TrainingPass,
    heads: dict[Run, nn.Module],
    module: HeadsModule,
    rows: list[list[str]],
    clock: Clock,
    best: BestEpoch | None,
) -> None:
    """The folder of each head that did not diverge, whole or not at all."""
    own = own_seconds(clock.seconds, module.own_seconds)
    for column, (run, head) in enumerate(heads.items(), start=1):
        if not all(bool(torch.isfinite(x).all()) for x in head.state_dict().values()):
            module.diverged.add(run)  # by its last step
        if run in module.diverged:
            continue
        losses = [row[column] for row in rows if row[column]]
        tail = [float(loss) for loss in losses[-max(1, len(losses) // 10) :]]
        examples = run.examples(len(planned.split))
        epoch, held_out = planned.options.epochs if examples else 0, None
        if best is not None and examples:
            epoch, held_out = best.restore(run.name, head)
        trainable, total = count_parameters(head)
        metrics = RunMetrics(
            head=run.head + run.variant,
            trained_on=planned.tag,
            fraction=run.fraction,
            seed=run.seed,
            trainable=trainable,
            total=total,
            examples=examples,
            steps=module.steps[run],
            epoch=epoch,
            loss=sum(tail) / len(tail) if tail else None,
            held_out_losses=held_out,
            seconds=clock.seconds,
            own_seconds=own[run],
            wait_seconds=clock.wait_seconds,
            seconds_per_epoch=clock.seconds / planned.options.epochs,
            trained_together=[other.name for other in heads],
        )
        with new_folder(planned.workspace.head_dir(planned.tag, run.name)) as temporary:
            save_file(
                {name: x.detach().cpu().contiguous() for name, x in head.state_dict().items()},
                temporary / "model.safetensors",
            )
            lines = ["step,loss", *(f"{i},{loss}" for i, loss in enumerate(losses, start=1)), ""]
            (temporary / "log.csv").write_text("\n".join(lines))
            buffer = default_buffer(planned.split, len(planned.layers))
            config = planned.configs[run].model_copy(update={"buffer": buffer})
            write_record(temporary / "config.json", config)
            written = ("model.safetensors", "config.json")
            digests = digests_in(temporary, written)
            write_record(temporary / "metrics.json", metrics.model_copy(update={"sha256": digests}))


def own_seconds(seconds: float, of_steps: Mapping[Run, Sequence[float]]) -> dict[Run, float]:
    """Seconds of each run of a pass: its steps times their median, and an equal share of the rest.

    Args:
        seconds: wall time of the pass.
        of_steps: Seconds of each step, by run.
    """
    rest = max(0.0, seconds - sum(map(sum, of_steps.values())))
    return {
        run: rest / len(of_steps) + (len(steps) * statistics.median(steps) if steps else 0.0)
        for run, steps in of_steps.items()
    }


def _logger(planned: TrainingPass, name: LoggerName) -> AbstractContextManager[Logger]:
    """Where the losses of a pass go too, with what its weights depend on."""
    settings = {run.name: config.to_json() for run, config in planned.configs.items()}
    return run_logger(
        name,
        planned.workspace.root / "heads" / planned.tag,
        title=f"{planned.tag}: {', '.join(run.name for run in planned.todo)}",
        settings={key: settings[key] for key in (run.name for run in planned.todo)},
    )
