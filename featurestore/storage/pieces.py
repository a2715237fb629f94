"""Write a file piece by piece, past the page cache where the system can.

The copy into the page cache takes a core longer than the disk takes for the bytes, and what others
read is put out of it for a file that is read next when it no longer fits (`benchmarks/writing.py`).
So pieces are gathered in blocks of aligned memory, which the disk reads itself (O_DIRECT of
open(2)) while the next ones are gathered.
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
from functools import cache

BLOCK_BYTES = 1 << 21
_BLOCKS = 3
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux alone has it
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of <linux/fs.h>: begin, and do not wait


def write_pieces(descriptor: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces one after another; what is less than a block goes through the page cache.

    Args:
        descriptor: of an empty file, at its beginning; its flags are as they were when this
            returns. Nothing is flushed.
        pieces: each is used before the next is asked for.

    Raises:
        OSError: as of write(2).
    """
    rooms = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(_BLOCKS)]
    room, filled = rooms[0], 0
    waiting = deque[Future[None]]()
    with ThreadPoolExecutor(1, "bertvision-disk") as disk:
        for piece in pieces:
            data = memoryview(piece)
            while len(data):
                part = data[: BLOCK_BYTES - filled]
                room[filled : filled + len(part)] = part
                data, filled = data[len(part) :], filled + len(part)
                if filled == BLOCK_BYTES:
                    waiting.append(disk.submit(_write_block, descriptor, room))
                    rooms.append(rooms.pop(0))
                    room, filled = rooms[0], 0
                    if len(waiting) == _BLOCKS:
                        waiting.popleft().result()  # the room is free
        for block in waiting:
            block.result()
    _set_direct(descriptor, False)  # of the end the length is not what the disk wants
    write_all(descriptor, room[:filled])


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
