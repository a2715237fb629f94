"""Where a store lies: a local folder, or any fsspec URL (see `remote`).

A store is files under keys such as ``ledger/0.3e/train/00042.json``. Everything it does to them
goes through a `Place`: files appear whole or not at all, and are on the disk when a write returns.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bertvision.errors import CorruptStoreError
from bertvision.featurestore.durable import (
    Buffers,
    fsync,
    make_folder,
    remove_durably,
    write_durably,
)
from bertvision.featurestore.lock import exclusive

SMALL_BYTES = 1 << 26
"""Records and metadata are smaller."""


class OpenFile(Protocol):
    """A file that is open for reads at any offset, by several threads.

    Attributes:
        size: its length in bytes when it was opened.
        distant: whether each read costs a round trip, so that it pays to say what comes.
    """

    size: int
    distant: bool

    def prefetch(self, offset: int, length: int) -> None:
        """Begin to bring a stretch near, where it stays until the file is closed."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to bring near what is read next, as (offset, length); until the next call."""

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:
        """Fill a C-contiguous array with the bytes from ``offset`` on.

        Raises:
            EOFError: the file ends before the array is full.
        """

    def close(self) -> None:
        """Let go of the file."""


class Place(ABC):
    """A folder of files; ``str(place)`` finds it again and holds no credentials."""

    def read(self, key: str, most: int = SMALL_BYTES) -> bytes:
        """The bytes of a file.

        Args:
            key: of the file.
            most: how many there may be; a store that somebody made to hurt has larger ones.

        Raises:
            FileNotFoundError: there is none.
            CorruptStoreError: it is larger, or the key leads out of the place.
        """
        file = self.open(key)
        try:
            if file.size > most:
                raise CorruptStoreError(
                    f"{self}/{key} has {file.size} bytes, {most} at most are due"
                )
            data = np.empty(file.size, np.uint8)
            if file.size:
                file.read_into(data, 0)
            return data.tobytes()
        finally:
            file.close()

    @abstractmethod
    def write(self, key: str, content: Buffers) -> None:
        """Write a file durably: it is there whole, or as it was before.

        Args:
            key: of the file.
            content: its bytes, or pieces of them, each valid until the next is asked for.
        """

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Length of a file in bytes; None where there is none."""

    @abstractmethod
    def names(self, key: str) -> list[str]:
        """Names of the files and folders in a folder; none where it does not exist."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a file, or a folder with all it holds, if it is there."""

    @abstractmethod
    def sweep(self, key: str) -> None:
        """Settle what killed writers left in a folder.

        Files that were never made whole are removed; the others will survive a power loss.
        """

    @abstractmethod
    def open(self, key: str) -> OpenFile:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
            CorruptStoreError: the key leads out of the place.
        """

    @abstractmethod
    def lock(self, key: str, what: str, wait: bool = False) -> AbstractContextManager[None]:
        """Hold a lock that ends with its holder.

        Args:
            key: of the lock's file.
            what: what the holder is doing, for the message.
            wait: until it is free, instead of raising.

        Raises:
            LockedError: another process holds it.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes that can still be written, where that is known."""


class LocalPlace(Place):
    """A folder on a local disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = Path(os.path.realpath(root))
        self._flushed: set[Path] = set()

    def __str__(self) -> str:
        return str(self.root)

    def write(self, key: str, content: Buffers) -> None:  # noqa: D102
        path = self._inside(key)
        self._make_folder(path.parent)
        write_durably(path, content)

    def size(self, key: str) -> int | None:  # noqa: D102
        path = self._inside(key)
        return path.stat().st_size if path.is_file() else None

    def names(self, key: str) -> list[str]:  # noqa: D102
        try:
            return os.listdir(self._inside(key))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, key: str) -> None:  # noqa: D102
        path = self._inside(key)
        if path.is_dir():
            shutil.rmtree(path)
            self._flushed = {made for made in self._flushed if not made.is_relative_to(path)}
        else:
            remove_durably(path)

    def sweep(self, key: str) -> None:  # noqa: D102
        folder = self._inside(key)
        if folder.is_dir():
            for path in folder.rglob(".*.tmp"):
                path.unlink(missing_ok=True)  # its writer may just have given it its name
            fsync(folder)

    def open(self, key: str) -> OpenFile:  # noqa: D102
        path = self._inside(key)
        if path.exists() and not path.is_file():
            # a folder, or a pipe on which a reader would wait for ever
            raise CorruptStoreError(f"{self.root / key} is no file")
        try:
            return _LocalFile(path)
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from None

    def lock(self, key: str, what: str, wait: bool = False) -> AbstractContextManager[None]:  # noqa: D102
        path = self._inside(key)
        self._make_folder(path.parent)
        return exclusive(path, what, wait=wait)

    def free_bytes(self) -> int | None:  # noqa: D102
        path = self.root
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def _make_folder(self, path: Path) -> None:
        """Make a folder of the place; its name, and those above it, are on the disk then.

        Those of folders that are there too: who made them may have died before it came to that, or
        be another thread that is about to.
        """
        missing = []
        while path != self._real.parent and path not in self._flushed:
            missing.append(path)
            path = path.parent
        make_folder(self._real.parent)
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            with suppress(PermissionError):  # the folder above the place may be another user's
                fsync(folder.parent)
            self._flushed.add(folder)

    def _inside(self, key: str) -> Path:
        """The path of a key, which neither leads out of the place nor is reached by a link."""
        path = self._real / key
        inside = path == self._real or self._real in path.parents
        if not inside or os.path.realpath(path) != str(path):
            raise CorruptStoreError(
                f"{self.root / key} is or lies behind a link: a store is read and written only "
                "where its own folder lies; copy what the link points to into its place"
            )
        return path


class _LocalFile:
    """A local file, read by ``preadv`` straight into the caller's memory.

    Not mapped: a file that shrinks under a mapping kills the process, a read of it raises.
    """

    distant = False

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def prefetch(self, offset: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        for offset, length in ranges:
            self.prefetch(offset, length)

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:
        read = os.preadv(self._descriptor, [out.data], offset)
        if read == out.nbytes:
            return
        view = out.data.cast("B")
        while read < len(view):
            more = os.preadv(self._descriptor, [view[read:]], offset + read)
            if not more:
                raise EOFError(f"the file ends at {offset + read}")
            read += more

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def place_of(where: str | Path | Place) -> Place:
    """The place at a path or URL (``s3://bucket/store``, ``memory://store``, a folder).

    Raises:
        InputError: the URL's file system is unknown or not installed.
    """
    if isinstance(where, Place):
        return where
    if isinstance(where, Path) or "://" not in where:
        return LocalPlace(Path(where))
    if where.startswith("file://"):
        return LocalPlace(Path(where.removeprefix("file://")))
    from bertvision.featurestore.remote import RemotePlace

    return RemotePlace(where)
