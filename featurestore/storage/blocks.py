"""Blocks of remote files kept on the local disk: what was read once is not asked for again.

fsspec has such a cache too; it writes its files in place, so that two threads or processes that
read one file at once may find it half written. Here a block is a file of its own, which appears
whole.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertvision.featurestore.storage.remote import Fetch

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
        size: in bytes.
        fetch: gets a range from where the file is.
    """
    told = repr((name, sorted((key, repr(value)) for key, value in about.items())))
    digest = hashlib.sha256(told.encode()).hexdigest()
    folder = cache_folder() / digest[:2] / digest

    def cached(begin: int, end: int) -> bytes:
        first = begin // BLOCK_BYTES
        numbers = range(first, -(-end // BLOCK_BYTES))
        found = {n: _kept(folder, n, size) for n in numbers}
        for missing, run in groupby(numbers, lambda n: found[n] is None):
            if not missing:
                continue
            wanted = list(run)
            start, stop = _bounds(wanted[0], size)[0], _bounds(wanted[-1], size)[1]
            data = fetch(start, stop)
            if len(data) != stop - start:  # a wrong answer is not kept
                return fetch(begin, end)
            for n in wanted:
                at, to = _bounds(n, size)
                found[n] = data[at - start : to - start]
                _keep(folder, n, found[n] or b"")
        data = b"".join(block or b"" for block in found.values())
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
