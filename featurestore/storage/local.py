"""A store in a folder of a local disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import CorruptStoreError
from bertvision.featurestore.storage.durable import (
    Buffers,
    fsync,
    make_folder,
    remove_durably,
    write_durably,
)
from bertvision.featurestore.storage.lock import exclusive
from bertvision.featurestore.storage.storage import ABSENT, SMALL_BYTES, OpenFile, Storage

if TYPE_CHECKING:
    import numpy.typing as npt


class LocalStorage(Storage):
    """A folder on a local disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = Path(os.path.realpath(root))
        self._flushed: set[Path] = set()
        self._flushing = threading.RLock()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Path]]:
        return LocalStorage, (self.root,)

    def __str__(self) -> str:
        return str(self.root)

    def read(self, key: str, most: int = SMALL_BYTES) -> bytes:  # noqa: D102
        file = self._open(key)
        try:
            if file.size > most:
                raise CorruptStoreError(
                    f"{self}/{key} has {file.size} bytes, {most} at most are due"
                )
            return file.read()
        finally:
            file.close()

    def write(self, key: str, content: Buffers, only_if: str | None = None) -> str:  # noqa: D102
        path = self._inside(key)
        missing = self._make_folders(path.parent)
        write_durably(path, content)
        # behind the file, whose own flush has taken most of it to the disk by now
        self._flush_folders(missing)
        return self.version(key)

    def version(self, key: str) -> str:  # noqa: D102
        try:
            status = self._inside(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"

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
            with self._flushing:
                shutil.rmtree(path)
                self._flushed = {made for made in self._flushed if not made.is_relative_to(path)}
        else:
            remove_durably(path)

    def move(self, key: str, to: str) -> None:  # noqa: D102
        target = self._inside(to)
        os.replace(self._inside(key), target)
        fsync(target.parent)

    def sweep(self, key: str) -> None:  # noqa: D102
        folder = self._inside(key)
        if folder.is_dir():
            for path in folder.rglob(".*.tmp"):
                path.unlink(missing_ok=True)  # its writer may just have given it its name
            fsync(folder)

    def open(self, key: str) -> OpenFile:  # noqa: D102
        return self._open(key)

    def _open(self, key: str) -> LocalFile:
        try:
            file = LocalFile(self._path(key))
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from None
        except OSError as error:
            if error.errno != errno.ENXIO:  # of a socket
                raise
            raise CorruptStoreError(f"{self.root / key} is no file") from None
        if not file.is_regular:
            file.close()
            raise CorruptStoreError(f"{self.root / key} is no file")
        return file

    def lock(self, key: str, what: str, wait: bool = False) -> AbstractContextManager[None]:  # noqa: D102
        path = self._inside(key)
        self._flush_folders(self._make_folders(path.parent))
        return exclusive(path, what, wait=wait)

    def free_bytes(self) -> int | None:  # noqa: D102
        path = self.root
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def _make_folders(self, path: Path) -> list[Path]:
        """Make a folder of the storage and those above it.

        Returns:
            Those whose names may not be on the disk yet, from above. Some of them are there too:
            who made them may have died before it came to that, or be another thread that is about
            to.
        """
        missing = []
        while path != self._real.parent and path not in self._flushed:
            missing.append(path)
            path = path.parent
        make_folder(self._real.parent)
        with suppress(RuntimeError):  # an interrupt at the end of a block left it to this thread
            self._flushing.release()
        with self._flushing:  # or a thread that removes them would leave them as flushed
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
        return missing[::-1]

    def _flush_folders(self, folders: list[Path]) -> None:
        """Take the names of folders to the disk, but of those that were removed meanwhile."""
        for folder in folders:
            with self._flushing, suppress(FileNotFoundError):
                with suppress(PermissionError):  # the folder above may be another user's
                    fsync(folder.parent)
                if folder.is_dir():
                    self._flushed.add(folder)

    def _inside(self, key: str) -> Path:
        return Path(self._path(key))

    def _path(self, key: str) -> str:
        """The path of a key, which neither leads out of the storage nor is reached by a link."""
        # what is below the folder, part by part: to resolve the whole path takes twice as long, and
        # a shard has three files
        path, parts = str(self._real), [part for part in key.split("/") if part not in ("", ".")]
        refused, there = key.startswith("/") or ".." in parts, True
        for part in parts:
            path = f"{path}/{part}"
            try:
                refused = refused or (there and stat.S_ISLNK(os.lstat(path).st_mode))
            except OSError:
                there = False  # nor is what would be below it
        if refused:
            raise CorruptStoreError(
                f"{self.root / key} is or lies behind a link: a store is read and written only "
                "where its own folder lies; copy what the link points to into its place"
            )
        return path


class LocalFile:
    """A local file, read by ``preadv`` straight into the caller's memory.

    Not mapped: a file that shrinks under a mapping kills the process, a read of it raises.
    """

    _descriptor = -1

    def __init__(self, path: str) -> None:
        # not blocking, or whoever opened a pipe would wait for ever
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        self.size, self.is_regular = status.st_size, stat.S_ISREG(status.st_mode)

    def __reduce__(self) -> str:
        raise TypeError("an open file cannot be sent to another process: open it there")

    @property
    def descriptor(self) -> int:
        """Number that the system knows the open file by; −1 once it is closed."""
        return self._descriptor

    def prefetch(self, offset: int, length: int) -> None:  # noqa: D102
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: D102
        for offset, length in ranges:
            self.prefetch(offset, length)

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:  # noqa: D102
        self.fill(out.data, offset)

    def fill(self, view: memoryview, offset: int) -> None:
        """As `read_into`, of any contiguous memory."""
        read = os.preadv(self._descriptor, [view], offset)
        if read == view.nbytes:
            return
        view = view.cast("B")
        while read < len(view):
            more = os.preadv(self._descriptor, [view[read:]], offset + read)
            if not more:
                raise EOFError(f"the file ends at {offset + read}")
            read += more

    def read(self) -> bytes:
        """All of it."""
        data = os.pread(self._descriptor, self.size, 0)
        if len(data) == self.size:  # in one piece, as nearly always
            return data
        rest = bytearray(self.size - len(data))
        self.fill(memoryview(rest), len(data))
        return data + rest

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Let go of the file."""
        # forgotten first: closed again after an interrupt, the number might be another file's
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    __del__ = close  # whose default is there when the module's own names are gone
