"""A store inside a zip, which is read where it lies and never unpacked.

Members are stored, not compressed, so that any range of one is a range of the zip.
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bertvision.errors import CorruptStoreError, InputError
from bertvision.featurestore.storage.durable import Buffers
from bertvision.featurestore.storage.local import LocalFile
from bertvision.featurestore.storage.storage import ABSENT, SMALL_BYTES, OpenFile, Storage

if TYPE_CHECKING:
    import numpy.typing as npt

_HEADER = struct.Struct("<4s22xHH")
"""Signature of a member's own header, and the lengths of its name and of what follows that."""
_ENCRYPTED, _UTF8 = 0x1, 0x800


class _Member(NamedTuple):
    """Place of a member in the zip."""

    name: bytes
    header: int
    """Offset of its own header, behind which its bytes lie."""
    size: int
    crc: int


class _Index(NamedTuple):
    """Content of a zip, without the one folder in which all of it may lie."""

    files: dict[str, _Member]
    folders: dict[str, set[str]]
    """Names of the files and folders in each folder."""


class ZipStorage(Storage):
    """The files in a zip, at its root or in one folder of it; they can only be read.

    Args:
        path: Path of the zip, which is looked at when the first file is asked for.
    """

    read_only = (
        "is a zip, which is only read: name another folder (--store), or unpack the zip and name "
        "what comes out"
    )

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[type[ZipStorage], tuple[Path]]:
        return ZipStorage, (self.path,)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<ZipStorage {self}>"

    def read(self, key: str, most: int = SMALL_BYTES) -> bytes:  # noqa: D102
        member = self._member(key)
        if member.size > most:
            raise CorruptStoreError(f"{self}/{key} has {member.size} bytes, {most} at most are due")
        content = bytearray(member.size)
        file = _MemberFile(self.path, member)
        try:
            file.fill(memoryview(content), 0)
        finally:
            file.close()
        if zlib.crc32(content) != member.crc:
            raise CorruptStoreError(
                f"{self}/{key} is damaged: its bytes do not have the checksum of the zip; copy the "
                "zip again"
            )
        return bytes(content)

    def write(self, key: str, content: Buffers, only_if: str | None = None) -> str:  # noqa: D102
        self.require_writable()
        return ABSENT

    def version(self, key: str) -> str:  # noqa: D102
        self.require_writable()
        return ABSENT

    def size(self, key: str) -> int | None:  # noqa: D102
        member = self._index.files.get(_plain(key))
        return None if member is None else member.size

    def names(self, key: str) -> list[str]:  # noqa: D102
        return sorted(self._index.folders.get(_plain(key), ()))

    def remove(self, key: str) -> None:  # noqa: D102
        self.require_writable()

    def sweep(self, key: str) -> None:  # noqa: D102
        self.require_writable()

    def open(self, key: str) -> OpenFile:  # noqa: D102
        return _MemberFile(self.path, self._member(key))

    @contextmanager
    def lock(self, key: str, what: str, wait: bool = False) -> Iterator[None]:  # noqa: D102
        self.require_writable()
        yield

    def free_bytes(self) -> int | None:  # noqa: D102
        return None

    def _member(self, key: str) -> _Member:
        if (member := self._index.files.get(_plain(key))) is None:
            raise FileNotFoundError(f"{self}/{key} is missing")
        return member

    @cached_property
    def _index(self) -> _Index:
        members = _members(self.path)
        first = {key.partition("/")[0] for key in members}
        if len(first) == 1 and (folder := f"{first.pop()}/"):
            members = {key.removeprefix(folder): member for key, member in members.items()}
        folders: dict[str, set[str]] = {}
        for key in members:
            while key:
                key, _, name = key.rpartition("/")
                folders.setdefault(key, set()).add(name)
        return _Index(members, folders)


def _plain(key: str) -> str:
    """A key without empty parts."""
    return "/".join(part for part in key.split("/") if part not in ("", "."))


def _members(path: Path) -> dict[str, _Member]:
    """The members of a zip by name; none where there is no zip.

    Raises:
        CorruptStoreError: it is damaged, names a file twice, or one outside of itself.
        InputError: a member is compressed or encrypted.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
        end = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise CorruptStoreError(
            f"{path} is no whole zip ({error}): copy it again, or make it again with "
            "`zip -0 -r activations.zip activations`"
        ) from error
    members: dict[str, _Member] = {}
    for info in infos:
        name = info.orig_filename
        if name in members:
            raise CorruptStoreError(f"{path} holds {name!r} twice: make it again of the folder")
        if info.is_dir():
            continue
        if {"", ".", ".."} & set(name.split("/")) or "\0" in name or "\\" in name:
            raise CorruptStoreError(f"{path} holds {name!r}, which is no path of a store's file")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise CorruptStoreError(f"{path} holds {name!r}, a link: make it again of the files")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise InputError(
                f"{path} holds {name!r} compressed or encrypted, and is read in place: make it "
                "again with `zip -0 -r activations.zip activations`"
            )
        if info.compress_size != info.file_size or not (
            0 <= info.header_offset <= end - info.file_size
        ):
            raise CorruptStoreError(
                f"{path} gives {name!r} a size or place that it does not have: copy the zip again"
            )
        raw = name.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
        members[name] = _Member(raw, info.header_offset, info.file_size, info.CRC)
    return members


class _MemberFile:
    """A member that is open for reads at any offset (see `storage.OpenFile`).

    Raises:
        CorruptStoreError: it does not lie in the zip where that says.
    """

    def __init__(self, path: Path, member: _Member) -> None:
        self.size = member.size
        self._file = LocalFile(str(path))
        header = bytearray(_HEADER.size + len(member.name))
        with suppress(EOFError):
            self._file.fill(memoryview(header), member.header)
        signature, name, extra = _HEADER.unpack_from(header)
        self._first = member.header + _HEADER.size + name + extra
        lies = signature == b"PK\3\4" and header[_HEADER.size :] == member.name
        if not lies or self._first + self.size > self._file.size:
            self.close()
            raise CorruptStoreError(
                f"{path} does not hold {member.name.decode(errors='replace')} where it says: it is "
                "damaged, or was replaced while it was read; open it again, or copy it again"
            )

    def __reduce__(self) -> str:
        return self._file.__reduce__()

    def prefetch(self, offset: int, length: int) -> None:
        self._file.prefetch(self._first + offset, length)

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._file.expect([(self._first + offset, length) for offset, length in ranges])

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:
        self.fill(out.data, offset)

    def fill(self, view: memoryview, offset: int) -> None:
        """As `read_into`, of any contiguous memory."""
        if offset + view.nbytes > self.size:
            raise EOFError(f"the file ends at {self.size}")
        self._file.fill(view, self._first + offset)

    def close(self) -> None:
        self._file.close()
