"""The snapshots that need no training here.

They are the pretrained encoder, its untrained twin, means, and checkpoints of others.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.encoders.checkpoint_path import parted_revision
from bertvision.pipelines.encoders.loading import (
    PretrainedEncoder,
    dimensions,
    find_pretrained,
    load_model,
    load_tokenizer,
    new_model,
    pad_id,
)
from bertvision.pipelines.encoders.output_layer import (
    OutputOrigin,
    choose_output,
    load_with_output,
)
from bertvision.pipelines.encoders.trainer_state import trainer_state
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import special_ends
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.variants.variant import begin, whole
from bertvision.pipelines.workspace.config import WorkspaceConfig
from bertvision.pipelines.workspace.records import is_snapshot, read_snapshot_info
from bertvision.pipelines.workspace.selection import check_unlearned
from bertvision.pipelines.workspace.snapshots import (
    encoder_of,
    load_snapshot,
    save_snapshot,
    snapshot_at,
)
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)


def pretrained(workspace: Workspace) -> PretrainedEncoder:
    """The checkpoint that a workspace was made with.

    Raises:
        InputError: it cannot be reached any more.
        WorkspaceError: its weights changed since.
    """
    config = workspace.config.model
    checkpoint = find_pretrained(config.name_or_path, config.revision)
    if weights_digest(checkpoint.folder) != config.weights_sha256:
        raise WorkspaceError(
            f"the weights of {checkpoint.name_or_path} changed since {workspace.root} was made: "
            "put the old ones back, or start another --workspace"
        )
    if workspace.config.finetune.init_from is not None:
        encoder = copy.deepcopy(checkpoint.config)
        encoder.num_labels, encoder.problem_type = 2, None  # what is there is of the other task
        checkpoint = checkpoint._replace(config=encoder)
    return checkpoint


def checkpoint_of_states(workspace: Workspace, tag: SnapshotTag) -> PretrainedEncoder:
    """The checkpoint whose own output layer reads the states of a snapshot.

    It is what the workspace was made with, and of a named snapshot what it was made of.

    Raises:
        InputError: it cannot be reached any more.
        WorkspaceError: its weights changed since.
    """
    adopted = workspace.config.adopted
    if not tag.is_named or adopted is None or tag not in adopted.sources:
        return pretrained(workspace)
    checkpoint = find_adopted(source := adopted.sources[tag])
    info = read_snapshot_info(workspace.require_snapshot(tag))
    if weights_digest(checkpoint.folder) != info.adopted_sha256:
        raise WorkspaceError(
            f"the weights of {source} are not those that snapshot {tag} of {workspace.root} was "
            "made of: put the old ones back, or adopt it into another --workspace"
        )
    return checkpoint


def find_adopted(source: str) -> PretrainedEncoder:
    """Find a checkpoint that was adopted.

    Args:
        source: Folder, or name on the hub, with a revision behind ``@`` if one was given.

    Raises:
        InputError: as of `find_pretrained`.
    """
    return find_pretrained(*parted_revision(source))


def checkpoint_for(model: str, revision: str | None, task: TaskConfig) -> PretrainedEncoder:
    """The checkpoint, if it can learn the task: its special tokens, windows as long as the task's.

    Args:
        model: hub name or local folder.
        revision: branch, tag or commit on the hub.
        task: settings of the task.

    Raises:
        InputError: there is no such encoder, or it cannot learn the task.
    """
    checkpoint = find_pretrained(model, revision)
    tokenizer = load_tokenizer(checkpoint.folder)
    begins, ends = special_ends(tokenizer)
    if not (begins and ends) and (ends or not load_task(task.name).of_decoders):
        raise InputError(
            f"{checkpoint.name_or_path} puts no special tokens around a text, and {task.name} "
            "needs them: fine-tune an encoder such as bert-base-uncased or roberta-base; decoders, "
            "which put none at its end, learn tasks of sentences such as sst2 and csv"
        )
    longest = dimensions(checkpoint.config, tokenizer).max_length
    if task.max_length > longest:
        raise InputError(
            f"max_length {task.max_length} is more than the {longest} positions of "
            f"{checkpoint.name_or_path}: give --max-length {longest} or less"
        )
    return checkpoint


def load_pretrained(workspace: Workspace, checkpoint: PretrainedEncoder) -> PreTrainedModel:
    """The pretrained encoder as fine-tuning begins with it.

    It has the task's output layer, made new from the workspace's seed or that of the checkpoint
    (`ModelConfig.output_layer`), and the variants' changes.
    """
    config = workspace.config
    kind = load_task(config.task.name)
    seed, options = config.finetune.seed, dict(kind.model_options(config.task))
    if not config.model.special_ends and checkpoint.config.pad_token_id is None:
        # its output layer reads the last token that is none of these
        options["pad_token_id"] = pad_id(load_tokenizer(checkpoint.folder), checkpoint.config)
    torch.manual_seed(seed)
    if config.finetune.init_from is None:
        model = load_with_output(
            *(checkpoint.folder, kind.model_class, checkpoint.config, options),
            origin=config.model.output_layer,
            seed=seed,
        )
    else:  # an output layer that is called as the other task's is as new as any
        model = new_model(checkpoint.config, kind.model_class, seed=seed, **options)
        if _put(encoder_of(checkpoint.folder), model):
            _put_pooler(workspace, model)
    begin(load_variants(config.finetune.variant), model, checkpoint.folder)
    return model


def _put(encoder: PreTrainedModel, model: PreTrainedModel) -> list[str]:
    """Give a model the weights of an encoder; a pooler that one of them alone has stays apart.

    Returns:
        Names of the pooler's parameters, where the model alone has one.
    """
    lacking, strange = model.base_model.load_state_dict(encoder.state_dict(), strict=False)
    if odd := [name for name in (*lacking, *strange) if not name.startswith("pooler.")]:
        raise InputError(
            f"the encoder of the snapshot differs from one of its family in {odd[0]}: it cannot "
            "be begun with"
        )
    return list(lacking)


def _put_pooler(workspace: Workspace, model: PreTrainedModel) -> None:
    """Give a model the pooler of the encoder that its start began with, if that has one.

    A task that does without a pooler, such as phrases, leaves none: a new one would be learned from
    the beginning, beside that of the pretrained encoder.
    """
    while (place := workspace.config.finetune.init_from) is not None:
        workspace = snapshot_at(place, "--init-from")[0]
        states = load_model(pretrained(workspace).folder).state_dict()
        pooler = {name: values for name, values in states.items() if name.startswith("pooler.")}
        if pooler:
            model.base_model.load_state_dict(pooler, strict=False)
            return


def check_starts(config: WorkspaceConfig) -> None:
    """Refuse a new workspace that scores what the encoders behind its own have learned.

    Raises:
        ProvenanceError: as of `check_unlearned`.
    """
    place = config.finetune.init_from
    while place is not None:
        try:
            start, tag = snapshot_at(place, "--init-from")
        except (WorkspaceError, UnknownNameError):
            log.warning("%s is gone: whether it learned what is scored cannot be told", place)
            return
        if tag.fraction > 0:
            check_unlearned(config, start.config, place)
        place = start.config.finetune.init_from


def ensure_snapshot(workspace: Workspace, tag: str) -> Path:
    """The folder of a snapshot, which is made where it is missing and needs no training.

    Such are ``0e``, ``untrained``, means, and checkpoints of others (see `finetuning.adopt`).

    ``untrained`` has the architecture of the pretrained encoder and the random weights that its
    library initialises it with, from the workspace's seed: the twin of which probes tell what the
    architecture alone gives (Zhang and Bowman 2018). A mean such as ``2e+3e`` has the mean of the
    weights of its parts (Wortsman et al. 2022, arXiv:2203.05482, *Model soups*; of one training).

    Raises:
        UnknownNameError: another snapshot, which only fine-tuning makes, is missing, or the
            encoder that adopted ones began with is not known.
        InputError: the pretrained checkpoint cannot be reached.
        WorkspaceError: its weights changed.
    """
    tag = SnapshotTag(tag)
    folder, adopted = workspace.snapshot_dir(tag), workspace.config.adopted
    source = None if adopted is None else adopted.sources.get(tag)
    made_here = source is not None or tag.is_untrained or tag.is_pretrained or tag.is_mean
    if is_snapshot(folder) or not made_here:
        return workspace.require_snapshot(tag)
    if adopted and tag.is_pretrained and adopted.tag_of(workspace.config.model):
        raise UnknownNameError(
            f"{workspace.root} has no snapshot {tag}: from which encoder those of others were "
            "fine-tuned is not known; adopt them into another --workspace and name it with --model"
        )
    parts = [ensure_snapshot(workspace, part) for part in tag.parts] if tag.is_mean else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_name(f".{tag}.lock"), f"making snapshot {tag}", wait=True):
        if not is_snapshot(folder):
            if parts:
                _average(workspace, tag, folder, parts)
            elif source is not None:
                _adopt(workspace, tag, folder, source)
            else:
                _make(workspace, tag, folder)
    return folder


def adopted_output(
    checkpoint: PretrainedEncoder, task: TaskConfig, classes: Sequence[str]
) -> tuple[PretrainedEncoder, OutputOrigin]:
    """A checkpoint of others with its classes named, and how its output layer is taken.

    Args:
        checkpoint: Checkpoint of others.
        task: Settings of the task.
        classes: Classes in the order of its outputs; empty takes those of its configuration.

    Raises:
        InputError: it has no output layer of the task, or one of other classes.
    """
    name, kind = checkpoint.name_or_path, load_task(task.name)
    if classes:
        named = copy.deepcopy(checkpoint.config)
        if len(classes) != named.num_labels:
            raise InputError(
                f"--classes {','.join(classes)}: {name} has {named.num_labels} outputs; name the "
                "class of each"
            )
        named.id2label = dict(enumerate(classes))
        checkpoint = checkpoint._replace(config=named)
    choice = choose_output(checkpoint, kind.model_class, kind.model_options(task))
    if choice.origin is None:
        raise InputError(
            f"{name} has no output layer of the task {task.name}: `bertvision finetune --model "
            f"{name}` gives it one"
        )
    if choice.origin == "new":
        theirs = list((checkpoint.config.id2label or {}).values())
        if classes:
            raise InputError(
                f"--classes {','.join(classes)}: the classes of the data are "
                f"{', '.join(task.classes)}; name these, in the order of the outputs of {name}"
            )
        raise InputError(
            f"the outputs of {name} are called {', '.join(map(str, theirs))}, and the classes of "
            f"the data {', '.join(task.classes)}: where they are the same by other names, give "
            "these in the order of its outputs with --classes"
        )
    return checkpoint, choice.origin


def _adopt(workspace: Workspace, tag: SnapshotTag, folder: Path, source: str) -> None:
    """Save a checkpoint of others as a snapshot.

    Its outputs come in the order of the data's classes; one with a name gets a new output layer.
    """
    config, checkpoint = workspace.config, find_adopted(source)
    kind, classes = load_task(config.task.name), config.adopted.classes if config.adopted else ()
    if tag.is_named:
        model = load_pretrained(workspace, checkpoint)
    else:
        checkpoint, origin = adopted_output(checkpoint, config.task, classes)
        model = load_with_output(
            *(checkpoint.folder, kind.model_class, checkpoint.config),
            kind.model_options(config.task),
            origin=origin,
            seed=config.finetune.seed,
        )
    state = trainer_state(checkpoint.folder)
    save_snapshot(
        *(folder, model, load_tokenizer(checkpoint.folder), config),
        tag=tag,
        step=state.global_step if state else 0,
        steps_per_epoch=round(state.global_step / state.epoch) if state else 0,
        adopted_from=source,
        adopted_sha256=weights_digest(checkpoint.folder),
    )


def _average(workspace: Workspace, tag: SnapshotTag, folder: Path, parts: list[Path]) -> None:
    """Save the last of some snapshots with the mean of the weights of all; whole numbers stay."""
    model, tokenizer, info = load_snapshot(parts[-1])
    sums = {name: t.double() for name, t in model.state_dict().items() if t.is_floating_point()}
    for part in parts[:-1]:
        weights = load_snapshot(part).model.state_dict()
        for name, total in sums.items():
            total += weights[name]
    means = {name: total / len(parts) for name, total in sums.items()}
    model.load_state_dict(means, strict=False)
    save_snapshot(
        *(folder, model, tokenizer, workspace.config),
        tag=tag,
        step=info.step,
        steps_per_epoch=info.steps_per_epoch,
        seconds=info.seconds,
        seconds_per_step=info.seconds_per_step,
        trained_parameters=info.trained_parameters,
    )


def _make(workspace: Workspace, tag: SnapshotTag, folder: Path) -> None:
    config, checkpoint = workspace.config, pretrained(workspace)
    variants = load_variants(config.finetune.variant)
    model = load_pretrained(workspace, checkpoint)
    if tag.is_untrained:
        kind, twin_of = load_task(config.task.name), model.base_model
        model = new_model(
            checkpoint.config,
            kind.model_class,
            seed=config.finetune.seed,
            **kind.model_options(config.task),
        )
        twin = getattr(model.base_model, "pooler", None)
        if twin is not None and getattr(twin_of, "pooler", None) is None:
            # a checkpoint without one: its twin has none either
            model.base_model.register_module("pooler", None)
        begin(variants, model)
    model, tokenizer = whole(variants, model), load_tokenizer(checkpoint.folder)
    save_snapshot(folder, model, tokenizer, config, tag=tag, step=0, steps_per_epoch=0, seconds=0.0)
