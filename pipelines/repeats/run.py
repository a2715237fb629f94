"""The same fine-tuning with several seeds, one after another."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bertvision.errors import InputError
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.kept_logits import check_teacher
from bertvision.pipelines.repeats.folder import find_seeds, seed_folder
from bertvision.pipelines.workspace.config import WorkspaceConfig
from bertvision.pipelines.workspace.creation import open_workspace, planned_run
from bertvision.pipelines.workspace.dataset import own_dataset
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.snapshots import library_versions
from bertvision.pipelines.workspace.workspace import FILE, Workspace

log = logging.getLogger(__name__)


def repeat(root: Path, options: FinetuneOptions, *, seeds: int) -> None:
    """Fine-tune with several seeds, each in a workspace of its own; continue what is there.

    All workspaces are made before the first is trained, so that mistakes are reported at once, and
    what is missing shows. One that is new has the settings of those that are there.

    Args:
        root: folder of the workspaces.
        options: Options of fine-tuning; ``seed`` (0 where it is None) is the first.
        seeds: Their number.

    Raises:
        WorkspaceError: ``root`` is a workspace itself, or one in it was made with other settings.
        InputError: an option, the model or the data is wrong.
        ProvenanceError: the teacher of ``distil`` learned from other items than a seed chooses.
        DiskSpaceError: the disk cannot hold the snapshots of a seed; it was not begun.
        LockedError: another process is fine-tuning in one of the workspaces.
        StoppedError: SIGINT or SIGTERM; all is saved, and the same call continues.
    """
    asked = range(options.seed or 0, (options.seed or 0) + seeds)
    there = find_seeds(root)
    for workspace in there:  # none is trained where one does not agree
        open_workspace(workspace.root, _of(options, workspace.config.finetune.seed), resume=True)
    for workspace in _planned(root, options, asked, there):
        Workspace.create(workspace.root, workspace.config)
    for seed in asked:
        log.info("seed %d of %d to %d: %s", seed, asked[0], asked[-1], seed_folder(root, seed))
        finetune(seed_folder(root, seed), _of(options, seed))


def _planned(
    root: Path, options: FinetuneOptions, asked: Sequence[int], there: Sequence[Workspace]
) -> list[Workspace]:
    """The workspaces that are to be made; each can learn from the teacher, where it has one."""
    new: list[Workspace] = []
    for seed in asked:
        place = seed_folder(root, seed)
        if (place / FILE).exists():
            continue
        if known := [*there, *new]:
            new.append(Workspace(place, reseeded(known[0], seed)))
        else:
            new.append(planned_run(place, _of(options, seed), resume=False))
        check_teacher(new[-1])
    return new


def _of(options: FinetuneOptions, seed: int) -> FinetuneOptions:
    return replace(options, seed=seed)


def reseeded(workspace: Workspace, seed: int) -> WorkspaceConfig:
    """The settings of a workspace with another seed, which chooses other parts of the same data.

    Args:
        workspace: Workspace whose settings they are.
        seed: the other one.

    Raises:
        WorkspaceError: the data changed since the workspace was made.
        InputError: with this seed no item is left to train on or to score.
    """
    finetune = workspace.config.finetune.model_copy(update={"seed": seed})
    new = {"finetune": finetune, "activations": None, "versions": library_versions()}
    config = workspace.config.model_copy(update=new)
    own = own_dataset(workspace.root, config)
    data = {}
    for split, source in config.data.items():
        count = len(own.items(split))
        if count:
            changed = {"source": own.source(split), "questions": count}
            data[split] = source.model_copy(update=changed)
        elif split != "tune":
            raise InputError(
                f"--seed {seed} leaves nothing of {source.source} for the split {split!r}: use "
                "more data, or a larger --train-questions"
            )
    return config.model_copy(update={"data": data})
