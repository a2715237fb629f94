"""Snapshots of BERT during fine-tuning: save_pretrained folders with their provenance.

A snapshot is a folder in the standard form of transformers (config.json, model.safetensors,
tokenizer) plus ``snapshot.json``. It is made under another name and renamed when it is whole and
on the disk: a folder without ``snapshot.json`` is no snapshot.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedModel

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore import creation
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.writing.origin import tokenizer_digest
from bertvision.pipelines.encoders.loading import (
    find_unloaded,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from bertvision.pipelines.encoders.weights import weight_names, weights_digest
from bertvision.pipelines.files import new_folder
from bertvision.pipelines.records import digest_of, write_record
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.variants.variant import restore
from bertvision.pipelines.workspace.config import WorkspaceConfig
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.records import (
    MARKER,
    SNAPSHOT_REMEDY,
    SnapshotInfo,
    read_snapshot_info,
)
from bertvision.pipelines.workspace.workspace import Workspace


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
    return creation.library_versions(
        *("bertvision", "torch", "transformers", "tokenizers", "pytorch-lightning")
    )


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
    seconds_per_step: float | None = None,
    trained_parameters: int | None = None,
    adopted_from: str | None = None,
    adopted_sha256: str | None = None,
) -> SnapshotInfo:
    """Save a snapshot as ``folder``: whole or not at all.

    Args:
        folder: Folder of the result; an unfinished one is replaced.
        model: Model with the output layer of its task.
        tokenizer: its fast tokenizer.
        config: the workspace's settings, recorded as provenance.
        tag: the snapshot's name.
        step: optimiser steps taken.
        steps_per_epoch: optimiser steps in one epoch.
        seconds: wall time of fine-tuning so far.
        seconds_per_step: median wall time of its steps.
        trained_parameters: Number of trained parameters.
        adopted_from: Checkpoint of others that it is.
        adopted_sha256: Digest of that checkpoint's weights.
    """
    with new_folder(folder) as temporary, quiet_transformers():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        info = SnapshotInfo(
            tag=tag,
            step=step,
            steps_per_epoch=steps_per_epoch,
            seconds=seconds,
            seconds_per_step=seconds_per_step,
            trained_parameters=trained_parameters,
            weights_sha256=weights_digest(temporary),
            config_sha256=_config_digest(temporary),
            tokenizer_sha256=tokenizer_digest(tokenizer),
            adopted_from=adopted_from,
            adopted_sha256=adopted_sha256,
            pretrained=config.model,
            task=config.task,
            data=config.data,
            finetune=config.finetune,
            versions=library_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_record(temporary / MARKER, info)
    return info


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
        restore(load_variants(info.finetune.variant), model, folder)
        return Snapshot(model, tokenizer, info)
    except (InputError, OSError, ValueError) as error:
        raise WorkspaceError(f"snapshot {folder} is damaged: {error}; {SNAPSHOT_REMEDY}") from error


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
        raise WorkspaceError(f"snapshot {folder} is damaged: {error}; {SNAPSHOT_REMEDY}") from error


def workspace_tokenizer(workspace: Workspace) -> Any:
    """The tokenizer that all snapshots of a workspace have, before one is made too.

    Raises:
        InputError: there is no snapshot, and the encoder that it was made with cannot be reached.
        WorkspaceError: the tokenizer of a snapshot differs from what was recorded.
    """
    if made := workspace.snapshots():
        return load_snapshot_tokenizer(workspace.snapshot_dir(made[0]))
    model = workspace.config.model
    return load_tokenizer(find_unloaded(model.name_or_path, model.revision).folder)


def _tokenizer(folder: Path, info: SnapshotInfo) -> Any:
    tokenizer = load_tokenizer(folder)
    _expect(folder, "tokenizer", tokenizer_digest(tokenizer), info.tokenizer_sha256)
    return tokenizer


def _expect(folder: Path, what: str, actual: str, recorded: str) -> None:
    if actual != recorded:
        raise WorkspaceError(
            f"the {what} of snapshot {folder} changed since it was saved (sha256 {actual[:12]}…, "
            f"recorded {recorded[:12]}…); {SNAPSHOT_REMEDY}"
        )


def _config_digest(folder: Path) -> str:
    return digest_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def count_encoder_parameters(folder: Path, layers: int | None = None) -> int:
    """Parameters of a snapshot's encoder, without the task's output layer.

    They are counted from its configuration alone. Of a span task there is no pooler among them.

    Args:
        folder: Folder of the snapshot.
        layers: only so many of its transformer layers, the lowest; None is all.
    """
    info = read_snapshot_info(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("meta"), quiet_transformers():
        model = load_task(info.task.name).model_class.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.base_model.parameters())


def snapshot_at(place: str, option: str = "--distil") -> tuple[Workspace, SnapshotTag]:
    """The workspace and the snapshot that are meant, such as those of a teacher.

    Args:
        place: ``FOLDER:TAG``.
        option: Option that names it, for the message.

    Raises:
        InputError: it is not of that form.
        WorkspaceError: there is no workspace in the folder.
        UnknownNameError: it has no such snapshot.
    """
    folder, tag = _parted(place, option)
    workspace = Workspace.find(folder)
    workspace.require_snapshot(tag)
    return workspace, tag


def _parted(place: str, option: str) -> tuple[Path, SnapshotTag]:
    folder, _, tag = place.rpartition(":")
    if not folder or not SnapshotTag.is_valid(tag):
        raise InputError(
            f"{option} {place}: give the folder of a workspace and a snapshot there, such as "
            "../teacher:1e"
        )
    return Path(folder).expanduser(), SnapshotTag(tag)


def with_teacher(options: FinetuneOptions) -> FinetuneOptions:
    """The same options, with the teacher's place as a workspace keeps it; it is not opened.

    Raises:
        InputError: it is not of the form ``FOLDER:TAG``.
    """
    if options.distil is None:
        return options
    folder, tag = _parted(options.distil, "--distil")
    return replace(options, distil=f"{folder.resolve()}:{tag}")


def with_start(options: FinetuneOptions) -> FinetuneOptions:
    """The same options, with the snapshot that ``init_from`` names as the model.

    Raises:
        InputError: ``init_from`` is not of the form, beside ``model``, or names a snapshot whose
            encoder has adapters; WorkspaceError and UnknownNameError as of `snapshot_at`.
    """
    if options.init_from is None:
        return options
    if options.model is not None:
        raise InputError(
            f"--model {options.model} --init-from {options.init_from}: both name the encoder to "
            "begin with; give one of the two"
        )
    workspace, tag = snapshot_at(options.init_from, "--init-from")
    place = workspace.snapshot_dir(tag)
    encoder_of(place)
    return replace(options, init_from=f"{workspace.root}:{tag}", model=str(place))


def encoder_of(folder: Path) -> PreTrainedModel:
    """The encoder of a snapshot alone, whatever its output layer.

    Args:
        folder: Folder of the snapshot.

    Raises:
        InputError: it has parts that no encoder of its family has, such as adapters.
    """
    encoder = load_model(folder)
    prefix = f"{encoder.base_model_prefix}."
    own = {*encoder.state_dict(), *(name for name, _ in encoder.named_buffers())}
    inside = (n.removeprefix(prefix) for n in weight_names(folder) if n.startswith(prefix))
    if strange := sorted(name for name in inside if name not in own):
        raise InputError(
            f"the encoder of snapshot {folder} has {strange[0]}, which its family does not have "
            "(adapters of --variant houlsby are such), and it cannot be taken without it: name a "
            "snapshot of another workspace"
        )
    return encoder


def of_teacher(options: FinetuneOptions) -> dict[str, str]:
    """Facts about the teacher that a new workspace keeps beside the options."""
    if options.distil is None:
        return {}
    workspace, tag = snapshot_at(options.distil)
    return {"teacher_sha256": read_snapshot_info(workspace.snapshot_dir(tag)).weights_sha256}
