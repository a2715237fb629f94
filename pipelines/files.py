"""Files and folders that are either whole or absent, whenever the process dies."""

from __future__ import annotations

import filecmp
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import InputError
from bertvision.featurestore.storage.durable import (
    fsync,
    full_disk_named,
    make_folder,
    swap,
    write_durably,
)
from bertvision.featurestore.storage.lock import exclusive

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_durably(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON-able value atomically, readable and with a final newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, most: int = 1 << 22) -> Any:
    """A value out of a JSON file that somebody else may have made.

    Args:
        path: Path of the file.
        most: bytes that it may have.

    Raises:
        InputError: it is no regular file, larger, nested too deep, or not JSON.
    """
    if not path.is_file():  # a pipe would be waited for
        raise InputError(f"there is no file {path}")
    if (size := path.stat().st_size) > most:
        raise InputError(f"{path} has {size:,} bytes: {most:,} at most are read")
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise InputError(f"{path} is nested too deep to be read") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def check_regular(path: Path) -> Path:
    """Refuse what cannot be read from beginning to end, before it is opened: a pipe would wait.

    Args:
        path: Path of a file that somebody else may have made; links are followed.

    Returns:
        The path.

    Raises:
        InputError: it is missing, or a folder, a pipe, a socket or a device.
    """
    if not path.is_file():
        there = path.exists() or path.is_symlink()
        what = "is no file: it is a folder, a pipe, a device or a link to nothing" if there else ""
        raise InputError(f"{path} {what}" if there else f"there is no file {path}")
    return path


def to_json(values: npt.NDArray[np.floating[Any]]) -> Any:
    """An array as nested lists of numbers, None for what JSON has no word for (NaN, infinities)."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(v) for v in value]
        return value if math.isfinite(value) else None

    return convert(values.tolist())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling folder that becomes ``path`` when the block ends without an error.

    A second process that makes the same folder waits for the first. What an interrupted one left
    under the temporary names is removed first. Where the system cannot swap two names, a process
    that dies between the two steps leaves the old folder aside, and the next one brings it back.

    Raises:
        DiskSpaceError: the disk is full.
    """
    temporary, aside = (path.with_name(f".{path.name}.{name}") for name in ("tmp", "old"))
    with full_disk_named(path.parent):
        make_folder(path.parent)
        lock = path.with_name(f".{path.name}.new.lock")
        with exclusive(lock, f"writing {path}", wait=True):
            _settle(path, temporary, aside)
            try:
                temporary.mkdir()
                yield temporary
                readable = temporary.stat().st_mode & 0o666
                for file in temporary.rglob("*"):
                    if file.is_file():
                        file.chmod(readable)  # libraries make some that only their owner may read
                    fsync(file)
                fsync(temporary)
                if not (path.exists() and swap(temporary, path)):
                    if path.exists():
                        os.replace(path, aside)
                    os.replace(temporary, path)
                fsync(path.parent)
            finally:
                _settle(path, temporary, aside)


def _settle(path: Path, temporary: Path, aside: Path) -> None:
    """Bring back what was put aside for a folder that did not come; remove what else is left.

    Links are removed and not followed.
    """
    trash = aside.with_suffix(".trash")
    _remove(trash)
    if aside.exists():
        # under another name before it is removed file by file, or a part of it could come back
        os.replace(aside, trash if path.exists() else path)
    _remove(temporary, aside, trash)


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_symlink():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


def keep_others(old: Path, new: Path, changed: str) -> None:
    """Copy what others wrote beside files that are written again as they were.

    Args:
        old: folder that ``new`` is to replace; it may not exist.
        new: folder with the files that are written again. Where one is not as it was, nothing is
            copied: it was made from another.
        changed: name of the file that may be another.
    """
    names = [path.name for path in new.iterdir()]
    for name in names:
        same = (old / name).is_file() and filecmp.cmp(old / name, new / name, shallow=False)
        if not same and name != changed:
            return
    for path in old.iterdir():
        if path.name not in names:
            shutil.copy2(path, new / path.name)


def digests_in(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Hex sha256 of files in a folder, by name."""
    return {name: sha256_of_files([folder / name]) for name in names}


def sha256_of_files(paths: list[Path]) -> str:
    """Hex sha256 of the bytes of one file, or of several one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
