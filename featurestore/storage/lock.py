"""Locks that the operating system releases when their holder dies."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import LockedError, StoreError

if TYPE_CHECKING:
    import filelock

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def exclusive(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; the operating system releases it when the process dies.

    Args:
        path: Path of the file, in a folder that exists; it is left there.
        what: Action of the holder, for the message.
        wait: until it is free, instead of raising.

    Raises:
        LockedError: another process holds it.
        StoreError: the file system has no locks; one that only a file stands for would outlive its
            holder.
    """
    import filelock  # here, because whoever only reads needs none

    lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        try:
            _acquire(lock, path, what, wait=wait)
            yield
        finally:
            lock.release()  # does nothing where it was not acquired
    except BaseException:
        lock.release()  # once more: an interrupt may have come just before the release above
        raise


def _acquire(lock: filelock.BaseFileLock, path: Path, what: str, *, wait: bool) -> None:
    """Acquire a lock.

    Raises:
        LockedError: another process holds it.
        StoreError: the file system has no locks.
    """
    import filelock

    try:
        lock.acquire(timeout=-1 if wait else 0)
    except filelock.Timeout:
        raise LockedError(
            f"another process is {what}: wait for it to end, or stop it; nothing was changed "
            f"(lock: {path})"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StoreError(
            f"the file system of {path.parent} has no locks ({error.strerror}), without which two "
            "writers cannot be kept apart: work in a folder of a local disk, or have the file "
            "system mounted with locks (NFS: without nolock)"
        ) from None
