"""Files that are either whole or absent, whenever the process dies or the power goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_durably(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Make a temporary sibling, flush it to the disk, rename it to ``path``, flush the folder.

    Missing folders are made. What an interrupted process left under the temporary name is
    overwritten; two processes must not write the same path at once.

    Args:
        path: the file.
        content: its bytes, or a function that writes them to the path it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    if isinstance(content, bytes):
        temporary.write_bytes(content)
    else:
        content(temporary)
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
