"""How fast the disk under a folder writes and reads, and what is free on it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bertvision.pipelines.machine.finding import Finding
from bertvision.pipelines.text import size

_PIECE, _PIECES = 1 << 20, 48
_SLOW = 100e6
"""Bytes a second below which heads wait for most of what they read (docs/performance.md)."""
_LITTLE = 5_000_000_000
"""Bytes that a few snapshots of a base encoder and a small store take."""


class DiskSpeed(NamedTuple):
    """Bytes a second."""

    write: float
    """To the disk: the file was flushed."""
    read: float
    """From the disk where the system lets its cache be left out, else from that."""


def existing(folder: Path) -> Path:
    """A folder, or the first of its parents that is there."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def disk_speed(folder: Path) -> DiskSpeed:
    """Write and read a file of 48 MiB, which is removed.

    Args:
        folder: where the file is made for the time.

    Raises:
        OSError: nothing can be written there.
    """
    piece = os.urandom(_PIECE)  # which no file system stores smaller
    # without a name where the system can: a doctor that is killed leaves nothing behind
    with tempfile.TemporaryFile(prefix=".bertvision-doctor-", dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        started = time.perf_counter()
        for _ in range(_PIECES):
            os.write(descriptor, piece)
        os.fsync(descriptor)
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        begun = time.perf_counter()
        while os.read(descriptor, _PIECE):
            pass
        total = _PIECE * _PIECES
        return DiskSpeed(total / (written - started), total / (time.perf_counter() - begun))


def examine_disk(folder: Path) -> list[Finding]:
    """Speed of the disk, and what is free.

    Args:
        folder: where activations are, or will be.
    """
    place = existing(folder)
    free = shutil.disk_usage(place).free
    space = f"{size(free)} in {place}"
    room = (
        Finding("free space", "ok", space)
        if free >= _LITTLE
        else Finding(
            *("free space", "warning", space),
            "Free some, or name another --store: --dry-run says what a job will write.",
        )
    )
    try:
        speed = disk_speed(place)
    except OSError as error:
        advice = "Use a --workspace in a folder that you may write to, on a disk that is not full."
        return [Finding("disk", "error", f"{place}: {error.strerror}", advice), room]
    found = f"{place}: writes {size(int(speed.write))}/s, reads {size(int(speed.read))}/s"
    if min(speed) >= _SLOW:
        return [Finding("disk", "ok", found), room]
    advice = (
        "Keep activations on a faster disk (--store), or make them smaller (--encoding int4, "
        "--compression zstd)."
    )
    return [Finding("disk", "warning", found, advice), room]
