"""Locks that the operating system releases when their holder dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bertvision.errors import LockedError


@contextmanager
def exclusive(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; the operating system releases it when the process dies.

    Args:
        path: of the file, in a folder that exists; it is left there.
        what: what the holder is doing, for the message.
        wait: until it is free, instead of raising.

    Raises:
        LockedError: another process holds it.
    """
    import filelock  # here, because whoever only reads needs none

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        raise LockedError(
            f"another process is {what}: wait for it to end, or stop it; nothing was changed "
            f"(lock: {path})"
        ) from None
    try:
        yield
    finally:
        lock.release()
