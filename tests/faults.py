"""A process's calls on files below a folder, one by one: to stop it anywhere, or to replay it.

The package has no hooks for faults. A `Recorder` stands between it and the operating system's
calls instead: it knows each by the file it concerns, runs a hook before it, and keeps it.
"""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from stores import Made


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

    def __init__(self, root: Path, before: Callable[[int, Op], int | None] | None = None) -> None:
        self.root = os.path.realpath(root)
        self.ops: list[Op] = []
        self._before = before
        self._files: dict[int, tuple[str, tuple[int, int]]] = {}
        self._real: dict[str, Any] = {}

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        names = "open dup write fsync replace rename mkdir unlink remove rmdir".split()  # noqa: SIM905
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
                data = data[:part]
        written = int(self._real["write"](descriptor, data))  # its own memory, which is aligned
        self.ops.append(Op("write", below, whole[:written]))
        return written

    def _dup(self, descriptor: int) -> int:
        below, found = self._of(descriptor), int(self._real["dup"](descriptor))
        if below is not None:
            self._keep(found, below)
        return found

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


def small(**changed: Any) -> Made:
    """Three shards of few bytes, and few arrays beside them."""
    made = Made(
        [5, 31, 40, 17, 20, 9, 33],
        **{"encoding": "int8", "layers": 2, "hidden": 4, "shard_tokens": 64, "top": 2, **changed},
    )
    made.contents = replace(made.contents, per_token={})
    assert made.plan.n_shards == 3
    return made


@contextmanager
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing, for tests that flush very often."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path("/dev/shm") / f"bertvision-{os.getpid()}-{tmp_path.name}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, without lock files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
