"""Committed shards of a growing split: the keys of their examples and their arrays."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TypeAlias

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

Versions: TypeAlias = "Mapping[int, Mapping[str, str]]"
"""The versions of files by the shard and the file's name."""


class Committed:
    """The keys of all committed shards, whoever wrote them; `refresh` looks for new ones.

    Args:
        ledger: Ledger of the split.
        growing: its record.

    Attributes:
        keys: Keys of the examples.
        columns: Columns of every example; None as long as there is none.
        own: versions of the files of the shards that this process committed, by the shard and the
            file's name: as long as a file has its version, its bytes are those that were written.
    """

    def __init__(self, ledger: GrowingLedger, growing: GrowingRecord) -> None:
        self.keys: set[str] = set()
        self.columns: Mapping[str, Column] | None = None
        self.own: dict[int, Mapping[str, str]] = {}
        self._ledger, self._growing = ledger, growing
        self._seen: set[int] = set()
        self._lowest = 0

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
            self.add(record)

    def next_shard(self) -> int:
        """The lowest number that no shard has."""
        while self._lowest in self._seen:
            self._lowest += 1
        return self._lowest

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
        """Take note of a shard that was committed."""
        self._seen.add(record.shard)
        self.keys.update(record.keys)
        self.columns = record.columns


def check_new(
    name: str,
    growing: GrowingRecord | None,
    there: bool,
    due: Container[str] | None,
    tag: str,
    split: str,
) -> GrowingRecord:
    """Check that a split takes an example of this key.

    Args:
        name: the key.
        growing: the split's record; None where it is complete.
        there: Whether the split has an example of this key.
        due: Keys that it has in other snapshots, or None.
        tag: Tag of the split.
        split: its name.

    Returns:
        The record.

    Raises:
        InputError: it does not.
    """
    if growing is None:
        raise InputError(
            f"{tag}/{split} is complete and takes no more examples: remove it with "
            f"`store.remove({tag!r}, {split!r})`, or write to another split"
        )
    if there:
        raise InputError(
            f"{tag}/{split} has an example {name!r} already: leave out what it has, "
            "`if key not in writer`"
        )
    if due is not None and name not in due:
        raise InputError(
            f"{name!r} is no example of {split} in other snapshots, and a split has the same ones "
            "in each: choose another name for the split"
        )
    return growing


def check_all(keys: set[str], due: set[str] | None, examples: int | None, split: str) -> None:
    """Check that a split that is to be finished has all examples.

    Args:
        keys: Keys that it has.
        due: Keys that it has in other snapshots, or None.
        examples: Number of examples that it must have, or None.
        split: ``<tag>/<split>``.

    Raises:
        InputError: some are missing, or there are too many.
    """
    if due is not None and (lacking := due - keys):
        raise InputError(
            f"{split} lacks {len(lacking):,} of the {len(due):,} examples that the split has in "
            f"other snapshots, {min(lacking)!r} first: add them before it is finished"
        )
    if examples is not None and len(keys) != examples:
        raise InputError(
            f"{split} has {len(keys):,} examples, not {examples:,}: it is finished when it has them"
        )


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


def find_changed(
    ledger: GrowingLedger,
    growing: GrowingRecord,
    record: GrowingShard,
    versions: Mapping[str, str] | None = None,
) -> list[str]:
    """Read the files of a shard again, a piece at a time, and compare them with its record.

    Args:
        ledger: Ledger of the split.
        growing: its record.
        record: Record of the shard.
        versions: Versions of files that need not be read as long as they have these, by name.

    Returns:
        What is wrong, a line each.
    """
    problems = []
    for name, file in record.files.items():
        shard = record.shard
        key = ledger.rows_key(shard) if name == ROWS else shard_key(growing, name, shard)
        if versions is not None and ledger.storage.version(key) == versions.get(name):
            continue
        try:
            if file_digest(ledger.storage.open(key)) != file.xxh3_128:
                problems.append(f"{ledger.name} shard {shard}: {name} was changed on the disk")
        except (FileNotFoundError, EOFError, CorruptStoreError) as error:
            problems.append(f"{ledger.name} shard {shard}: {name} cannot be read: {error}")
    return problems


def find_growing_damage(storage: Storage, tag: str, split: str) -> list[str]:
    """Read every committed byte of a growing split again and compare it with the ledger.

    Returns:
        What is wrong, a line each, and that it still grows; empty where it does not.
    """
    ledger = GrowingLedger(storage, tag, split)
    growing = ledger.state()
    if not isinstance(growing, GrowingRecord):
        return []
    problems = [f"{ledger.name} is still being written: {counted(len(ledger.shards()), 'shard')}"]
    for shard in sorted(ledger.shards()):
        try:
            if record := ledger.read_growing(shard, growing):
                problems += find_changed(ledger, growing, record)
        except (OSError, CorruptStoreError) as error:
            problems.append(f"{ledger.name} shard {shard}: {error}")
    return problems
