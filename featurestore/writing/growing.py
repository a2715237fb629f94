"""The records of a growing split: examples are added to it, and its plan with each shard.

While a split grows its ``split.json`` names ``growing`` among what it requires, so that no reader
takes it for a split with a plan, and a shard's record tells the keys and lengths of its examples.
`finishing` turns all of them into the records of an ordinary split.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bertvision.errors import CorruptStoreError, IncompleteSplitError
from bertvision.featurestore.format.ledger import LEDGER, Ledger
from bertvision.featurestore.format.records import (
    ArrayRecord,
    Identifier,
    Layout,
    ShardRecord,
    SplitRecord,
)

KEY_CHARACTERS = 256
NEXT = "next"
"""Folder of the records of shards that wait to take their place."""
ROWS = "rows"
"""Folder of the files of what lies beside hidden states; what a shard's record calls its one."""


class Column(BaseModel):
    """An array beside the hidden states, the same in all shards.

    Attributes:
        per: Unit of an entry.
        dtype: NumPy's name of its type.
        shape: Shape of an entry.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    per: Literal["token", "example"]
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape or ''} of each {self.per}".replace("  ", " ")


class GrowingRecord(Layout):
    """Record of a split as long as examples are added to it.

    Attributes:
        writing: drawn at random when the split was begun; its shards are bound to it.
        parts: Parts that were begun and have not been closed; they may have more examples to come.
        arrays: channel statistics and what the encoding loses, once they are known.
        final: the split's record, once all examples are there and it is being finished.
        moves: Whether its examples are moved to other shards before it is finished.
    """

    writing: str = Field(pattern="^[0-9a-f]{32}$")
    parts: tuple[Annotated[int, Field(ge=0)], ...] = ()
    arrays: dict[Identifier, ArrayRecord] = {}
    final: SplitRecord | None = None
    moves: bool = False

    @property
    def identity(self) -> str:
        """Identity that the records of its shards name."""
        return hashlib.sha256(f"{self.tag}/{self.split} {self.writing}".encode()).hexdigest()


_Key = Annotated[str, Field(min_length=1, max_length=KEY_CHARACTERS)]


class GrowingShard(ShardRecord):
    """Record of a committed shard of a growing split.

    Attributes:
        keys: (examples,) of its examples.
        lengths: (examples,) tokens of each.
        columns: Content of its rows file, by name.
    """

    growing: Literal[True] = True
    keys: tuple[_Key, ...]
    lengths: tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...]
    columns: dict[Identifier, Column] = {}

    def plain(self, split: SplitRecord) -> ShardRecord:
        """The record that is left of it in the finished split."""
        fields = {name: getattr(self, name) for name in ShardRecord.model_fields}
        files = {name: file for name, file in self.files.items() if name != ROWS}
        return ShardRecord(**fields | {"files": files, "split_sha256": split.identity})


class GrowingLedger(Ledger):
    """The records of a split that may be growing."""

    @property
    def grows(self) -> bool:
        """Whether it is growing, or being finished."""
        return isinstance(self.state(), GrowingRecord)

    def state(self) -> GrowingRecord | SplitRecord | None:
        """The split's record; None where there is none yet.

        Raises:
            CorruptStoreError: it is damaged, or missing although shards are recorded.
            FormatVersionError: it was written in a newer format.
        """
        key = f"{LEDGER}/{self.name}/split.json"
        if not self.exists and not self.shards():
            return None
        try:
            return self.read_split()
        except IncompleteSplitError:
            record = self._parse(GrowingRecord, key, self.storage.read(key))
        if (record.tag, record.split) != (self.tag, self.split):
            raise CorruptStoreError(f"{self.storage}/{key} is the record of another split")
        return record

    def commit_growing(self, record: GrowingRecord | SplitRecord) -> None:
        """Commit the split's record in place of the one that is there; a lock is held."""
        key = f"{LEDGER}/{self.name}/split.json"
        self._commit(key, record, self.storage.version(key))

    def read_growing(self, shard: int, growing: GrowingRecord) -> GrowingShard | None:
        """The record of a shard; None where there is none, or it is of the final split already.

        Raises:
            CorruptStoreError: it is damaged, of another split, or contradicts itself.
        """
        key = self._shard_key(shard)
        try:
            text = self.storage.read(key)
        except FileNotFoundError:
            return None
        shard_there = self._parse(ShardRecord, key, text)
        final = growing.final and growing.final.identity
        if shard_there.shard != shard or shard_there.split_sha256 not in (
            growing.identity,
            final,
        ):
            raise CorruptStoreError(
                f"{self.storage}/{key} is not the record of shard {shard} of this {self.name}"
            )
        if shard_there.split_sha256 == final:
            return None
        record = self._parse(GrowingShard, key, text)
        fits = record.tokens == sum(record.lengths) <= growing.shard_tokens
        if not fits or not record.examples == len(record.keys) == len(record.lengths):
            raise CorruptStoreError(f"{self.storage}/{key} contradicts itself")
        return record

    def info(self) -> dict[str, Any] | None:
        """Facts about a growing split, named as in `StoredSplit.info`.

        Returns:
            None where it does not grow, or does no more.

        Raises:
            CorruptStoreError: a record is damaged.
        """
        growing = self.state()
        if not isinstance(growing, GrowingRecord):
            return None
        shard_records = (self.read_growing(shard, growing) for shard in sorted(self.shards()))
        records = [record for record in shard_records if record is not None]
        stored = sum(file.bytes for record in records for file in record.files.values())
        examples = sum(record.examples for record in records)
        return {
            "tag": self.tag,
            "split": self.split,
            "complete": False,
            "growing": True,
            "shards_committed": len(records),
            "examples": examples,
            "tokens": sum(record.tokens for record in records),
            "encoding": growing.encoding,
            "compression": growing.compression,
            "layers": list(growing.layers),
            "hidden_size": growing.hidden_size,
            "bytes": stored,
            "bytes_per_example": stored / examples if examples else None,
            "times_smaller_than_dense_float32": None,
            "nonfinite": sum(record.nonfinite for record in records),
            "format": growing.format,
            "provenance": dict(growing.provenance),
            "versions": dict(growing.versions),
        }

    def next_shards(self) -> set[int]:
        """Numbers of the shards that wait to take their place in another order."""
        names = self.storage.names(f"{LEDGER}/{self.name}/{NEXT}")
        return {int(name[:-5]) for name in names if name[:-5].isdigit() and name[-5:] == ".json"}

    def read_next(self, shard: int, final: SplitRecord) -> ShardRecord:
        """The record of a shard that waits.

        Raises:
            CorruptStoreError: it is damaged, or of another split.
        """
        key = self._next_key(shard)
        record = self._parse(ShardRecord, key, self.storage.read(key))
        if record.shard != shard or not final.owns(record):
            raise CorruptStoreError(f"{self.storage}/{key} is of another split")
        return record

    def commit_next(self, record: ShardRecord) -> None:
        """Commit the record of a shard that waits, whose files are durable."""
        key = self._next_key(record.shard)
        self._commit(key, record, self.storage.version(key))

    def remove_beside(self) -> None:
        """Remove what only a growing split has."""
        for name in (ROWS, NEXT):
            self.storage.remove(f"{LEDGER}/{self.name}/{name}")

    def _next_key(self, shard: int) -> str:
        return f"{LEDGER}/{self.name}/{NEXT}/{shard:05d}.json"

    def record_key(self, shard: int) -> str:
        """Key of the record of a shard."""
        return self._shard_key(shard)

    def rows_key(self, shard: int) -> str:
        """Key of the file of what lies beside the hidden states of a shard."""
        return f"{LEDGER}/{self.name}/rows/{shard:05d}.safetensors"
