"""Several processes write one split, while one of them holds its lock.

The holder lends them the right to write: it puts a *grant* beside the lock, a file with a random
token, and tells them the token. They look at it before each write and stop where it is gone or
another's. The holder takes the grant away when it is done, and so does whoever gets the lock next:
where the holder died, workers that did not hear of it write nothing from then on.

What happens between the look and the write does no harm. A shard is a function of snapshot and
shard alone, so whoever writes it on the same kind of machine writes the same bytes; each of its
files appears whole, from a temporary file of the writer's own; and it is committed after they are
durable. On another kind of machine the last bits may differ: who comes late leaves a committed
shard alone, and of two that write at the same moment a mixture is found by its checksums.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from bertvision.errors import LockedError, StoreError
from bertvision.featurestore.format.ledger import LEDGER, Ledger
from bertvision.featurestore.format.records import ROOT
from bertvision.featurestore.storage.durable import Buffers, fsync
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage


class Grant(NamedTuple):
    """The right to write shards of a split, to be sent to other processes.

    Attributes:
        store: absolute path or URL.
        tag: the snapshot.
        split: its name.
        token: that the grant holds.
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
        found = b""
        with suppress(FileNotFoundError):
            found = storage.read(_key(self.tag, self.split))
        if found != self.token.encode():
            raise LockedError(
                f"the process that handed out shards of {self.tag}/{self.split} in {self.store} "
                "has ended, or another one writes them now; what was committed is whole: run the "
                "same command again, it goes on from there"
            )


@contextmanager
def granted(ledger: Ledger) -> Iterator[Grant]:
    """Lend the right to write a split, whose lock the caller holds, to other processes.

    Args:
        ledger: of the split.

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


def _key(tag: str, split: str) -> str:
    return f"{LEDGER}/{tag}/{split}/.grant"


class _SharedFolder(LocalStorage):
    """A folder into which several processes may write the same file at once, with equal bytes."""

    def __init__(self, storage: LocalStorage) -> None:
        super().__init__(storage.root)
        self._own = secrets.token_hex(4)

    def write(self, key: str, content: Buffers) -> None:
        path = self._inside(key)
        folder, _, name = key.rpartition("/")
        staged = f"{folder}/.{name}.{self._own}.tmp"
        super().write(staged, content)
        os.replace(self._inside(staged), path)
        fsync(path.parent)
