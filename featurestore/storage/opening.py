"""Storages behind paths and URLs; a repository of the Hugging Face hub is read at one commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bertvision.errors import InputError, StoreNotFoundError
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.objects import check_url, guarded
from bertvision.featurestore.storage.remote import PREFIX as _CACHED
from bertvision.featurestore.storage.remote import RemoteStorage
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.storage.zipped import ZipStorage


def open_storage(where: str | Path | Storage) -> Storage:
    """The storage at a path or URL (``s3://bucket/store``, ``hf://datasets/owner/name``, a folder).

    A path that ends with ``.zip`` and is no folder is a zip, which is only read. With
    ``blockcache::`` before the URL, what is read is kept on the local disk (see `blocks`).

    Raises:
        InputError: the URL's file system is unknown or not installed.
    """
    if isinstance(where, Storage):
        return where
    if isinstance(where, Path) or "://" not in where:
        return _on_disk(Path(where))
    cached = where.startswith(_CACHED)
    where = where.removeprefix(_CACHED)
    if "::" in where.partition("://")[0]:
        raise InputError(
            f"what stands before the URL of the store is unknown: of what fsspec chains, {_CACHED} "
            "is taken, which keeps on the local disk what is read"
        )
    protocol, _, rest = where.partition("://")
    if protocol in ("file", "local"):
        return _on_disk(Path(rest))
    if protocol == "hf":
        return HubStorage(where, cached=cached)
    from bertvision.featurestore.storage.remote import RemoteStorage

    return RemoteStorage(where, cached=cached)


def _on_disk(path: Path) -> Storage:
    return (
        ZipStorage(path)
        if path.suffix.lower() == ".zip" and not path.is_dir()
        else LocalStorage(path)
    )


_COMMIT = re.compile("[0-9a-f]{40}")


class HubStorage(RemoteStorage):
    """A store in a repository of the hub, through fsspec's ``HfFileSystem``.

    A branch is looked up once: all that is read is of the commit that it stood for, which is
    part of the storage's own name.

    Args:
        url: such as ``hf://datasets/owner/name``, with ``@revision`` behind the name where it is
            not the main branch, and a folder behind that.
        cached: As in `RemoteStorage`.

    Raises:
        StoreNotFoundError: there is no such repository or revision, or the token may not read it.
        StoreError: the hub cannot be reached, or refuses.
    """

    # a buffered file would bring five megabytes more with each range
    range_options = {"cache_type": "none"}

    def __init__(self, url: str, *, cached: bool = False) -> None:
        super().__init__(_at_commit(check_url(url)), cached=cached)


def _at_commit(url: str) -> str:
    """The URL with the commit that its revision stands for."""
    if url.startswith("hf://buckets/"):
        return url  # these have no commits
    from huggingface_hub import HfApi, HfFileSystem

    # a repository that was missing may have been made since
    files = HfFileSystem(skip_instance_cache=True)

    def looked_up() -> Any:
        try:
            return files.resolve_path(url)
        except FileNotFoundError:  # which the hub answers with 401 too
            return None

    resolved = guarded(url, looked_up)
    if resolved is None:
        raise StoreNotFoundError(
            f"there is no {url} on the hub, or the token may not read it: correct the URL, or set "
            "HF_TOKEN or run `hf auth login`"
        )
    commit = resolved.revision
    if not _COMMIT.fullmatch(commit):
        info = guarded(
            url,
            HfApi().repo_info,
            resolved.repo_id,
            repo_type=resolved.repo_type,
            revision=commit,
        )
        commit = info.sha
    kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
    inside = f"/{resolved.path_in_repo}" if resolved.path_in_repo else ""
    return f"hf://{kind}{resolved.repo_id}@{commit}{inside}"
