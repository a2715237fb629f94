"""Snapshots of an encoder, pushed and pulled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.sharing.cards.snapshot import snapshot_card
from bertvision.pipelines.sharing.folders import is_shared, push_folder
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.upload import Sent
from bertvision.pipelines.workspace.records import read_snapshot_info

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push_snapshot(
    api: HfApi,
    repository: Repository,
    folder: Path,
    *,
    private: bool | None = None,
    licence: str | None = None,
    replace: bool = False,
) -> Sent:
    """Send a snapshot: weights, configuration, tokenizer, what it was made from, a card.

    Args:
        api: of the hub.
        repository: to send to.
        folder: of the snapshot.
        private: whether a new repository is.
        licence: of the weights, for the card.
        replace: take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the repository holds something else; nothing was sent.
        StoreNotFoundError: it is no whole snapshot.
        WorkspaceError: its record is damaged.
        HubError: the hub cannot be reached, or refuses.
    """
    info = read_snapshot_info(folder)
    files = {path.name: path for path in sorted(folder.iterdir()) if is_shared(path.name)}
    card = snapshot_card(repository.name, info, licence)
    return push_folder(
        api, repository, "snapshot", info.tag, files, card, private=private, replace=replace
    )
