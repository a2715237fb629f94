"""Trained heads, pushed and pulled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.pipelines.records import read_record
from bertvision.pipelines.sharing.cards.head import head_card
from bertvision.pipelines.sharing.folders import pull_folder, push_folder
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.manifest import Manifest
from bertvision.pipelines.sharing.upload import Content, Sent
from bertvision.pipelines.training.trained_head import changed_file
from bertvision.pipelines.workspace.records import (
    HeadScores,
    RunConfig,
    read_run_config,
    read_run_metrics,
    read_snapshot_info,
)
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FILES = ("config.json", "model.safetensors", "metrics.json")
"""A head's own files; its folder may hold logs and predictions too."""
SCORES = "scores.json"


def push_head(
    api: HfApi,
    repository: Repository,
    folder: Path,
    *,
    private: bool | None = None,
    licence: str | None = None,
    replace: bool = False,
) -> Sent:
    """Send a trained head: configuration, weights, what its training came to, its scores, a card.

    Args:
        api: of the hub.
        repository: to send to.
        folder: of the run.
        private: whether a new repository is.
        licence: of the weights, for the card.
        replace: take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the repository holds something else; nothing was sent.
        WorkspaceError: the head is damaged.
        HubError: the hub cannot be reached, or refuses.
    """
    config, metrics = read_run_config(folder), read_run_metrics(folder)
    if (changed := changed_file(folder)) is not None:
        raise WorkspaceError(
            f"the head {folder} is damaged: {changed} is not as it was written; nothing was sent"
        )
    scores = _scores(folder)
    told = [score.model_dump(mode="json", exclude={"sha256"}) for score in scores]
    made: dict[str, Content] = {name: folder / name for name in FILES}
    made[SCORES] = (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode()
    return push_folder(
        api,
        repository,
        "head",
        f"{config.run.text}:{config.trained_on}",
        made,
        head_card(repository.name, config, metrics, scores, licence),
        private=private,
        replace=replace,
    )


def pull_head(
    api: HfApi,
    repository: Repository,
    files: Mapping[str, int],
    manifest: Manifest,
    *,
    folder: Path | None,
    space: Workspace | None,
) -> Path:
    """Bring a head into a folder, or to where it belongs in a workspace, if every file is right.

    Args:
        api: of the hub.
        repository: at a commit.
        files: that it holds.
        manifest: of the repository.
        folder: to make; None is that of the head in ``space``.
        space: the workspace.

    Returns:
        The folder.

    Raises:
        HubError: a file is not as it was sent; or the hub cannot be reached.
        WorkspaceError: there is another head of that name, or a record is damaged.
        ProvenanceError: the workspace has another snapshot of that name than the head's.
        InputError: the repository holds files that no head has.
    """
    if lacking := sorted(set(FILES) - set(manifest.files)):
        raise InputError(
            f"{repository} has no {lacking[0]}, as heads have that were changed after their "
            "training: bertvision.Head.from_pretrained loads it; nothing was brought"
        )

    def place(stage: Path) -> Path:
        config = read_run_config(stage)
        if (changed := changed_file(stage)) is not None:
            raise WorkspaceError(f"{repository}: {changed} is not what its metrics.json tells of")
        return folder or _place(space, config)

    beside = folder.parent if folder else _root(space) / "heads"
    return pull_folder(api, repository, files, manifest, beside, place)


def _scores(folder: Path) -> list[HeadScores]:
    """What a head was scored, on the splits of any snapshots."""
    found = sorted((folder / "eval").glob("[!.]*/metrics.json"))
    return [read_record(path, HeadScores, "bertvision evaluate") for path in found]


def _root(space: Workspace | None) -> Path:
    if space is None:
        raise InputError("name a folder to put the head in, or a workspace")
    return space.root


def _place(space: Workspace | None, config: RunConfig) -> Path:
    """The folder of a head in a workspace, whose snapshot is the one that it was trained on."""
    root, tag = _root(space), config.trained_on
    assert space is not None
    told = config.activations.get("weights_sha256")
    if tag in space.snapshots():
        there = read_snapshot_info(space.snapshot_dir(tag)).weights_sha256
        if told is not None and told != there:
            raise ProvenanceError(
                f"{config.run.name} was trained on another {tag} than that of {root}: its weights "
                f"are {str(told)[:12]}…, here {there[:12]}…; name a FOLDER to have it beside"
            )
    return space.head_dir(tag, config.run.name)
