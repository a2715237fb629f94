"""Write a file piece by piece, past the page cache where the system can.

The copy into the page cache takes a core nearly as long as the disk takes for the bytes, and a file
that does not stay in the cache still drives out what others read (`benchmarks/writing.py`). So
pieces are gathered in blocks of aligned memory, which the disk reads itself (O_DIRECT of open(2))
while the next ones are gathered. The blocks are of huge pages where the system has some: to name
a thousand small ones to the disk takes a sixth of the time of a write.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache

BLOCK_BYTES = 1 << 22
_BLOCKS = 3
_HUGE_PAGE = 1 << 21
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux alone has it
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of <linux/fs.h>: begin, and do not wait


def write_pieces(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces one after another; what is less than a block goes through the page cache.

    Args:
        descriptor: of an empty file, at its beginning; its flags are as they were when this
            returns. Nothing is flushed.
        pieces: of single bytes, in one dimension; each is used before the next is asked for.

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
        descriptor: of a file, where the piece is to stand.
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
