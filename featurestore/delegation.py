"""Several processes write one split, while one of them holds its lock.

The holder lends them the right to write: it puts a *grant* beside the lock, a file with a random
token, and tells them the token. They look at it before each write and stop where it is gone or
another's. The holder takes the grant away when it is done, and so does whoever gets the lock next:
where the holder died, workers that did not hear of it write nothing from then on.

What happens between the look and the write does no harm. A shard is a function of snapshot and
shard alone, so whoever writes it on the same kind of machine writes the same bytes; each of its
files appears whole, from a temporary file of the writer's own; and it is committed after they are
durable. On another kind of machine the last bits may differ: who comes late leaves a committed
shard alone, and of two that write at the same moment one stops (`ShardAttempt`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy.typing as npt
import xxhash

from bertvision.errors import LockedError, StoreError
from bertvision.featurestore.format.ledger import LEDGER, Ledger
from bertvision.featurestore.format.records import ROOT, ShardFile, ShardRecord
from bertvision.featurestore.format.shardfile import file_digest, shard_pieces
from bertvision.featurestore.storage.durable import Buffers, fsync
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import ChangedError, Storage

_TRIES = 3


class Grant(NamedTuple):
    """The right to write shards of a split, to be sent to other processes.

    Attributes:
        store: absolute path or URL.
        tag: the snapshot.
        split: its name.
        token: Token of the grant.
    """

    store: str
    tag: str
    split: str
    token: str

    def ledger(self) -> Ledger:
        """The split's ledger, to be written to while `check` passes."""
        storage = open_storage(self.store)
        if isinstance(storage, LocalStorage):
            storage = _SharedFolder(storage)
        return Ledger(storage, self.tag, self.split)

    def check(self, storage: Storage) -> None:
        """Make sure that the right still stands.

        Raises:
            LockedError: it was taken away.
        """
        grant = b""
        with suppress(FileNotFoundError):
            grant = storage.read(_key(self.tag, self.split))
        if grant != self.token.encode():
            raise LockedError(
                f"the process that handed out shards of {self.tag}/{self.split} in {self.store} "
                "has ended, or another one writes them now; what was committed is whole: run the "
                "same command again, it goes on from there"
            )


@contextmanager
def granted(ledger: Ledger) -> Iterator[Grant]:
    """Lend the right to write a split, whose lock the caller holds, to other processes.

    Args:
        ledger: Ledger of the split.

    Yields:
        What the others need.
    """
    store = str(ledger.storage)
    where = store if "://" in store else os.path.abspath(store)
    grant = Grant(where, ledger.tag, ledger.split, secrets.token_hex(16))
    ledger.storage.write(_key(grant.tag, grant.split), grant.token.encode())
    try:
        yield grant
    finally:
        with suppress(StoreError, OSError):  # the next holder of the lock does it
            withdraw(ledger)


def withdraw(ledger: Ledger) -> None:
    """Take away the right that was lent to others, and what they left half-written.

    The caller holds the split's lock.
    """
    key = _key(ledger.tag, ledger.split)
    if ledger.storage.size(key) is not None:
        ledger.storage.remove(key)
        ledger.sweep()
        ledger.storage.sweep(f"{ROOT}/{ledger.tag}/{ledger.split}")


class ShardAttempt:
    """One process writes one shard: each file in place of what it found there, or not at all.

    So of two that write at once one stops, whatever the order of their requests, and the record
    that stays is of whoever wrote the files. The first file decides: who comes second finds it
    changed. A late writer that still gets its record in, beside files that were replaced since, is
    replaced by whoever wrote these.

    Args:
        ledger: Ledger of the split.
        shard: its number.
        keys: Keys of its files.
        yields: Whether it gives way to another that commits the shard meanwhile, as one of several
            to which the right to write was lent; the holder of the lock replaces what a late one
            writes.

    Attributes:
        files: Records of the written files.
        versions: Versions of the files, by name.
    """

    def __init__(
        self, ledger: Ledger, shard: int, keys: Mapping[str, str], *, yields: bool
    ) -> None:
        self.files: dict[str, ShardFile] = {}
        self._ledger, self._storage, self._keys = ledger, ledger.storage, keys
        self._shard, self._yields = shard, yields
        self._record = ledger.shard_version(shard)
        self.versions = {name: self._storage.version(key) for name, key in keys.items()}

    def write(self, name: str, chunks: Iterator[npt.NDArray[Any] | bytes]) -> None:
        """Write a file.

        Raises:
            ChangedError: another process wrote it meanwhile.
        """
        digest, size = xxhash.xxh3_128(), 0

        def measured() -> Iterator[bytes | memoryview]:
            nonlocal size
            for piece in shard_pieces(chunks):
                digest.update(piece)
                size += len(piece)
                yield piece
            # once more, before it takes its place: an equal's shard may be complete by now
            if self._yields and self._ledger.shard_version(self._shard) != self._record:
                raise ChangedError(f"{self._storage}/{self._keys[name]}")

        key = self._keys[name]
        changed = None
        try:
            self.versions[name] = self._storage.write(key, measured(), self.versions[name])
        except ChangedError as error:
            self.versions[name], changed = self._storage.version(key), error
        self.files[name] = ShardFile(bytes=size, xxh3_128=digest.hexdigest())
        if changed and not self._holds(name):  # else it is whole: the answer was lost
            raise changed

    def commit(self, record: ShardRecord) -> None:
        """Commit the record, while the files are still those that were written.

        Raises:
            ChangedError: another process wrote one of them, or goes on writing records.
        """
        for left in reversed(range(_TRIES)):
            for name, key in self._keys.items():
                if self._storage.version(key) != self.versions[name] and not self._holds(name):
                    raise ChangedError(f"{self._storage}/{key}")
            try:
                self._ledger.commit_shard(record, self._record)
                break
            except ChangedError:
                if not left:
                    raise
            self._record = self._ledger.shard_version(record.shard)

    def stands(self, record: ShardRecord) -> bool:
        """Whether the files are those that another one's record tells of."""
        return all(
            name in record.files and self._is(name, record.files[name]) for name in self._keys
        )

    def _holds(self, name: str) -> bool:
        """Whether a file has the content that was written."""
        return name in self.files and self._is(name, self.files[name])

    def _is(self, name: str, file: ShardFile) -> bool:
        try:
            return file_digest(self._storage.open(self._keys[name])) == file.xxh3_128
        except (FileNotFoundError, EOFError):
            return False


def _key(tag: str, split: str) -> str:
    return f"{LEDGER}/{tag}/{split}/.grant"


class _SharedFolder(LocalStorage):
    """A folder into which several processes may write the same file at once, with equal bytes."""

    def __init__(self, storage: LocalStorage) -> None:
        super().__init__(storage.root)
        self._own = secrets.token_hex(4)

    def write(self, key: str, content: Buffers, only_if: str | None = None) -> str:
        path = self._inside(key)
        folder, _, name = key.rpartition("/")
        staged = f"{folder}/.{name}.{self._own}.tmp"
        version = super().write(staged, content)
        if only_if is not None and only_if != self.version(key):
            self.remove(staged)
            raise ChangedError(f"{self}/{key}")
        os.replace(self._inside(staged), path)
        fsync(path.parent)
        return version
