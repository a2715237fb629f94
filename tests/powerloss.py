"""The states that a disk may be in after the power went, from the calls that a `Recorder` kept."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from faults import Op


class _File:
    """A file's bytes: what was flushed, and what is in the page cache only."""

    def __init__(self) -> None:
        self.flushed = b""
        self.cached: list[bytes] = []

    def after(self, rng: random.Random) -> bytes:
        """Contents that the disk may have for it."""
        cached = b"".join(self.cached)
        if not cached:
            return self.flushed
        torn = cached[: rng.randrange(len(cached) + 1)]
        # the length may be on the disk before the bytes are: they read as zeros then
        late = torn + bytes(len(cached) - len(torn))
        return self.flushed + rng.choice([b"", torn, late, cached])


class _Folder:
    """A folder's names: those that were flushed, and the changes that were not."""

    def __init__(self) -> None:
        self.flushed: dict[str, _File | _Folder] = {}
        self.names: dict[str, _File | _Folder] = {}
        self.changes: list[dict[str, _File | _Folder | None]] = []

    def change(self, changed: dict[str, _File | _Folder | None]) -> None:
        self.changes.append(changed)
        _apply(self.names, changed)

    def flush(self) -> None:
        self.flushed, self.changes = dict(self.names), []

    def after(self, rng: random.Random) -> dict[str, _File | _Folder]:
        """Contents that the disk may have for it: any changes that were not flushed are missing."""
        found = dict(self.flushed)
        for changed in self.changes:
            if rng.random() < 0.5:
                _apply(found, changed)
        return found


def _apply(names: dict[str, Any], changed: dict[str, Any]) -> None:
    for name, what in changed.items():
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


class PowerLoss:
    """Replays calls on a model of a disk that promises only what POSIX does.

    Args:
        folder: what is on the disk before; nothing by default.

    A file's bytes are safe after fsync of the file, a name in a folder after fsync of the folder;
    what is not safe may be lost, kept, or, within a file, half of each, whatever came later.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._root = _Folder()
        if folder is not None and folder.exists():
            self._load(self._root, folder)

    def _load(self, into: _Folder, folder: Path) -> None:
        """Take what is there already for flushed."""
        for path in folder.iterdir():
            if path.is_dir():
                into.names[path.name] = below = _Folder()
                self._load(below, path)
            else:
                into.names[path.name] = file = _File()
                file.flushed = path.read_bytes()
        into.flush()

    def do(self, op: Op) -> None:
        """Do to the model what was done to the real folder."""
        if op == Op("mkdir", "."):
            return
        folder, name = self._find(op.path)
        if op.kind == "create":
            there = folder.names.get(name)
            if isinstance(there, _File):
                # truncated: neither the old nor the new bytes are sure to be found
                there.flushed, there.cached = b"", []
            else:
                folder.change({name: _File()})
        elif op.kind == "mkdir":
            folder.change({name: _Folder()})
        elif op.kind in ("unlink", "rmdir"):
            folder.change({name: None})
        elif op.kind == "rename":
            assert os.path.dirname(op.to) == os.path.dirname(op.path)
            folder.change({os.path.basename(op.to): folder.names[name], name: None})
        else:
            what = self._root if op.path == "." else folder.names[name]
            if op.kind == "write":
                assert isinstance(what, _File)
                what.cached.append(op.data)
            elif isinstance(what, _File):
                what.flushed, what.cached = what.flushed + b"".join(what.cached), []
            else:
                what.flush()

    def disk(self, target: Path, rng: random.Random) -> None:
        """Write one of the possible states of the disk below a new folder."""
        self._write(self._root, target, rng)

    def _find(self, path: str) -> tuple[_Folder, str]:
        *parents, name = path.split(os.sep)
        folder = self._root
        for parent in parents:
            below = folder.names[parent]
            assert isinstance(below, _Folder)
            folder = below
        return folder, name

    def _write(self, folder: _Folder, target: Path, rng: random.Random) -> None:
        target.mkdir()
        for name, what in folder.after(rng).items():
            if isinstance(what, _Folder):
                self._write(what, target / name, rng)
            else:
                (target / name).write_bytes(what.after(rng))
