"""Folders pushed and pulled whole, under the digests of a manifest: heads, snapshots, reports."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.files import new_folder, sha256_of_files
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing.download import fetch, staging
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.manifest import (
    CARD,
    Kind,
    Manifest,
    SharedFile,
    check_files,
    earlier_push,
)
from bertvision.pipelines.sharing.upload import Content, Sent, base_of, send

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# nothing that runs, and nothing that is unpickled
_PATH = re.compile(
    r"(?:\w[\w@.-]*/){0,3}\w[\w@.-]*\.(?:json|safetensors|txt|model|html|csv|svg)", re.ASCII
)


def is_shared(path: str) -> bool:
    """Whether a file of that path is pushed and pulled: records, weights, tables, pages."""
    return _PATH.fullmatch(path) is not None


def push_folder(
    api: HfApi,
    repository: Repository,
    kind: Kind,
    name: str,
    files: Mapping[str, Content],
    card: bytes,
    *,
    private: bool | None,
    replace: bool,
) -> Sent:
    """Send files with a manifest and a card, in one commit where they are few.

    Files of an earlier push that are not among them are removed.

    Args:
        api: of the hub.
        repository: to send to.
        kind: of what they are.
        name: of it, where it is.
        files: by path in the repository.
        card: the README.md.
        private: whether a new repository is.
        replace: take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the hub does not take so much, or the repository holds something else; nothing
            was sent.
        HubError: the hub cannot be reached, or refuses.
    """
    base, removed = base_of(api, repository), set[str]()
    files = {path: file for path, file in files.items() if path not in (manifests.FILE, CARD)}
    if base is not None:
        before = earlier_push(api, base.repository, base.files, kind, replace=replace)
        sent = before.files if before else {}
        others = set(files) & set(base.files) - set(sent)
        if others and not replace:
            raise InputError(
                f"{repository._replace(revision=None)} holds a file {min(others)} that `bertvision "
                "push` did not send: remove it there, push to another name, or replace it with "
                "--replace (in Python, replace=True); nothing was sent"
            )
        removed = {
            path
            for path, file in sent.items()  # not what somebody has replaced since
            if path not in files and is_shared(path) and base.files.get(path) == file.size
        }
    manifest = Manifest(
        kind=kind,
        name=name,
        bertvision=version("bertvision"),
        files={path: SharedFile.of(content) for path, content in files.items()},
    )
    return send(
        api,
        repository,
        [{manifests.FILE: manifest.content(), CARD: card, **files}],
        f"{name}, pushed by bertvision {manifest.bertvision}",
        private=private,
        remedy="push it to a repository of its own",
        base=base,
        removed=removed,
    )


def pull_folder(
    api: HfApi,
    repository: Repository,
    files: Mapping[str, int],
    manifest: Manifest,
    beside: Path,
    place: Callable[[Path], Path],
) -> Path:
    """Bring a folder, and put it in place whole once every file is as it was sent.

    Args:
        api: of the hub.
        repository: at a commit.
        files: that it holds.
        manifest: of the repository.
        beside: folder to bring it into first, on the disk of its place.
        place: tells where it goes, from the folder with its checked files, or refuses them.

    Returns:
        The folder.

    Raises:
        InputError: the manifest names a file that is none of ours, or none at all.
        HubError: a file is not as it was sent; or the hub cannot be reached, or refuses.
        WorkspaceError: something else is in its place.
    """
    if strange := sorted(path for path in manifest.files if not is_shared(path)):
        raise InputError(f"{repository}: {strange[0]!r} is no file that is pulled")
    if not manifest.files:  # with which any folder would agree
        raise InputError(f"{repository}: its {manifests.FILE} names no files; nothing was brought")
    wanted = sorted({*manifest.files, manifests.FILE, CARD} & set(files))
    with staging(beside, repository) as stage:
        fetch(api, repository, files, wanted, stage, wanted)
        check_files(stage, manifest)
        folder = place(stage)
        if _is_there(folder, stage, manifest):
            return folder  # with what was added to it since
        with new_folder(folder) as made:
            for path in wanted:
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(stage / path, made / path)
    return folder


def _is_there(folder: Path, stage: Path, manifest: Manifest) -> bool:
    """Whether a folder has every file of a manifest as it was brought, maybe beside others.

    Raises:
        WorkspaceError: something else is there.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    for path in manifest.files:
        here = folder / path
        if not here.is_file() or sha256_of_files([here]) != sha256_of_files([stage / path]):
            raise WorkspaceError(
                f"{folder} holds something else: name another FOLDER, or move it away"
            )
    return True
