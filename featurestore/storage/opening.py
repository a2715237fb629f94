"""From a path or a URL to the storage behind it."""

from __future__ import annotations

from pathlib import Path

from bertvision.errors import InputError
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.remote import PREFIX as _CACHED
from bertvision.featurestore.storage.storage import Storage


def open_storage(where: str | Path | Storage) -> Storage:
    """The storage at a path or URL (``s3://bucket/store``, ``hf://datasets/owner/name``, a folder).

    With ``blockcache::`` before the URL, what is read is kept on the local disk (see `blocks`).

    Raises:
        InputError: the URL's file system is unknown or not installed.
    """
    if isinstance(where, Storage):
        return where
    if isinstance(where, Path) or "://" not in where:
        return LocalStorage(Path(where))
    cached = where.startswith(_CACHED)
    where = where.removeprefix(_CACHED)
    if "::" in where.partition("://")[0]:
        raise InputError(
            f"what stands before the URL of the store is unknown: of what fsspec chains, {_CACHED} "
            "is taken, which keeps on the local disk what is read"
        )
    protocol, _, rest = where.partition("://")
    if protocol in ("file", "local"):
        return LocalStorage(Path(rest))
    if protocol == "hf":
        from bertvision.featurestore.storage.hub import HubStorage

        return HubStorage(where, cached=cached)
    from bertvision.featurestore.storage.remote import RemoteStorage

    return RemoteStorage(where, cached=cached)
