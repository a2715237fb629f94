"""Files that are either whole or absent, whenever the process dies or the power goes.

Write a file piece by piece, past the page cache where the system can.

The copy into the page cache takes a core nearly as long as the disk takes for the bytes, and a file
that does not stay in the cache still drives out what others read (`benchmarks/writing.py`). So
pieces are gathered in blocks of aligned memory, which the disk reads itself (O_DIRECT of open(2))
while the next ones are gathered. The blocks are of huge pages where the system has some: to name
a thousand small ones to the disk takes a sixth of the time of a write.

Seals: a JSON record that carries its own checksum, so that each of its bytes is protected.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias

from bertvision.errors import DiskSpaceError

BLOCK_BYTES = 1 << 22
_BLOCKS = 3
_HUGE_PAGE = 1 << 21
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux alone has it
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of <linux/fs.h>: begin, and do not wait


def write_pieces(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces one after another; what is less than a block goes through the page cache.

    Args:
        descriptor: Descriptor of an empty file, at its beginning; its flags are as they were when
            this returns. Nothing is flushed.
        pieces: Pieces of single bytes, in one dimension; each is used before the next is asked for.

    Raises:
        OSError: as of write(2).
    """
    import numpy as np  # the storage is looked at without it

    rooms = [np.frombuffer(_aligned(BLOCK_BYTES), np.uint8) for _ in range(_BLOCKS)]
    filled = 0
    disk = _Disk(descriptor)
    try:
        for piece in pieces:
            data = np.frombuffer(piece, np.uint8)
            while len(data):
                part = data[: BLOCK_BYTES - filled]
                # by NumPy, which lets the other threads go on meanwhile
                rooms[0][filled : filled + len(part)] = part
                data, filled = data[len(part) :], filled + len(part)
                if filled == BLOCK_BYTES:
                    disk.write(rooms[0].data)
                    rooms.append(rooms.pop(0))
                    filled = 0
        disk.wait()
    finally:
        disk.close()
    _set_direct(descriptor, False)  # of the end the length is not what the disk wants
    write_all(descriptor, rooms[0][:filled].data)


def _aligned(size: int) -> memoryview:
    """Memory that a disk can read itself, of huge pages where there are some and it is that large.

    Private: the memory that processes share has huge pages on few systems.
    """
    room = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child would copy what is being written
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without huge pages
                room.madvise(getattr(mmap, advice))
    first = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % _HUGE_PAGE
    return memoryview(room)[first : first + size]


class _Disk:
    """Writes blocks in a thread, in their order.

    The thread has a descriptor of its own and closes it behind the last block: where the caller is
    interrupted, and closes his, nothing is written into a file that gets the same number.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._thread = ThreadPoolExecutor(1, "bertvision-disk")
        self._waiting = deque[Future[None]]()

    def write(self, block: memoryview) -> None:
        """Begin to write a block; when this returns, that of `_BLOCKS` calls before is written."""
        try:
            self._waiting.append(self._thread.submit(_write_block, self._descriptor, block))
        except RuntimeError:  # the interpreter ends, and takes no new work
            self.wait()
            _write_block(self._descriptor, block)
        if len(self._waiting) == _BLOCKS:
            self._waiting.popleft().result()

    def wait(self) -> None:
        """Wait until all is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """End the thread behind what it writes."""
        try:
            self._thread.submit(os.close, self._descriptor)
        except RuntimeError:
            for block in self._waiting:
                block.exception()
            os.close(self._descriptor)
        self._thread.shutdown()


def write_all(descriptor: int, piece: bytes | memoryview) -> None:
    """Write a piece whole.

    Args:
        descriptor: Descriptor of a file, where the piece is to stand.
        piece: bytes.

    Raises:
        OSError: as of write(2).
    """
    view = memoryview(piece)
    while len(view):
        try:
            # a write may be short: on a signal, on a disk that is nearly full, or above 2 GiB
            view = view[os.write(descriptor, view) :]
        except OSError as error:
            # a file system that cannot, or a place that a short write left
            if error.errno != errno.EINVAL or not _set_direct(descriptor, False):
                raise


def _write_block(descriptor: int, block: memoryview) -> None:
    """Write a whole block; where it goes through the page cache, let the disk begin with it."""
    place = os.lseek(descriptor, 0, os.SEEK_CUR)
    if not place:
        _set_direct(descriptor, True)
    write_all(descriptor, block)
    if not _is_direct(descriptor) and (begin := _sync_file_range()) is not None:
        begin(descriptor, place, len(block), _WRITE)  # a hint: the flush does the rest


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Whether it was the other way before, and could be changed."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | _DIRECT if direct else flags & ~_DIRECT
    if wanted == flags:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError:  # of a file system that does not know it
        return False
    return True


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux' call of that name."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_TRIES = 1000
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of <linux/fs.h>

Buffers: TypeAlias = "bytes | Iterable[bytes | memoryview]"


def write_durably(path: Path, content: Buffers | Callable[[Path], object]) -> None:
    """Make a temporary sibling, flush it to the disk, rename it to ``path``, flush the folder.

    Missing folders are made, and flushed too. What stands under the temporary name, left by an
    interrupted process or a link planted by somebody, is removed and never written through. Who
    writes the same path at the same time waits, and the last one's content stays.

    Args:
        path: the file.
        content: its bytes, in one piece or several, or a function that writes them to the path it
            is given.

    Raises:
        DiskSpaceError: the disk is full.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with full_disk_named(path.parent):
        make_folder(path.parent)
        descriptor = None
        try:  # from the first moment: an open descriptor that nobody knows would lock the file
            descriptor = _new_file(temporary)
            if callable(content):
                _write_by(content, temporary, path, descriptor)
            else:
                if isinstance(content, bytes):
                    write_all(descriptor, content)
                else:
                    write_pieces(descriptor, content)
                os.fsync(descriptor)
                os.replace(temporary, path)
        except Exception:
            with suppress(OSError):  # or a full disk would stay full; locked, it is nobody else's
                os.unlink(temporary)
            raise
        finally:
            if descriptor is not None:
                # an interrupt may have left a duplicate open, which would keep the lock
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)
        fsync(path.parent)


def _write_by(
    content: Callable[[Path], object], temporary: Path, path: Path, descriptor: int
) -> None:
    """Let a function write a file beside the temporary one, which stays locked meanwhile.

    A library may put a file of its own in the place that it is given, which would carry no lock.
    """
    beside = temporary.with_name(f"{temporary.name}.tmp")
    _unlink(beside)
    try:
        content(beside)
        # what a library made may be readable for its owner alone
        os.chmod(beside, stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(beside)
        os.replace(beside, path)
    except Exception:
        with suppress(OSError):
            os.unlink(beside)
        raise
    os.unlink(temporary)


@contextmanager
def full_disk_named(where: object) -> Iterator[None]:
    """Say what a full disk or quota should say; any other error stays as it is.

    Args:
        where: Subject on the disk, for the message.

    Raises:
        DiskSpaceError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        else:
            # libraries that write files themselves pass the system's words on
            full = f"os error {errno.ENOSPC}" in str(error)
        if not full:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(where)  # a descriptor's name is not in the system's own words
            raise
        raise DiskSpaceError(
            f"No space left on the disk of {where}: what was finished is whole; free some "
            "space and run the same command again, it goes on from there"
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents; their names are on the disk when this returns."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)


def swap(one: Path, other: Path) -> bool:
    """Let two files or folders take each other's place in one step.

    Returns:
        Whether that was done: Linux can, on most file systems; else nothing was changed.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def remove_durably(path: Path) -> None:
    """Remove a file, if it is there; it does not come back after a power loss."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk.

    Some network and FUSE mounts flush names with the files and know no flush of a folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        unknown = error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
        if not (unknown and stat.S_ISDIR(os.fstat(descriptor).st_mode)):
            raise
    finally:
        os.close(descriptor)


def _new_file(path: Path) -> int:
    """Open a file that was not there before, for writing, and lock it until it is closed.

    With O_EXCL a link is no file to open, wherever it leads. Who is writing the same file at this
    moment is waited for; what somebody left who died is removed.

    Raises:
        OSError: others are quicker again and again, or the file system tells of another file than
            the one it opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(_TRIES):
        descriptor = None
        try:
            descriptor = os.open(path, flags, 0o666)
            if _is_locked_there(descriptor, path):
                return descriptor
            os.close(descriptor)
        except FileExistsError:
            _remove_left(path)
        except BaseException:
            if descriptor is not None:
                with suppress(OSError):
                    os.close(descriptor)
            raise
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))


def _remove_left(path: Path) -> None:
    """Remove what stands under a temporary name, as soon as nobody is writing it."""
    try:  # writable, or some network file systems lock nothing
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # and what stands there by now may be another's
    except OSError:  # a link, or a file of somebody else
        _unlink(path)
        return
    try:
        if _is_locked_there(descriptor, path):
            os.unlink(path)
    finally:
        os.close(descriptor)


def _is_locked_there(descriptor: int, path: Path) -> bool:
    """Wait for the lock of a file; whether it still stands at its path then."""
    with suppress(OSError):  # a file system without locks: then nobody is waited for
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


SEAL = b"record_sha256"
_NO_DIGITS = b"0" * 64
_INDENT = re.compile(rb"\{\n( *)")


def sealed(record: bytes) -> bytes:
    """A JSON object with its own checksum as the last field.

    The checksum is the sha256 of the text as it is with 64 zeros in place of the digits.

    Args:
        record: an object with a field at least, on lines of their own; ends with a line feed and a
            brace.

    Raises:
        ValueError: it is no such text.
    """
    begin = _INDENT.match(record)
    if begin is None or not record.endswith(b"\n}"):
        raise ValueError("only an object whose fields are on lines of their own can be sealed")
    seal = b",\n" + begin[1] + b'"' + SEAL + b'": "' + _NO_DIGITS + b'"\n}'
    text = record.removesuffix(b"\n}") + seal
    return _with_digits(text, hashlib.sha256(text).hexdigest().encode())


def is_sealed(text: bytes) -> bool:
    """Whether a text passes the checksum at its end."""
    blank = _with_digits(text, _NO_DIGITS)
    return _with_digits(text, hashlib.sha256(blank).hexdigest().encode()) == text


def unsealed(text: bytes) -> bytes:
    """A text without the seal at its end; as it is where it has none.

    Raises:
        ValueError: it does not pass its own checksum.
    """
    place = text.rfind(b'"' + SEAL + b'"')
    if place < 0:
        return text
    if not is_sealed(text):
        raise ValueError("it does not pass its own checksum")
    return text[:place].rstrip().removesuffix(b",") + b"\n}"


def _with_digits(text: bytes, digits: bytes) -> bytes:
    return text[:-67] + digits + text[-3:]
