"""From a path or a URL to the storage behind it."""

from __future__ import annotations

from pathlib import Path

from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.storage import Storage


def open_storage(where: str | Path | Storage) -> Storage:
    """The storage at a path or URL (``s3://bucket/store``, ``hf://datasets/owner/name``, a folder).

    Raises:
        InputError: the URL's file system is unknown or not installed.
    """
    if isinstance(where, Storage):
        return where
    if isinstance(where, Path) or "://" not in where:
        return LocalStorage(Path(where))
    protocol, _, rest = where.partition("://")
    if protocol in ("file", "local"):
        return LocalStorage(Path(rest))
    if protocol == "hf":
        from bertvision.featurestore.storage.hub import HubStorage

        return HubStorage(where)
    from bertvision.featurestore.storage.remote import RemoteStorage

    return RemoteStorage(where)
