"""Checkpoints of others, as the snapshots of a workspace: fine-tuned ones, and of pretraining."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.storage.lock import exclusive
from bertvision.featurestore.writing.origin import tokenizer_digest
from bertvision.pipelines.encoders.checkpoint_path import check_path, parted_revision
from bertvision.pipelines.encoders.loading import PretrainedEncoder, dimensions, load_tokenizer
from bertvision.pipelines.encoders.output_layer import choose_output
from bertvision.pipelines.encoders.trainer_state import checkpoint_folders, trainer_state
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.config import AdoptedConfig, WorkspaceConfig
from bertvision.pipelines.workspace.creation import agreed, new_config, planned_workspace
from bertvision.pipelines.workspace.job_options import DataOptions, FinetuneOptions
from bertvision.pipelines.workspace.pretrained import (
    adopted_output,
    ensure_snapshot,
    find_adopted,
)
from bertvision.pipelines.workspace.records import is_snapshot, read_snapshot_info
from bertvision.pipelines.workspace.snapshots import workspace_tokenizer
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import FILE, Workspace

log = logging.getLogger(__name__)


def find_checkpoints(names: Sequence[str]) -> dict[SnapshotTag, str]:
    """The checkpoints that are meant, by the tags that their snapshots get.

    Args:
        names: Folders of checkpoints, output folders of transformers' Trainer with its checkpoints,
            or names on the hub, with a revision behind ``@``; with a tag behind a colon where none
            is to be read from ``trainer_state.json``, the revision or the name of the folder.

    Returns:
        Absolute paths of folders, and names on the hub, in the order of training.

    Raises:
        InputError: there is no such folder, no tag can be told, or two have the same.
    """
    sources: dict[SnapshotTag, str] = {}
    for name in names:
        for tag, place in _parted(name):
            if tag in sources:
                raise InputError(
                    f"{sources[tag]} and {place} are both snapshot {tag}: name another tag for "
                    "one of them, such as FOLDER:1.5e or FOLDER:step1000"
                )
            sources[tag] = place
    if not sources:
        raise InputError("name the folder of a checkpoint, such as output/checkpoint-500")
    return dict(sorted(sources.items()))


def _parted(name: str) -> list[tuple[SnapshotTag, str]]:
    """Checkpoints that a name means: one, or all in an output folder of Trainer."""
    place, colon, tail = name.rpartition(":")
    if colon and SnapshotTag.is_valid(tail) and not Path(name).expanduser().is_dir():
        tag = SnapshotTag(tail)
        if tag.is_mean or (tag.fraction <= 0 and not tag.is_named):
            raise InputError(
                f"{name}: the tag of a fine-tuned checkpoint is its number of epochs, such as 0.5e "
                "or 3e, and of another a word such as step1000; the encoder that fine-tuning began "
                "with is named by --model"
            )
        check_path(parted_revision(place)[0])
        folder = Path(place).expanduser()
        return [(tag, str(folder.resolve()) if folder.is_dir() else place)]
    folder = Path(name).expanduser()
    if not folder.is_dir():
        place_on_hub, revision = parted_revision(name)
        if revision and SnapshotTag.is_valid(revision):
            check_path(place_on_hub)
            return [(SnapshotTag(revision), name)]
        if colon and Path(place).expanduser().is_dir():
            raise InputError(
                f"{name}: {tail!r} is neither a number of epochs, as in {place}:3e or "
                f"{place}:0.5e, nor a word, a letter and then a-z, 0-9 and '_', as in "
                f"{place}:step1000"
            )
        raise InputError(
            f"there is no folder {name}; a checkpoint on the hub is named with the epochs that it "
            "was fine-tuned for, as in owner/name:3e, or with a revision, as in "
            "owner/name@step1000 or owner/name@v1.0:step1000"
        )
    inside, cut_off = checkpoint_folders(folder)
    if cut_off:
        log.warning(
            "%s in %s: no config.json is there, so that no checkpoint is taken from it",
            *(", ".join(path.name for path in cut_off), name),
        )
    if inside:
        return [(_tag_of(path, str(path)), str(path.resolve())) for path in inside]
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{name} holds no checkpoint: neither config.json with weights beside it, nor folders "
            "such as checkpoint-500 that have them"
        )
    return [(_tag_of(folder, name), str(folder.resolve()))]


def _tag_of(folder: Path, name: str) -> SnapshotTag:
    """Tag of a checkpoint: the epochs that Trainer counted, to a thousandth; else its folder."""
    if (state := trainer_state(folder)) is None:
        if SnapshotTag.is_valid(folder.name):
            return SnapshotTag(folder.name)
        raise InputError(
            f"{name} has no trainer_state.json that tells how long it was fine-tuned: say it "
            f"behind a colon, such as {name}:3e after three epochs, or name a checkpoint that was "
            f"not fine-tuned by a word, such as {name}:step1000"
        )
    return SnapshotTag.of(max(round(state.epoch, 3), 0.001))


def adopt(
    root: Path | None,
    sources: Mapping[SnapshotTag, str],
    options: DataOptions,
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Make snapshots of checkpoints of others, and score those that were fine-tuned on dev.

    A killed call is finished by the same one. More checkpoints of the same encoder can be added
    later. Those with words as tags need no task: without one, the workspace is for hidden states
    alone.

    Args:
        root: Workspace; None means the one the current folder stands in, or else makes the current
            folder one.
        sources: Checkpoints by tag (see `find_checkpoints`).
        options: Task and data of a new workspace; ``model`` is the encoder that fine-tuning began
            with.
        classes: Classes in the order of the checkpoints' outputs; empty takes those that their
            configuration names.

    Returns:
        As of `finetune`.

    Raises:
        InputError: a fine-tuned checkpoint has no output layer of the task, or one of other
            classes; another has one; a checkpoint has another encoder or tokenizer than the first;
            or the data are wrong.
        WorkspaceError: the workspace was made otherwise, or has another snapshot of a tag.
        LockedError: another process is adopting into this workspace.
    """
    workspace = _planned(root, sources, options, tuple(classes))
    _check_alike(workspace, sources)
    _warn(workspace.config)
    workspace.root.mkdir(parents=True, exist_ok=True)
    with exclusive(workspace.root / ".adopt.lock", f"adopting in {workspace.root}"):
        if (workspace.root / FILE).is_file():  # perhaps with others meanwhile, which stay
            workspace = _planned(workspace.root, sources, options, tuple(classes))
        workspace.ensure_written()
        workspace.config.write(workspace.root / FILE)
    if find_task(workspace.config.task.name).learns:
        return finetune(workspace.root, FinetuneOptions(), resume=True)
    for tag in sources:
        ensure_snapshot(workspace, tag)
    return {**status(workspace), "seconds": 0.0, "steps": 0}


def _planned(
    root: Path | None,
    sources: Mapping[SnapshotTag, str],
    options: DataOptions,
    classes: tuple[str, ...],
) -> Workspace:
    """The workspace as it is going to be; nothing is written."""
    asked = FinetuneOptions(**asdict(options))
    try:
        workspace = Workspace.find(root)
    except WorkspaceError:
        place = Path.cwd() if root is None else root.expanduser().resolve()
        if (place / FILE).exists():
            raise
        tags = tuple(sources)
        name, named = (options.model, None) if options.model else parted_revision(sources[tags[0]])
        revision = named or options.revision
        if without_task(sources, options):
            workspace = planned_workspace(root, name, revision)
        else:
            epochs = max(1.0, tags[-1].fraction)
            asked = replace(asked, model=name, revision=revision, save_at=tags, epochs=epochs)
            workspace = Workspace(place, new_config(asked, adopted=True))
        if named:  # instead of its commit, so that the checkpoint is found among the sources
            workspace = _with_model(workspace, name, named)
        return _with_sources(workspace, AdoptedConfig(sources=dict(sources), classes=classes))
    before = workspace.config.adopted
    learns = find_task(workspace.config.task.name).learns
    if before is None and not learns:
        before = AdoptedConfig(sources={})
    if before is None:
        raise WorkspaceError(
            f"{workspace.root} has snapshots that were fine-tuned there: adopt those of others "
            "into another --workspace"
        )
    workspace = agreed(workspace, asked)
    if not learns and (tuned := [tag for tag in sources if not tag.is_named]):
        raise InputError(
            f"{workspace.root} is for hidden states alone, without the task that {tuned[0]} was "
            "fine-tuned on: adopt it into another --workspace, with --task and --data"
        )
    if classes not in ((), before.classes):
        raise WorkspaceError(
            f"{workspace.root} was made with --classes {','.join(before.classes) or 'not given'}: "
            "adopt checkpoints of other classes into another --workspace"
        )
    for tag, source in sources.items():
        if before.sources.get(tag, source) != source and not _moved(workspace, tag, source):
            raise WorkspaceError(
                f"snapshot {tag} of {workspace.root} is {before.sources[tag]}, whose weights are "
                f"others: name another tag for {source}, such as {source}:"
                + (f"{tag}_other" if tag.is_named else SnapshotTag.of(tag.fraction + 1))
            )
    first = before.tag_of(workspace.config.model)
    if first and first in sources and sources[first] != before.sources[first]:  # it moved
        workspace = _with_model(workspace, *parted_revision(sources[first]))
    together = before.sources | {str(tag): source for tag, source in sources.items()}
    tags = tuple(sorted(map(SnapshotTag, together)))
    adopted = before.model_copy(update={"sources": {tag: together[tag] for tag in tags}})
    return _with_sources(workspace, adopted)


def _with_model(workspace: Workspace, name: str, revision: str | None) -> Workspace:
    """A workspace whose encoder, with the same weights, has another place."""
    model = workspace.config.model.model_copy(update={"name_or_path": name, "revision": revision})
    return replace(workspace, config=workspace.config.model_copy(update={"model": model}))


def without_task(sources: Mapping[SnapshotTag, str], options: DataOptions) -> bool:
    """Whether a new workspace is for hidden states alone: no fine-tuned checkpoint, no data.

    Args:
        sources: Checkpoints by tag.
        options: Task and data that were given.
    """
    plain = DataOptions(model=options.model, revision=options.revision)
    return all(tag.is_named for tag in sources) and options == plain


def _with_sources(workspace: Workspace, adopted: AdoptedConfig) -> Workspace:
    """A workspace with adopted checkpoints, and ``0e`` where it had that and it is none of them."""
    config = workspace.config
    first = [t for t in config.finetune.tags if t.is_pretrained]
    if adopted.tag_of(config.model):
        first = []
    tags = tuple(sorted([*first, *map(SnapshotTag, adopted.sources)]))
    finetuning = config.finetune.model_copy(
        update={"save_at": tags, "epochs": max(1.0, tags[-1].fraction)}
    )
    config = config.model_copy(update={"finetune": finetuning, "adopted": adopted})
    return replace(workspace, config=config)


def _moved(workspace: Workspace, tag: SnapshotTag, source: str) -> bool:
    """Whether a checkpoint is the one that a snapshot was made of, at another place."""
    place = workspace.snapshot_dir(tag)
    return is_snapshot(place) and read_snapshot_info(place).adopted_sha256 == weights_digest(
        find_adopted(source).folder
    )


def _check_alike(workspace: Workspace, sources: Mapping[SnapshotTag, str]) -> None:
    """Refuse checkpoints that cannot be snapshots of one encoder, or changed; warn of copies."""
    config = workspace.config
    expected = config.model.num_hidden_layers, config.model.hidden_size
    digest = tokenizer_digest(workspace_tokenizer(workspace))
    classes = config.adopted.classes if config.adopted else ()
    by_weights: dict[str, SnapshotTag] = {}
    for tag in map(SnapshotTag, config.adopted.sources if config.adopted else ()):
        place = workspace.snapshot_dir(tag)
        if is_snapshot(place) and (digest_of := read_snapshot_info(place).adopted_sha256):
            by_weights.setdefault(digest_of, tag)
    for tag, source in sources.items():
        checkpoint = find_adopted(source)
        size = dimensions(checkpoint.config)
        if (size.layers, size.hidden_size) != expected:
            raise InputError(
                f"{source} has {size.layers} layers of width {size.hidden_size}, and "
                f"{config.model.name_or_path} {expected[0]} of {expected[1]}: snapshots are of one "
                "encoder; adopt it into another --workspace"
            )
        if tokenizer_digest(load_tokenizer(checkpoint.folder)) != digest:
            raise InputError(
                f"the tokenizer of {source} is not that of {config.model.name_or_path}: snapshots "
                "read the same tokens; adopt it into another --workspace"
            )
        if tag.is_named:
            _check_not_tuned(checkpoint, config.task)
        else:
            adopted_output(checkpoint, config.task, classes)
        weights = weights_digest(checkpoint.folder)
        place = workspace.snapshot_dir(tag)
        if is_snapshot(place) and read_snapshot_info(place).adopted_sha256 != weights:
            raise WorkspaceError(
                f"the weights of {source} are not those that snapshot {tag} of {workspace.root} "
                "was made of: adopt it into another --workspace, or delete the folder "
                f"{place} and what was made of it"
            )
        if (other := by_weights.setdefault(weights, tag)) != tag:
            log.warning("snapshots %s and %s have the same weights: one is a copy", other, tag)


def _check_not_tuned(checkpoint: PretrainedEncoder, task: TaskConfig) -> None:
    """Refuse a checkpoint with an output layer of the task, which a word as its tag would drop."""
    kind, name = load_task(task.name), checkpoint.name_or_path
    if not find_task(task.name).learns:
        return
    if choose_output(checkpoint, kind.model_class, kind.model_options(task)).origin is not None:
        raise InputError(
            f"{name} was fine-tuned, as it has an output layer of the task {task.name}: say for "
            f"how long behind a colon, such as {name}:3e after three epochs"
        )


def _warn(config: WorkspaceConfig) -> None:
    """Say what is not known of data that may have been learned from."""
    if "tune" in config.data and load_task(config.task.name).tunes:
        log.warning(
            "thresholds are tuned on a part of --train, which these checkpoints may have learned "
            "from: name training data that they did not see, or leave tuning out with "
            "--tune-fraction 0"
        )
