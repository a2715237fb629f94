"""Files and folders that are either whole or absent, whenever the process dies."""

from __future__ import annotations

import filecmp
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.featurestore.storage.durable import fsync, full_disk_named, write_durably

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_durably(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON-able value atomically, readable and with a final newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


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

    What an interrupted process left under the temporary name is removed first.

    Raises:
        DiskSpaceError: the disk is full.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with full_disk_named(path.parent):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.rglob("*"):
                fsync(file)
            fsync(temporary)
            if path.exists():
                # without its marker file it is the rest of something unfinished
                shutil.rmtree(path)
            os.replace(temporary, path)
            fsync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


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


def sha256_of_files(paths: list[Path]) -> str:
    """Hex sha256 of the bytes of one file, or of several one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
