"""Files that are either whole or absent, whenever the process dies or the power goes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from bertvision.errors import DiskSpaceError
from bertvision.featurestore.storage.pieces import write_all, write_pieces

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
        where: what is on the disk, for the message.

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
