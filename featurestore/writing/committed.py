"""What the shards of a growing split hold so far: the keys of their examples and their arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from bertvision.errors import CorruptStoreError, InputError, counted
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.format.shardfile import file_digest
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.writing.columns import check_same
from bertvision.featurestore.writing.growing import (
    ROWS,
    Column,
    GrowingLedger,
    GrowingRecord,
    GrowingShard,
)


class Committed:
    """The keys of all committed shards, whoever wrote them; `refresh` looks for new ones.

    Args:
        ledger: of the split.
        growing: its record.

    Attributes:
        keys: of the examples.
        columns: that every example has; None as long as there is none.
    """

    def __init__(self, ledger: GrowingLedger, growing: GrowingRecord) -> None:
        self.keys: set[str] = set()
        self.columns: Mapping[str, Column] | None = None
        self._ledger, self._growing = ledger, growing
        self._seen: set[int] = set()

    def refresh(self) -> None:
        """Take note of shards that were committed since.

        Raises:
            CorruptStoreError: a record is damaged, or two shards hold the same key.
        """
        for record in read_shards(self._ledger, self._growing, self._ledger.shards() - self._seen):
            if twice := self.keys.intersection(record.keys):
                raise CorruptStoreError(
                    f"{self._ledger.name} shard {record.shard} holds example {min(twice)!r}, "
                    "which another shard holds too"
                )
            self._seen.add(record.shard)
            self.keys.update(record.keys)
            self.columns = record.columns

    def next_shard(self) -> int:
        """The lowest number that no shard has."""
        return next(i for i in range(len(self._seen) + 1) if i not in self._seen)

    def check(self, keys: Iterable[str], columns: Mapping[str, Column]) -> None:
        """Check that examples may be committed beside the others.

        Raises:
            InputError: a key was committed by another process meanwhile, or arrays differ.
        """
        if twice := self.keys.intersection(keys):
            raise InputError(
                f"{len(twice)} of the examples, {min(twice)!r} first, were stored by another "
                f"process meanwhile: give each process of {self._ledger.name} examples of its own; "
                "none of this shard were stored"
            )
        if self.columns is not None:
            check_same(columns, self.columns, "a shard of this process")

    def add(self, record: GrowingShard) -> None:
        """Take note of a shard that was just committed."""
        self._seen.add(record.shard)
        self.keys.update(record.keys)
        self.columns = record.columns


def read_shards(
    ledger: GrowingLedger, growing: GrowingRecord, shards: Iterable[int]
) -> Iterator[GrowingShard]:
    """The records of some shards, in their order.

    Raises:
        CorruptStoreError: one is damaged, or gone.
    """
    for shard in sorted(shards):
        record = ledger.read_growing(shard, growing)
        if record is None:
            raise CorruptStoreError(f"{ledger.name}: the record of shard {shard} is gone")
        yield record


def find_growing_damage(storage: Storage, tag: str, split: str) -> list[str]:
    """Read every committed byte of a growing split again and compare it with the ledger.

    Returns:
        What is wrong, a line each, and that it still grows; empty where it does not.
    """
    ledger = GrowingLedger(storage, tag, split)
    growing = ledger.state()
    if not isinstance(growing, GrowingRecord):
        return []
    found = [f"{ledger.name} is still being written: {counted(len(ledger.shards()), 'shard')}"]
    for shard in sorted(ledger.shards()):
        try:
            record = ledger.read_growing(shard, growing)
            for name, file in record.files.items() if record else ():
                key = ledger.rows_key(shard) if name == ROWS else shard_key(growing, name, shard)
                if file_digest(storage.open(key)) != file.xxh3_128:
                    found.append(f"{ledger.name} shard {shard}: {name} was changed on the disk")
        except (OSError, EOFError, CorruptStoreError) as error:
            found.append(f"{ledger.name} shard {shard}: {error}")
    return found
