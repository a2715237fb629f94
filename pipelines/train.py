"""Train heads on the activations of a snapshot: several in one pass, without running BERT."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import nn

from bertvision.errors import InputError, NonFiniteError, WorkspaceError
from bertvision.featurestore.schema import SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.models.registry import count_parameters
from bertvision.pipelines.best_epoch import BestEpoch
from bertvision.pipelines.config import digest_of
from bertvision.pipelines.datamodule import ActivationDataModule, HiddenStates, decoded
from bertvision.pipelines.files import new_folder, write_json
from bertvision.pipelines.lightning import Clock, TrainingLog, quiet_lightning, trainer
from bertvision.pipelines.module import HeadsModule, build_heads
from bertvision.pipelines.precision import device, head_precision, resolve_precision
from bertvision.pipelines.results import read_run_config, read_run_metrics
from bertvision.pipelines.resume import ResumeFile
from bertvision.pipelines.runs import Run, ranks
from bertvision.pipelines.trained_head import STORED, head_lock, is_whole, kind_of_run
from bertvision.pipelines.workspace import Workspace

log = logging.getLogger(__name__)


class TrainOptions(BaseModel):
    """How heads are trained. Defaults are the paper's: Adam 1e-3, batches of 16, one epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(1, ge=1)
    batch_size: int = Field(16, ge=1)
    lr: float = Field(1e-3, gt=0)
    layers: tuple[int, ...] | None = None
    """Indices of the hidden states to train on; None means all that are stored."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    best_epoch: bool = False
    """Keep the epoch with the lowest loss on ``tune``, the held-out part of train, not the last."""


def train(
    workspace: Workspace,
    names: Sequence[str | Run],
    tag: str,
    options: TrainOptions,
    *,
    overwrite: bool = False,
    tensorboard: bool = False,
    readers: int = 2,
    resume_every_seconds: float = 120.0,
) -> list[dict[str, Any]]:
    """Train heads on the training split of a snapshot, with one pass over the store per epoch.

    Heads of one seed share a pass, whatever part of the examples each is given. An interrupted
    training is continued, exactly, by the same call.

    Args:
        workspace: with the activations.
        names: heads of the registry, of plugins, or dotted paths ``package.module:Class``, each
            perhaps with a part of the examples and a seed (`Run`): ``learned-pooling@f0.3@s1``.
        tag: the snapshot.
        options: how to train.
        overwrite: replace heads that were trained otherwise.
        tensorboard: also log for TensorBoard, in ``heads/<tag>/tensorboard``.
        readers: threads that read shards.
        resume_every_seconds: at most this much work is lost when the process is killed.

    Returns:
        The ``metrics.json`` of each head, in the order of ``names``.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        WorkspaceError: a head of that name was trained otherwise; nothing was changed.
        IncompleteSplitError: the extraction of the split has not ended.
        LockedError: another process is training the same heads.
        StoppedError: SIGINT or SIGTERM; all is saved.
    """
    runs = [name if isinstance(name, Run) else Run.parse(name) for name in names]
    if not runs or len(set(runs)) != len(runs):
        given = ", ".join(run.name for run in runs) or "(none)"
        raise InputError(f"heads {given}: name at least one, each once")
    tag = SnapshotTag(tag)
    task = workspace.config.task.name
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((kind_of_run(run, task), run.seed), []).append(run)
    plans = [
        partial(_Pass.plan, workspace, kind, group, tag, options, overwrite)
        for (kind, _), group in groups.items()
    ]
    for plan in plans:  # all are checked before the first begins
        planned = plan()
        for run in [run for run in planned.configs if run not in planned.todo]:
            log.info("%s was trained on %s before: nothing to do", run.name, tag)
    for plan in plans:
        with ExitStack() as locks:
            for run in plan().todo:
                folder = workspace.head_dir(tag, run.name)
                locks.enter_context(head_lock(folder, f"training {run.name} on {tag}"))
            if (planned := plan()).todo:  # another process may have trained some just now
                _run(planned, tensorboard, readers, resume_every_seconds)
    return [read_run_metrics(workspace.head_dir(tag, run.name)) for run in runs]


class _Pass(NamedTuple):
    """Heads that are trained from one stream: of one kind and one seed."""

    workspace: Workspace
    tag: SnapshotTag
    split: ActivationSplit
    held_out: ActivationSplit | None
    configs: dict[Run, dict[str, Any]]
    todo: list[Run]
    options: TrainOptions

    @classmethod
    def plan(
        cls,
        workspace: Workspace,
        kind: str,
        runs: list[Run],
        tag: SnapshotTag,
        options: TrainOptions,
        overwrite: bool,
    ) -> _Pass:
        """What is to be trained; nothing is written yet."""
        precision = head_precision(options.precision, kind)
        options = options.model_copy(update={"precision": precision})
        split = workspace.split(tag, STORED[kind].format("train")).require_complete()
        held_out = None
        if options.best_epoch:
            held_out = workspace.split(tag, STORED[kind].format("tune")).require_complete()
        for run in runs:
            if run.fraction > 0 and run.examples(len(split)) == 0:
                raise InputError(
                    f"{run.name}: a fraction of {run.fraction:g} is none of {split.name}'s "
                    f"{len(split)} examples: give a larger one, or 0 for the head untrained"
                )
        configs = {run: _head_config(run, kind, split, options) for run in runs}
        todo = [
            run for run in runs if overwrite or not _is_trained(workspace, tag, run, configs[run])
        ]
        planned = cls(workspace, tag, split, held_out, configs, todo, options)
        planned.build("meta")
        return planned

    @property
    def folder(self) -> Path:
        """Where the training keeps what it needs to go on."""
        digest = digest_of([self.configs[run] for run in self.todo])[:16]
        return self.workspace.root / "heads" / self.tag / f".run-{digest}"

    @property
    def layers(self) -> list[int]:
        """Indices of the hidden states that the heads take."""
        return list(next(iter(self.configs.values()))["layers"])

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoded hidden states."""
        return torch.bfloat16 if self.options.precision == "bf16" else torch.float32

    def build(self, device: str) -> dict[Run, nn.Module]:
        """The heads that are to be trained; on ``meta`` only to see whether they can be made."""
        hidden = self.split.record.hidden_size
        return build_heads(self.todo, layers=len(self.layers), hidden=hidden, device=device)

    def read(self, positions: Sequence[int]) -> list[HiddenStates]:
        """Examples of the split on the device, each by itself."""
        return [
            decoded(self.split.read([i], self.layers).to(device()), self.dtype) for i in positions
        ]


def _run(planned: _Pass, tensorboard: bool, readers: int, resume_every_seconds: float) -> None:
    workspace, tag, options = planned.workspace, planned.tag, planned.options
    heads = planned.build("cpu")
    names = [run.name for run in heads]
    total = len(planned.split)
    epochs = options.epochs if any(run.examples(total) for run in heads) else 0
    folder = planned.folder
    folder.mkdir(parents=True, exist_ok=True)
    data = ActivationDataModule(
        workspace.activations,
        tag,
        train=planned.split.split,
        batch_size=options.batch_size,
        layers=options.layers,
        seed=planned.todo[0].seed,
        readers=readers,
        dtype=planned.dtype,
    )
    module = HeadsModule(
        heads,
        ranks=torch.from_numpy(ranks(planned.split.plan.example_id, planned.todo[0].seed)),
        batch_size=options.batch_size,
        lr=options.lr,
        digest=folder.name,
        read=planned.read,
    )
    resume = ResumeFile(folder / "resume.ckpt", every_seconds=resume_every_seconds)
    steps = epochs * len(data.train_dataloader())
    training_log = TrainingLog(folder / "log.csv", steps, f"train on {tag}", names)
    clock = Clock(lambda: data.train_loader.wait_seconds if data.train_loader else 0.0)
    best = None
    if planned.held_out is not None:
        precision = resolve_precision(options.precision)
        best = BestEpoch(planned.held_out, planned.layers, precision)
    if epochs:
        with quiet_lightning(), resume.guard():
            trainer(
                folder,
                [training_log, clock, *([best] if best else []), resume],
                max_epochs=epochs,
                logger=_tensorboard(workspace, tag) if tensorboard else False,
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
    planned: _Pass,
    heads: dict[Run, nn.Module],
    module: HeadsModule,
    rows: list[list[str]],
    clock: Clock,
    best: BestEpoch | None,
) -> None:
    """The folder of each head that did not diverge, whole or not at all."""
    shared = max(0.0, clock.seconds - sum(module.own_seconds.values()))
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
        metrics = {
            "head": run.head,
            "trained_on": planned.tag,
            "fraction": run.fraction,
            "seed": run.seed,
            "trainable": trainable,
            "total": total,
            "examples": examples,
            "steps": module.steps[run],
            "epoch": epoch,
            "loss": sum(tail) / len(tail) if tail else None,
            "held_out_losses": held_out,
            "seconds": clock.seconds,
            "own_seconds": shared + module.own_seconds[run],
            "wait_seconds": clock.wait_seconds,
            "seconds_per_epoch": clock.seconds / planned.options.epochs,
            "trained_together": [other.name for other in heads],
        }
        with new_folder(planned.workspace.head_dir(planned.tag, run.name)) as temporary:
            save_file(
                {name: x.detach().cpu().contiguous() for name, x in head.state_dict().items()},
                temporary / "model.safetensors",
            )
            lines = ["step,loss", *(f"{i},{loss}" for i, loss in enumerate(losses, start=1)), ""]
            (temporary / "log.csv").write_text("\n".join(lines))
            write_json(temporary / "config.json", planned.configs[run])
            write_json(temporary / "metrics.json", metrics)


def _head_config(
    run: Run, kind: str, split: ActivationSplit, options: TrainOptions
) -> dict[str, Any]:
    """``config.json`` of a head: everything its weights depend on."""
    record = split.record
    layers = [record.layers[i] for i in split.layer_positions(options.layers)]
    training = options.model_dump(mode="json", exclude={"layers"})
    return {
        "head": run.head,
        "kind": kind,
        "trained_on": record.tag,
        "layers": layers,
        "hidden_size": record.hidden_size,
        "encoding": record.encoding,
        "training": {**training, "seed": run.seed, "fraction": run.fraction},
        "activations": {
            "examples": record.examples,
            "plan_sha256": record.plan_sha256,
            **record.provenance,
        },
    }


def _is_trained(workspace: Workspace, tag: SnapshotTag, run: Run, config: dict[str, Any]) -> bool:
    folder = workspace.head_dir(tag, run.name)
    if not is_whole(folder):
        return False
    held = read_run_config(folder)
    for field in config:
        if held.get(field) != config[field]:
            there, here = _first_difference(held.get(field), config[field])
            raise WorkspaceError(
                f"{run.name} was trained on {tag} before with {field}: {there}, now it "
                f"is {here}: give --overwrite to replace it"
            )
    return True


def _first_difference(there: Any, here: Any) -> tuple[str, str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            if there.get(key) != here.get(key):
                return f"{key} = {there.get(key)}", f"{key} = {here.get(key)}"
    return str(there), str(here)


def _tensorboard(workspace: Workspace, tag: SnapshotTag) -> Any:
    from pytorch_lightning.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(workspace.root / "heads" / tag, name="tensorboard")
    except ModuleNotFoundError:
        raise InputError(
            "TensorBoard is not installed: `pip install bertvision[tensorboard]`, or leave "
            "--tensorboard out (losses are always in the head's log.csv)"
        ) from None
