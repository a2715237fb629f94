"""The ledger: small records that say what is committed. What it does not name does not exist.

A shard's files are written and fsynced, with their folders, before its record; the record itself is
written to a temporary file, fsynced, renamed, and its folder fsynced. So at every moment, after a
kill or a power loss, each record that can be read tells of data that is whole on the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from bertvision.errors import (
    CorruptStoreError,
    FormatVersionError,
    StoreNotFoundError,
)
from bertvision.featurestore.durable import fsync, write_durably
from bertvision.featurestore.lock import exclusive
from bertvision.featurestore.schema import FORMAT, ShardFile, ShardRecord, SplitRecord

_SHARD = re.compile(r"(\d{5,9})\.json", re.ASCII)
_Record = TypeVar("_Record", bound=BaseModel)


class Ledger:
    """The records of one split, in ``<store>/ledger/<tag>/<split>/``."""

    def __init__(self, store: Path, tag: str, split: str) -> None:
        self.folder = store / "ledger" / tag / split
        self.name = f"{tag}/{split}"

    @property
    def exists(self) -> bool:
        """Whether the split was created (its plan committed)."""
        return (self.folder / "split.json").is_file()

    def read_split(self) -> SplitRecord:
        """The split's record.

        Raises:
            StoreNotFoundError: the split does not exist.
            FormatVersionError: it was written in a newer format.
            CorruptStoreError: the record does not parse.
        """
        path = self.folder / "split.json"
        if not path.is_file():
            raise StoreNotFoundError(f"there is no split {self.name} in {self.folder.parents[2]}")
        text = path.read_bytes()
        found = re.search(rb'"format"\s*:\s*"(\d+)\.\d+"', text)
        if found and found[1] != FORMAT.split(".")[0].encode():
            raise FormatVersionError(
                f"{path} is of store format {found[1].decode()}; this bertvision reads "
                f"format {FORMAT.split('.')[0]}: install a newer one"
            )
        return _parse(SplitRecord, path, text)

    def commit_split(self, record: SplitRecord) -> None:
        """Commit the split's record: from now on the split exists."""
        write_durably(self.folder / "split.json", _dump(record))

    def shards(self) -> set[int]:
        """Numbers of the committed shards."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return set()
        return {int(m[1]) for m in map(_SHARD.fullmatch, names) if m}

    def find_shard(self, shard: int) -> ShardRecord | None:
        """The record of a shard, or None where it is not committed.

        Raises:
            CorruptStoreError: the record does not parse or tells of another shard.
        """
        path = self._shard_path(shard)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        record = _parse(ShardRecord, path, text)
        if record.shard != shard:
            raise CorruptStoreError(f"{path} is the record of shard {record.shard}, not of {shard}")
        return record

    def read_shard(self, shard: int) -> ShardRecord:
        """The record of a committed shard.

        Raises:
            CorruptStoreError: it is missing, does not parse, or tells of another shard.
        """
        record = self.find_shard(shard)
        if record is None:
            raise CorruptStoreError(f"{self._shard_path(shard)} is missing")
        return record

    def commit_shard(self, record: ShardRecord) -> None:
        """Commit a shard whose files are already durable."""
        write_durably(self._shard_path(record.shard), _dump(record))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the split for writing.

        Raises:
            LockedError: another process holds it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with exclusive(self.folder / ".lock", f"writing {self.name}"):
            yield

    def sweep(self) -> None:
        """Remove what killed writers left: temporary files that no record names."""
        for path in self.folder.glob("*.tmp"):
            path.unlink()

    def _shard_path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.json"


def seal(path: Path, root: Path) -> ShardFile:
    """Make a written file and its folders up to ``root`` durable, and measure it.

    Returns:
        Its length and the sha256 of the bytes as they are read back.
    """
    digest = hashlib.sha256()
    fsync(path)
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
        size = f.tell()
    folder = path.parent
    while folder != root.parent:
        fsync(folder)
        folder = folder.parent
    return ShardFile(bytes=size, sha256=digest.hexdigest())


def _dump(record: BaseModel) -> bytes:
    return record.model_dump_json(indent=1).encode()


def _parse(kind: type[_Record], path: Path, text: bytes) -> _Record:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CorruptStoreError(f"{path} is damaged: {where}: {first['msg']}") from None
