"""Train heads on the activations of a snapshot: several in one pass, without running BERT."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import nn

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.lock import exclusive
from bertvision.featurestore.schema import SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.models.registry import count_parameters
from bertvision.pipelines.config import digest_of
from bertvision.pipelines.datamodule import ActivationDataModule
from bertvision.pipelines.files import new_folder, write_json
from bertvision.pipelines.lightning import Clock, TrainingLog, quiet_lightning, trainer
from bertvision.pipelines.module import HeadsModule, build_heads
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.resume import ResumeFile
from bertvision.pipelines.workspace import Workspace, head_folder

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
    seed: int = Field(0, ge=0)


def train(
    workspace: Workspace,
    names: Sequence[str],
    tag: str,
    options: TrainOptions,
    *,
    overwrite: bool = False,
    tensorboard: bool = False,
    readers: int = 2,
    resume_every_seconds: float = 120.0,
) -> list[dict[str, Any]]:
    """Train heads on the ``train`` split of a snapshot, from one pass over the store per epoch.

    An interrupted training is continued, exactly, by the same call.

    Args:
        workspace: with the activations.
        names: heads of the registry, of plugins, or dotted paths ``package.module:Class``.
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
    if not names or len(set(names)) != len(names):
        raise InputError(f"heads {', '.join(names) or '(none)'}: name at least one, each once")
    tag = SnapshotTag(tag)
    options = options.model_copy(update={"precision": resolve_precision(options.precision)})
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    data = ActivationDataModule(
        workspace.activations,
        tag,
        batch_size=options.batch_size,
        layers=options.layers,
        seed=options.seed,
        readers=readers,
        dtype=dtype,
    )
    split = workspace.split(tag, "train")
    configs = {name: _head_config(name, split, options) for name in names}
    todo = [
        name for name in names if overwrite or not _is_trained(workspace, tag, name, configs[name])
    ]
    if _run_folder(workspace, tag, list(configs.values())).exists():
        todo = list(names)  # begun together: killed perhaps while one head after another was saved
    if todo:
        _run(workspace, tag, todo, configs, options, data, tensorboard, resume_every_seconds)
    return [read_metrics(workspace.head_dir(tag, name)) for name in names]


def read_metrics(folder: Path) -> dict[str, Any]:
    """What training recorded of a head."""
    return _read_json(folder / "metrics.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkspaceError(
            f"{path} is damaged ({error}): train the head again with --overwrite"
        ) from error
    return values


def _run(
    workspace: Workspace,
    tag: SnapshotTag,
    names: list[str],
    configs: dict[str, dict[str, Any]],
    options: TrainOptions,
    data: ActivationDataModule,
    tensorboard: bool,
    resume_every_seconds: float,
) -> None:
    first = configs[names[0]]
    heads = build_heads(
        names, layers=len(first["layers"]), hidden=first["hidden_size"], seed=options.seed
    )
    folder = _run_folder(workspace, tag, [configs[name] for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", f"training {', '.join(names)} on {tag}"):
        module = HeadsModule(heads, lr=options.lr, seed=options.seed, digest=folder.name)
        resume = ResumeFile(folder / "resume.ckpt", every_seconds=resume_every_seconds)
        steps = options.epochs * len(data.train_dataloader())
        training_log = TrainingLog(folder / "log.csv", steps, f"train on {tag}", names)
        clock = Clock(lambda: data.train_loader.wait_seconds if data.train_loader else 0.0)
        with quiet_lightning(), resume.guard():
            trainer(
                folder,
                [training_log, clock, resume],
                max_epochs=options.epochs,
                logger=_tensorboard(workspace, tag) if tensorboard else False,
                precision="bf16-mixed" if options.precision == "bf16" else "32-true",
            ).fit(module, datamodule=data, ckpt_path=resume.find(), weights_only=True)
        rows = training_log.rows()
        for column, (name, head) in enumerate(heads.items(), start=1):
            losses = [[row[0], row[column]] for row in rows]
            _save(workspace.head_dir(tag, name), head, configs[name], losses, names, clock, options)
        resume.finish()
    shutil.rmtree(folder)


def _run_folder(workspace: Workspace, tag: SnapshotTag, configs: list[dict[str, Any]]) -> Path:
    """Where a training of these heads keeps what it needs to go on."""
    return workspace.root / "heads" / tag / f".run-{digest_of(configs)[:16]}"


def _save(
    folder: Path,
    head: nn.Module,
    config: dict[str, Any],
    losses: list[list[str]],
    together: list[str],
    clock: Clock,
    options: TrainOptions,
) -> None:
    """A head's folder, whole or not at all: weights, config.json, log.csv and metrics.json."""
    trainable, total = count_parameters(head)
    tail = [float(loss) for _, loss in losses[-max(1, len(losses) // 10) :]]
    with new_folder(folder) as temporary:
        save_file(
            {name: x.detach().cpu().contiguous() for name, x in head.state_dict().items()},
            temporary / "model.safetensors",
            metadata={"head": config["head"], "bertvision": version("bertvision")},
        )
        lines = ["step,loss", *(",".join(row) for row in losses), ""]
        (temporary / "log.csv").write_text("\n".join(lines))
        write_json(temporary / "config.json", config)
        write_json(
            temporary / "metrics.json",
            {
                "head": config["head"],
                "trained_on": config["trained_on"],
                "trainable": trainable,
                "total": total,
                "steps": len(losses),
                "loss": sum(tail) / len(tail),
                "seconds": clock.seconds,
                "wait_seconds": clock.wait_seconds,
                "seconds_per_epoch": clock.seconds / options.epochs,
                "trained_together": together,
            },
        )


def _head_config(name: str, split: ActivationSplit, options: TrainOptions) -> dict[str, Any]:
    """``config.json`` of a head: everything its weights depend on."""
    record = split.record
    layers = [record.layers[i] for i in split.layer_positions(options.layers)]
    return {
        "head": name,
        "trained_on": record.tag,
        "layers": layers,
        "hidden_size": record.hidden_size,
        "encoding": record.encoding,
        "training": options.model_dump(mode="json", exclude={"layers"}),
        "activations": {
            "examples": record.examples,
            "plan_sha256": record.plan_sha256,
            **record.provenance,
        },
    }


def _is_trained(workspace: Workspace, tag: SnapshotTag, name: str, config: dict[str, Any]) -> bool:
    folder = workspace.head_dir(tag, name)
    if not (folder / "metrics.json").is_file():
        return False
    held = _read_json(folder / "config.json")
    for field in config:
        if held.get(field) != config[field]:
            there, here = _first_difference(held.get(field), config[field])
            raise WorkspaceError(
                f"{head_folder(name)} was trained on {tag} before with {field}: {there}, now it "
                f"is {here}: give --overwrite to replace it"
            )
    log.info("%s was trained on %s before: nothing to do", name, tag)
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
