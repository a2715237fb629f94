"""RemoteStorage: a store behind any fsspec URL.

Every file system of fsspec can be read. S3, and the ``memory://`` of tests and notebooks, can be
written too: there an object appears whole and is durable when the request is answered, and a lock
can be had (see `lease`). Credentials come from the environment or fsspec's configuration and are
never looked at here, so that they get into no record, message or representation.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from bertvision.errors import CorruptStoreError, InputError, StoreError
from bertvision.featurestore.storage.blocks import PREFIX, cached_fetch
from bertvision.featurestore.storage.durable import Buffers
from bertvision.featurestore.storage.lease import Lease
from bertvision.featurestore.storage.objects import MemoryObjects, Objects, S3Objects
from bertvision.featurestore.storage.remote_errors import (
    CREDENTIALS,
    check_url,
    guarded,
    server_code,
)
from bertvision.featurestore.storage.remotefile import RemoteFile
from bertvision.featurestore.storage.storage import SMALL_BYTES, ChangedError, OpenFile, Storage

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

_WRITABLE: dict[str, type[Objects]] = {
    "memory": MemoryObjects,
    "s3": S3Objects,
    "s3a": S3Objects,
}


class RemoteStorage(Storage):
    """A folder at an fsspec URL.

    Args:
        url: such as ``s3://bucket/activations``, without credentials.
        cached: keep what is read of files on the local disk (see `blocks`).

    Raises:
        InputError: the URL's protocol is unknown, its file system is not installed, or the URL
            holds what may be a secret.
    """

    distant = True
    range_options: Mapping[str, Any] = {}
    """What the file system is told where a range of a file is read."""

    def __init__(self, url: str, *, cached: bool = False) -> None:
        self._url = check_url(url)
        self._cached = cached
        self._fs, self._root = _file_system(self._url)
        writable = _WRITABLE.get(self._url.partition("://")[0])
        self._objects = writable(self._fs) if writable else None
        self._leases: list[Lease] = []

    def __str__(self) -> str:
        return PREFIX + self._url if self._cached else self._url

    def __repr__(self) -> str:
        return f"<RemoteStorage {self}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # another process has connections of its own
        return partial(type(self), self._url, cached=self._cached), ()

    def read(self, key: str, most: int = SMALL_BYTES) -> bytes:  # noqa: D102
        data = self._do(key, self._read, most + 1)
        if len(data) > most:
            raise CorruptStoreError(f"{self._url}/{key} has more than {most} bytes")
        return data

    def write(self, key: str, content: Buffers, only_if: str | None = None) -> str:  # noqa: D102
        failed: list[Exception] = []

        def pieces() -> Iterator[bytes | memoryview]:
            try:
                yield from (content,) if isinstance(content, bytes) else content
            except Exception as error:
                failed.append(error)
                raise
            self._writable()  # what takes long may have cost the lock

        try:
            version = self._do(key, self._writable().upload, pieces(), only_if)
        except StoreError:
            if failed:  # not the file system did, but what makes the content
                raise failed[0] from None
            raise
        if version is None:
            raise ChangedError(f"{self._url}/{key}")
        return version

    def version(self, key: str) -> str:  # noqa: D102
        return self._do(key, self._writable().version)

    def size(self, key: str) -> int | None:  # noqa: D102
        found = self._info(key)
        return None if found is None else int(found["size"])

    def names(self, key: str) -> list[str]:  # noqa: D102
        try:
            found = self._do(key, self._fs.ls, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, key: str) -> None:  # noqa: D102
        self._writable()
        with suppress(FileNotFoundError):
            self._do(key, self._fs.rm, recursive=True)

    def sweep(self, key: str) -> None:  # noqa: D102
        self._writable()  # nothing is to be done: an upload that was not completed is no file

    def open(self, key: str) -> OpenFile:  # noqa: D102
        def fetch(begin: int, end: int) -> bytes:
            data: bytes = self._do(
                key, self._fs.cat_file, start=begin, end=end, **self.range_options
            )
            return data

        name, about = f"{self._url}/{key}", self._info(key)
        if about is None:
            raise FileNotFoundError(f"{name} is missing")
        size = int(about["size"])
        kept = cached_fetch(name, about, size, fetch) if self._cached else fetch
        return RemoteFile(name, size, kept)

    @contextmanager
    def lock(self, key: str, what: str, wait: bool = False) -> Iterator[None]:  # noqa: D102
        name = f"{self._url}/{key}"
        lease = Lease(self._writable(), self._path(key), name, what)
        guarded(name, lease.acquire, wait)
        self._leases.append(lease)
        try:
            yield
        finally:
            self._leases.remove(lease)
            with suppress(StoreError):  # all is written; and a lease that stays is over by itself
                guarded(name, lease.release)

    def free_bytes(self) -> int | None:  # noqa: D102
        return None

    def _info(self, key: str) -> Mapping[str, Any] | None:
        """What the file system says of a file; None where there is none."""
        try:
            found: Mapping[str, Any] = self._do(key, self._fs.info)
        except FileNotFoundError:
            return None
        return None if found["type"] == "directory" else found

    def _read(self, path: str, most: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(path, start=0, end=most, **self.range_options)
        except Exception as error:
            if server_code(error) not in ("InvalidRange", "416"):
                raise
            return b""  # an empty file has no first byte
        return data

    def _writable(self) -> Objects:
        """What can be written to, by the holder of every lock that this storage was asked for."""
        if self._objects is None:
            raise InputError(
                f"{self._url} can only be read: a store is written to a local folder or to S3 "
                "(s3://bucket/folder); copy it from there to where it shall be read"
            )
        for lease in self._leases:
            lease.check()
        return self._objects

    def _do(
        self, key: str, function: Callable[..., _Result], *args: object, **kwargs: object
    ) -> _Result:
        where = f"{self._url}/{key}" if key else self._url
        return guarded(where, function, self._path(key), *args, **kwargs)

    def _path(self, key: str) -> str:
        if ".." in key.split("/") or key.startswith("/") or "//" in key:
            raise CorruptStoreError(f"{key!r} leads out of {self._url}")
        return f"{self._root}/{key}" if key else self._root


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path of the URL in it."""
    import fsspec

    protocol = url.partition("://")[0]
    known = sorted(fsspec.available_protocols())
    if protocol not in known:
        close = difflib.get_close_matches(protocol, known, 1)
        hint = f" (did you mean {close[0]}://?)" if close else ""
        raise InputError(f"{protocol}:// is unknown{hint}: known are {', '.join(known)}")
    try:
        # a listing that was kept would hide what was written since
        fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError:
        extra = "'bertvision[s3]'" if protocol in ("s3", "s3a") else _package(protocol)
        message = f"{protocol}:// needs a package that is not installed: pip install {extra}"
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        message = (
            f"the file system of {protocol}:// cannot be made ({type(error).__name__}): look at "
            f"its configuration; {CREDENTIALS}"
        )
    else:
        return fs, str(root).rstrip("/")
    raise InputError(message)


def _package(protocol: str) -> str:
    from fsspec.registry import known_implementations

    described = known_implementations[protocol]
    package = described["class"].partition(".")[0]
    return f"the package named here: {described['err']}" if package == "fsspec" else package
