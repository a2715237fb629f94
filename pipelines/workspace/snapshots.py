"""Snapshots of BERT during fine-tuning: save_pretrained folders with their provenance.

A snapshot is a folder in the standard form of transformers (config.json, model.safetensors,
tokenizer) plus ``snapshot.json``. It is made under another name and renamed when it is whole and
on the disk: a folder without ``snapshot.json`` is no snapshot.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from bertvision.errors import InputError, StoreNotFoundError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.encoders.loading import (
    load_model,
    load_tokenizer,
    quiet_transformers,
    tokenizer_digest,
)
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.files import new_folder, write_json
from bertvision.pipelines.records import Settings, digest_of, read_record
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)

MARKER = "snapshot.json"


class SnapshotInfo(Settings):
    """``snapshot.json``: what a snapshot was made from."""

    tag: str
    step: int
    """Optimiser steps taken."""
    steps_per_epoch: int
    """Optimiser steps in one epoch; 0 where the snapshot was made without training data."""
    seconds: float | None = None
    """Wall time of fine-tuning up to here; None where it was not measured."""
    weights_sha256: str
    """Digest of this snapshot's own weights."""
    config_sha256: str
    """Digest of this snapshot's model configuration."""
    tokenizer_sha256: str
    pretrained: ModelConfig
    task: TaskConfig
    data: dict[str, DataConfig]
    finetune: FinetuneConfig
    """Hyper-parameters, precision and seed."""
    versions: dict[str, str]
    created: str
    """UTC, ISO 8601."""


class Snapshot(NamedTuple):
    """A snapshot in memory."""

    model: PreTrainedModel
    """With the output layer of its task, float32, in evaluation mode, on the CPU."""
    tokenizer: Any
    """The fast tokenizer it was fine-tuned with."""
    info: SnapshotInfo
    """Its provenance."""


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide the numbers."""
    names = ("bertvision", "torch", "transformers", "tokenizers", "pytorch-lightning")
    return {name: version(name) for name in names}


def save_snapshot(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    config: WorkspaceConfig,
    *,
    tag: SnapshotTag,
    step: int,
    steps_per_epoch: int,
    seconds: float | None = None,
) -> SnapshotInfo:
    """Save a snapshot as ``folder``: whole or not at all.

    Args:
        folder: where; an unfinished folder there is replaced.
        model: with the output layer of its task.
        tokenizer: its fast tokenizer.
        config: the workspace's settings, recorded as provenance.
        tag: the snapshot's name.
        step: optimiser steps taken.
        steps_per_epoch: optimiser steps in one epoch.
        seconds: wall time of fine-tuning so far.
    """
    with new_folder(folder) as temporary, quiet_transformers():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        info = SnapshotInfo(
            tag=tag,
            step=step,
            steps_per_epoch=steps_per_epoch,
            seconds=seconds,
            weights_sha256=weights_digest(temporary),
            config_sha256=_config_digest(temporary),
            tokenizer_sha256=tokenizer_digest(tokenizer),
            pretrained=config.model,
            task=config.task,
            data=config.data,
            finetune=config.finetune,
            versions=library_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_json(temporary / MARKER, info.model_dump(mode="json"))
    return info


def is_snapshot(folder: Path) -> bool:
    """Whether ``folder`` is a whole snapshot."""
    return (folder / MARKER).is_file()


def read_snapshot_info(folder: Path) -> SnapshotInfo:
    """Read the provenance of a snapshot.

    Raises:
        StoreNotFoundError: ``folder`` is no whole snapshot.
        WorkspaceError: its ``snapshot.json`` is damaged.
    """
    if not is_snapshot(folder):
        raise StoreNotFoundError(
            f"{folder} is no snapshot (it has no {MARKER}): make it with `bertvision finetune`"
        )
    return read_record(folder / MARKER, SnapshotInfo, "bertvision finetune --resume", _REMEDY)


def load_snapshot(folder: Path, *, verify: bool = True) -> Snapshot:
    """Load a snapshot after checking that it is what was saved.

    Args:
        folder: the snapshot.
        verify: also compare the digest of the weights (reads them once more).

    Raises:
        StoreNotFoundError: ``folder`` is no whole snapshot.
        WorkspaceError: weights, configuration or tokenizer differ from what was recorded.
    """
    info = read_snapshot_info(folder)
    try:
        if verify:
            _expect(folder, "weights", weights_digest(folder), info.weights_sha256)
        _expect(folder, "model configuration", _config_digest(folder), info.config_sha256)
        tokenizer = _tokenizer(folder, info)
        task = load_task(info.task.name)
        model = load_model(folder, task.model_class, **task.model_options(info.task))
        return Snapshot(model, tokenizer, info)
    except (InputError, OSError, ValueError) as error:
        raise WorkspaceError(f"snapshot {folder} is damaged: {error}; {_REMEDY}") from error


def load_snapshot_tokenizer(folder: Path) -> Any:
    """The tokenizer of a snapshot, after checking that it is what was saved.

    Raises:
        StoreNotFoundError: ``folder`` is no whole snapshot.
        WorkspaceError: the tokenizer differs from what was recorded.
    """
    info = read_snapshot_info(folder)
    try:
        return _tokenizer(folder, info)
    except (InputError, OSError, ValueError) as error:
        raise WorkspaceError(f"snapshot {folder} is damaged: {error}; {_REMEDY}") from error


def _tokenizer(folder: Path, info: SnapshotInfo) -> Any:
    tokenizer = load_tokenizer(folder)
    _expect(folder, "tokenizer", tokenizer_digest(tokenizer), info.tokenizer_sha256)
    return tokenizer


_REMEDY = "delete the folder and run `bertvision finetune --resume` to make it again"


def _expect(folder: Path, what: str, found: str, recorded: str) -> None:
    if found != recorded:
        raise WorkspaceError(
            f"the {what} of snapshot {folder} changed since it was saved (sha256 {found[:12]}…, "
            f"recorded {recorded[:12]}…); {_REMEDY}"
        )


def _config_digest(folder: Path) -> str:
    return digest_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def count_encoder_parameters(folder: Path) -> int:
    """Parameters of a snapshot's encoder, without the task's output layer.

    They are counted from its configuration alone. Of a span task there is no pooler among them.
    """
    info = read_snapshot_info(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"), quiet_transformers():
        model = load_task(info.task.name).model_class.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.base_model.parameters())
