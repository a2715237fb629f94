"""RemoteStorage: a store behind any fsspec URL.

Every file system of fsspec can be read. S3, and the ``memory://`` of tests and notebooks, can be
written too: there an object appears whole and is durable when the request is answered, and a lock
can be had (see `lease`). Credentials come from the environment or fsspec's configuration and are
never looked at here, so that they get into no record, message or representation.

RemoteFile: a file behind a network, read in few large requests.

Each request costs a round trip, however small it is. So what will be read is announced: ranges
that lie close together are joined, long ones are cut, and all are fetched at once by a few
threads. A read takes what was fetched, or waits for it; only what nobody announced is asked for
alone.

Blocks of remote files kept on the local disk: what was read once is not asked for again.

fsspec has such a cache too; it writes its files in place, so that two threads or processes that
read one file at once may find it half written. Here a block is a file of its own, which appears
whole.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from bertvision.errors import CorruptStoreError, InputError, StoreError
from bertvision.featurestore.storage.durable import Buffers
from bertvision.featurestore.storage.lease import Lease
from bertvision.featurestore.storage.objects import (
    CREDENTIALS,
    MemoryObjects,
    Objects,
    S3Objects,
    check_url,
    guarded,
    server_code,
)
from bertvision.featurestore.storage.storage import SMALL_BYTES, ChangedError, OpenFile, Storage

if TYPE_CHECKING:
    import numpy.typing as npt

PART_BYTES = 8 << 20
"""Longest range that is asked for at once."""
REQUESTS = 8
"""Requests at a time, of all files together; each holds at most `PART_BYTES` beside the file."""
_GAP_BYTES = 1 << 18  # fetched and thrown away rather than asked for apart: about a round trip

Fetch = Callable[[int, int], bytes]
"""The bytes of a file from one offset to another."""


class _Part(NamedTuple):
    begin: int
    end: int
    data: Future[bytes]


class RemoteFile:
    """A file that is open for reads at any offset (see `storage.OpenFile`).

    Args:
        name: Name of the file, for messages.
        size: Size in bytes.
        fetch: gets a range of it; called in threads.
    """

    def __init__(self, name: str, size: int, fetch: Fetch) -> None:
        self.size = size
        self._name = name
        self._fetch = fetch
        self._kept: list[_Part] = []
        self._passing: list[_Part] = []

    def prefetch(self, offset: int, length: int) -> None:
        """Begin to fetch a stretch; it is kept until the file is closed."""
        self._kept += self._begin([(offset, length)])

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to fetch what is read next, as (offset, length); it is kept until the next call."""
        needed = [
            part
            for part in self._passing
            if any(part.begin < offset + length and offset < part.end for offset, length in ranges)
        ]
        self._passing = needed + self._begin(ranges)

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:
        """Fill a C-contiguous array with the bytes from ``offset`` on.

        Raises:
            EOFError: the file ends before the array is full.
            StoreError: it could not be read.
        """
        import numpy as np  # late: what only looks at a store needs no numpy

        flat = out.reshape(-1).view(np.uint8)
        end = offset + flat.size
        if end > self.size:
            raise EOFError(f"the file ends at {self.size}")
        at = offset
        while at < end:
            part = self._holding(at)
            data = self._get(at, end) if part is None else part.data.result()
            begin = at if part is None else part.begin
            stop = min(end, begin + len(data))
            flat[at - offset : stop - offset] = np.frombuffer(data, np.uint8)[
                at - begin : stop - begin
            ]
            at = stop

    def close(self) -> None:
        """Let go of what was fetched, and of what was not fetched yet."""
        for part in (*self._kept, *self._passing):
            part.data.cancel()
        self._kept, self._passing = [], []

    def _begin(self, ranges: Sequence[tuple[int, int]]) -> list[_Part]:
        """Ask for the parts of ranges that nobody asked for yet."""
        missing = [part for part in _parts(ranges) if not self._has(*part)]
        threads = _threads()
        return [_Part(*part, threads.submit(self._get, *part)) for part in missing]

    def _has(self, begin: int, end: int) -> bool:
        while begin < end:
            if (part := self._holding(begin)) is None:
                return False
            begin = part.end
        return True

    def _holding(self, offset: int) -> _Part | None:
        for part in (*self._passing, *self._kept):
            if part.begin <= offset < part.end:
                return part
        return None

    def _get(self, begin: int, end: int) -> bytes:
        data = self._fetch(begin, end)
        if len(data) != end - begin:
            raise StoreError(
                f"{self._name}: the server gave {len(data)} bytes where {end - begin} were asked "
                "for: it does not serve ranges, or the file was replaced; a store needs a server "
                "that answers range requests"
            )
        return data


def _parts(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(begin, end) of parts: ranges close together are joined, long ones cut into equal parts."""
    joined: list[list[int]] = []
    for offset, length in sorted(ranges):
        if joined and offset - joined[-1][1] <= _GAP_BYTES:
            joined[-1][1] = max(offset + length, joined[-1][1])
        elif length:
            joined.append([offset, offset + length])
    for begin, end in joined:
        count = -(-(end - begin) // PART_BYTES)
        cuts = [begin + (end - begin) * i // count for i in range(count + 1)]
        yield from zip(cuts[:-1], cuts[1:], strict=True)


_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _threads() -> ThreadPoolExecutor:
    """The threads of this process; a forked one does not inherit any."""
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = ThreadPoolExecutor(REQUESTS, "bertvision-fetch")
        return _pools[os.getpid()]


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
    """Options of the file system for reading a range of a file."""

    def __init__(self, url: str, *, cached: bool = False) -> None:
        self._url = check_url(url)
        self._cached = cached
        self._fs, self._root = _file_system(self._url)
        writable = _WRITABLE.get(self._url.partition("://")[0])
        self._objects = writable(self._fs) if writable else None
        if self._objects is None:
            self.read_only = (
                "can only be read: a store is written to a local folder or to S3 "
                "(s3://bucket/folder); copy it from there to where it shall be read"
            )
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
        info = self._info(key)
        return None if info is None else int(info["size"])

    def names(self, key: str) -> list[str]:  # noqa: D102
        try:
            entries = self._do(key, self._fs.ls, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in entries]

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
        fetched = cached_fetch(name, about, size, fetch) if self._cached else fetch
        return RemoteFile(name, size, fetched)

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
        """Facts about a file; None where there is none."""
        try:
            info: Mapping[str, Any] = self._do(key, self._fs.info)
        except FileNotFoundError:
            return None
        return None if info["type"] == "directory" else info

    def _read(self, path: str, most: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(path, start=0, end=most, **self.range_options)
        except Exception as error:
            if server_code(error) not in ("InvalidRange", "416"):
                raise
            return b""  # an empty file has no first byte
        return data

    def _writable(self) -> Objects:
        """Writable file system, for the holder of every lock that this storage was asked for."""
        self.require_writable()
        assert self._objects is not None
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


log = logging.getLogger(__name__)
PREFIX = "blockcache::"
"""Before the URL of a store that is read through a cache, as fsspec writes it."""
BLOCK_BYTES = 1 << 18
"""About as much as is transferred in the time of a round trip."""


def cached_fetch(name: str, about: Mapping[str, Any], size: int, fetch: Fetch) -> Fetch:
    """A function that gets ranges of a file from the disk, and what is not there from elsewhere.

    Args:
        name: URL of the file.
        about: what its file system says of it, such as its time or digest: where that changes, it
            is another file.
        size: Size in bytes.
        fetch: gets a range from where the file is.
    """
    told = repr((name, sorted((key, repr(value)) for key, value in about.items())))
    digest = hashlib.sha256(told.encode()).hexdigest()
    folder = cache_folder() / digest[:2] / digest

    def cached(begin: int, end: int) -> bytes:
        first = begin // BLOCK_BYTES
        numbers = range(first, -(-end // BLOCK_BYTES))
        blocks = {n: _kept(folder, n, size) for n in numbers}
        for missing, run in groupby(numbers, lambda n: blocks[n] is None):
            if not missing:
                continue
            wanted = list(run)
            start, stop = _bounds(wanted[0], size)[0], _bounds(wanted[-1], size)[1]
            data = fetch(start, stop)
            if len(data) != stop - start:  # a wrong answer is not kept
                return fetch(begin, end)
            for n in wanted:
                at, to = _bounds(n, size)
                blocks[n] = data[at - start : to - start]
                _keep(folder, n, blocks[n] or b"")
        data = b"".join(block or b"" for block in blocks.values())
        return data[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    return cached


def cache_folder() -> Path:
    """The folder of the cache: that of fsspec's configuration, or among the user's caches.

    ``FSSPEC_BLOCKCACHE_CACHE_STORAGE`` in the environment, or ``cache_storage`` under
    ``blockcache`` in a file of ``~/.config/fsspec``.
    """
    from fsspec.config import conf

    named = conf.get("blockcache", {}).get("cache_storage")
    if named:
        return Path(named).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "bertvision" / "blocks"


def _bounds(number: int, size: int) -> tuple[int, int]:
    """Where a block begins and ends in its file."""
    return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size)


def _kept(folder: Path, number: int, size: int) -> bytes | None:
    """A block from the disk; None where it is not there, or not whole."""
    begin, end = _bounds(number, size)
    try:
        data = (folder / str(number)).read_bytes()
    except OSError:
        return None
    return data if len(data) == end - begin else None


def _keep(folder: Path, number: int, data: bytes) -> None:
    """Put a block on the disk; where that cannot be done it is only not kept."""
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            temporary = file.name
            file.write(data)
        os.replace(temporary, folder / str(number))
    except OSError as error:
        log.info("%s: a block is not kept (%s)", folder, error.strerror)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
