"""Checkpoints that others fine-tuned, as the snapshots of a workspace."""

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
from bertvision.pipelines.encoders.checkpoint_path import check_path
from bertvision.pipelines.encoders.loading import dimensions, find_pretrained, load_tokenizer
from bertvision.pipelines.encoders.trainer_state import checkpoint_folders, trainer_state
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.config import AdoptedConfig, WorkspaceConfig
from bertvision.pipelines.workspace.creation import agreed, new_config
from bertvision.pipelines.workspace.job_options import DataOptions, FinetuneOptions
from bertvision.pipelines.workspace.pretrained import adopted_output
from bertvision.pipelines.workspace.records import is_snapshot, read_snapshot_info
from bertvision.pipelines.workspace.snapshots import workspace_tokenizer
from bertvision.pipelines.workspace.workspace import FILE, Workspace

log = logging.getLogger(__name__)


def find_checkpoints(names: Sequence[str]) -> dict[SnapshotTag, str]:
    """The checkpoints that are meant, by the tags that their snapshots get.

    Args:
        names: Folders of checkpoints, output folders of transformers' Trainer with its checkpoints,
            or names on the hub; with a tag behind a colon where none is to be read from
            ``trainer_state.json``.

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
                    "one of them, such as FOLDER:1.5e"
                )
            sources[tag] = place
    if not sources:
        raise InputError("name the folder of a checkpoint, such as output/checkpoint-500")
    return dict(sorted(sources.items()))


def _parted(name: str) -> list[tuple[SnapshotTag, str]]:
    """Checkpoints that a name means: one, or all in an output folder of Trainer."""
    place, colon, tail = name.rpartition(":")
    if colon and SnapshotTag.is_valid(tail):
        tag = SnapshotTag(tail)
        if tag.is_mean or tag.fraction <= 0:
            raise InputError(
                f"{name}: an adopted snapshot was fine-tuned, so its tag is the number of epochs, "
                "such as 0.5e or 3e; the encoder that it began with is named by --model"
            )
        check_path(place)
        folder = Path(place).expanduser()
        return [(tag, str(folder.resolve()) if folder.is_dir() else place)]
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if colon and Path(place).expanduser().is_dir():
            raise InputError(
                f"{name}: {tail!r} is no number of epochs: write it as in {place}:3e or "
                f"{place}:0.5e"
            )
        raise InputError(
            f"there is no folder {name}; a checkpoint on the hub is named with the epochs that it "
            "was fine-tuned for, as in owner/name:3e"
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
    """Tag of a checkpoint, by the epochs that Trainer counted, to a thousandth."""
    if (state := trainer_state(folder)) is None:
        raise InputError(
            f"{name} has no trainer_state.json that tells how long it was fine-tuned: say it "
            f"behind a colon, such as {name}:3e after three epochs"
        )
    return SnapshotTag.of(max(round(state.epoch, 3), 0.001))


def adopt(
    root: Path | None,
    sources: Mapping[SnapshotTag, str],
    options: DataOptions,
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Make snapshots of checkpoints that others fine-tuned, and score them on dev.

    A killed call is finished by the same one. More checkpoints of the same encoder can be added
    later.

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
        InputError: a checkpoint has no output layer of the task, one of other classes, or another
            encoder or tokenizer than the first; or the data are wrong.
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
    return finetune(workspace.root, FinetuneOptions(), resume=True)


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
        asked = replace(
            asked,
            model=options.model or sources[tags[0]],
            save_at=tags,
            epochs=max(1.0, tags[-1].fraction),
        )
        config = new_config(asked, adopted=True)
        adopted = AdoptedConfig(sources=dict(sources), classes=classes)
        return Workspace(place, config.model_copy(update={"adopted": adopted}))
    before = workspace.config.adopted
    if before is None:
        raise WorkspaceError(
            f"{workspace.root} has snapshots that were fine-tuned there: adopt those of others "
            "into another --workspace"
        )
    workspace = agreed(workspace, asked)
    if classes not in ((), before.classes):
        raise WorkspaceError(
            f"{workspace.root} was made with --classes {','.join(before.classes) or 'not given'}: "
            "adopt checkpoints of other classes into another --workspace"
        )
    for tag, source in sources.items():
        if before.sources.get(tag, source) != source and not _moved(workspace, tag, source):
            raise WorkspaceError(
                f"snapshot {tag} of {workspace.root} is {before.sources[tag]}, whose weights are "
                f"others: name another tag for {source}, such as "
                f"{source}:{SnapshotTag.of(tag.fraction + 1)}"
            )
    model = workspace.config.model
    for tag, source in sources.items():
        if before.sources.get(tag) == model.name_or_path:  # the first of them, perhaps moved
            model = model.model_copy(update={"name_or_path": source})
    together = before.sources | {str(tag): source for tag, source in sources.items()}
    tags = tuple(sorted(map(SnapshotTag, together)))
    finetuning = workspace.config.finetune.model_copy(
        update={"save_at": tags, "epochs": max(1.0, tags[-1].fraction)}
    )
    adopted = before.model_copy(update={"sources": {tag: together[tag] for tag in tags}})
    config = workspace.config.model_copy(
        update={"model": model, "finetune": finetuning, "adopted": adopted}
    )
    return Workspace(workspace.root, config)


def _moved(workspace: Workspace, tag: SnapshotTag, source: str) -> bool:
    """Whether a checkpoint is the one that a snapshot was made of, at another place."""
    place = workspace.snapshot_dir(tag)
    return is_snapshot(place) and read_snapshot_info(place).adopted_sha256 == weights_digest(
        find_pretrained(source).folder
    )


def _check_alike(workspace: Workspace, sources: Mapping[SnapshotTag, str]) -> None:
    """Refuse checkpoints that cannot be snapshots of one encoder, or changed; warn of copies."""
    config = workspace.config
    expected = config.model.num_hidden_layers, config.model.hidden_size
    digest = tokenizer_digest(workspace_tokenizer(workspace))
    classes = config.adopted.classes if config.adopted else ()
    by_weights: dict[str, str] = {}
    for tag, source in sources.items():
        checkpoint = find_pretrained(source)
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
        adopted_output(checkpoint, config.task, classes)
        weights = weights_digest(checkpoint.folder)
        place = workspace.snapshot_dir(tag)
        if is_snapshot(place) and read_snapshot_info(place).adopted_sha256 != weights:
            raise WorkspaceError(
                f"the weights of {source} are not those that snapshot {tag} of {workspace.root} "
                "was made of: adopt it into another --workspace, or delete the folder "
                f"{place} and what was made of it"
            )
        if (other := by_weights.setdefault(weights, source)) != source:
            log.warning("%s and %s have the same weights: one is a copy", other, source)


def _warn(config: WorkspaceConfig) -> None:
    """Say what is not known of data that may have been learned from."""
    if "tune" in config.data and load_task(config.task.name).tunes:
        log.warning(
            "thresholds are tuned on a part of --train, which these checkpoints may have learned "
            "from: name training data that they did not see, or leave tuning out with "
            "--tune-fraction 0"
        )
