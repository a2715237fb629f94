"""What a process does to files below a folder, call by call: to stop it anywhere, or replay it.

The package has no hooks for faults. A `Recorder` stands between it and the operating system's
calls instead: it knows each by the file it concerns, runs a hook before it, and keeps it. From
what was kept, `PowerLoss` builds the states that a disk may be in after the power went.
"""

from __future__ import annotations

import builtins
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


class Op(NamedTuple):
    """One call that changes files, or flushes them.

    Attributes:
        kind: create, write, fsync, rename, mkdir, unlink or rmdir.
        path: what it concerns, relative to the recorder's root.
        data: the bytes of a write.
        to: the new path of a rename.
    """

    kind: str
    path: str
    data: bytes = b""
    to: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}"


class Killed(BaseException):
    """Stands for the end of the process where it ends without a chance to clean up."""


class Recorder:
    """Keeps the calls that a block makes below a root.

    Args:
        root: a folder; what happens elsewhere is neither seen nor hindered.
        before: called with the number and each call that is about to be made; it may raise, or
            return how many bytes of a write are to be written before it is called again with -1.

    Attributes:
        ops: what was done.
    """

    def __init__(
        self, root: Path, before: Callable[[int, Op], int | None] | None = None
    ) -> None:
        self.root = os.path.realpath(root)
        self.ops: list[Op] = []
        self._before = before
        self._files: dict[int, tuple[str, tuple[int, int]]] = {}
        self._real: dict[str, Any] = {}

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        names = "open write fsync replace rename mkdir unlink remove rmdir".split()  # noqa: SIM905
        self._real = {name: getattr(os, name) for name in names} | {"file": builtins.open}
        patches = [mock.patch.object(os, name, getattr(self, f"_{name}")) for name in names]
        patches.append(mock.patch.object(builtins, "open", self._file))
        for patch in patches:
            patch.start()
        try:
            yield self
        finally:
            for patch in patches:
                patch.stop()

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path relative to the root, or None where it is elsewhere."""
        if isinstance(path, int):
            return self._of(path)
        path = os.fspath(path)
        if dir_fd is not None:
            folder = self._of(dir_fd)
            return None if folder is None else os.path.normpath(os.path.join(folder, path))
        path = os.path.abspath(path)
        head, tail = os.path.split(path)
        path = os.path.join(os.path.realpath(head), tail)
        if path == self.root:
            return "."
        inside = path.startswith(self.root + os.sep)
        return os.path.relpath(path, self.root) if inside else None

    def _of(self, descriptor: int) -> str | None:
        path, identity = self._files.get(descriptor, (None, None))
        if path is None:
            return None
        found = os.fstat(descriptor)  # the number may stand for another file by now
        return path if (found.st_dev, found.st_ino) == identity else None

    def _keep(self, descriptor: int, path: str) -> None:
        found = os.fstat(descriptor)
        self._files[descriptor] = path, (found.st_dev, found.st_ino)

    def _do(self, op: Op, call: Callable[[], Any]) -> Any:
        if self._before is not None:
            self._before(len(self.ops), op)
        result = call()
        self.ops.append(op)
        return result

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        below = self._below(path, dir_fd)

        def call() -> int:
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))

        new = flags & os.O_CREAT and below is not None and not os.path.exists(path)
        descriptor = self._do(Op("create", str(below)), call) if new else call()
        if below is not None:
            self._keep(descriptor, below)
        return descriptor

    def _file(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        below = None if isinstance(path, int) or mode[0] not in "wxa" else self._below(path)

        def call() -> Any:
            return self._real["file"](path, mode, *args, **kwargs)

        if below is None:
            return call()
        file = self._do(Op("create", below), call)
        self._keep(file.fileno(), below)
        return file

    def _write(self, descriptor: int, data: Any) -> int:
        below = self._of(descriptor)
        if below is None:
            return int(self._real["write"](descriptor, data))
        whole = bytes(data)
        if self._before is not None:
            part = self._before(len(self.ops), Op("write", below, whole))
            if part is not None:
                whole = whole[:part]
        written = int(self._real["write"](descriptor, whole))
        self.ops.append(Op("write", below, whole[:written]))
        return written

    def _fsync(self, descriptor: int) -> None:
        below = self._of(descriptor)
        if below is None:
            self._real["fsync"](descriptor)
        else:
            self._do(Op("fsync", below), lambda: self._real["fsync"](descriptor))

    def _replace(self, source: Any, target: Any) -> None:
        self._renamed("replace", source, target)

    def _rename(self, source: Any, target: Any) -> None:
        self._renamed("rename", source, target)

    def _renamed(self, name: str, source: Any, target: Any) -> None:
        below, to = self._below(source), self._below(target)
        if below is None or to is None:
            self._real[name](source, target)
        else:
            op = Op("rename", below, to=to)
            self._do(op, lambda: self._real[name](source, target))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._plain("mkdir", "mkdir", path, dir_fd, mode)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._plain("unlink", "unlink", path, dir_fd)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._plain("remove", "unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._plain("rmdir", "rmdir", path, dir_fd)

    def _plain(self, name: str, kind: str, path: Any, dir_fd: int | None, *args: Any) -> None:
        below = self._below(path, dir_fd)

        def call() -> None:
            self._real[name](path, *args, dir_fd=dir_fd)

        if below is None:
            call()
        else:
            self._do(Op(kind, below), call)


class _File:
    """A file's bytes: what was flushed, and what is in the page cache only."""

    def __init__(self) -> None:
        self.flushed = b""
        self.cached: list[bytes] = []

    def after(self, rng: random.Random) -> bytes:
        """What the disk may hold of it."""
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
        """What the disk may hold of it: each change not flushed is there or not."""
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

    A file's bytes are safe after fsync of the file, a name in a folder after fsync of the folder;
    what is not safe may be lost, kept, or, within a file, half of each, whatever came later.
    """

    def __init__(self) -> None:
        self._root = _Folder()

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


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, without lock files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
