"""The ledger: small records that say what is committed. What it does not name does not exist.

A shard's files are whole and durable before its record is written; the record itself appears whole
or not at all. So at every moment, after a kill or a power loss, each record that can be read tells
of data that is there.

What a store holds: the names and records of its splits, as the ledger tells them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bertvision.errors import (
    CorruptStoreError,
    FormatVersionError,
    IncompleteSplitError,
    InputError,
    StoreNotFoundError,
    UnknownNameError,
    counted,
    did_you_mean,
)
from bertvision.featurestore.format.logits import TOP_LOGITS
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.format.records import (
    FEATURES,
    FORMAT,
    GROWING,
    MOVES,
    ROOT,
    SHUFFLED,
    Header,
    ShardRecord,
    SplitRecord,
)
from bertvision.featurestore.storage.durable import SEAL, is_sealed, sealed
from bertvision.featurestore.storage.storage import ABSENT, ChangedError, Storage
from bertvision.featurestore.storage.zipped import ZipStorage

LEDGER = "ledger"
_KNOWN = FEATURES | {GROWING, MOVES, SHUFFLED, TOP_LOGITS}
_SHARD = re.compile(r"(\d{5}|[1-9]\d{5,8})\.json", re.ASCII)
_PART = re.compile(r"\.part-\d+\.lock", re.ASCII)
_Record = TypeVar("_Record", bound=BaseModel)


class _Begun(Header):
    """Fields of a record whose split may be growing."""

    final: Any = None


class Ledger:
    """The records of one split, in ``<store>/ledger/<tag>/<split>/``."""

    def __init__(self, storage: Storage, tag: str, split: str) -> None:
        self.storage = storage
        self.tag = tag
        self.split = split
        self.name = f"{tag}/{split}"
        self._key = f"{LEDGER}/{tag}/{split}"

    @property
    def exists(self) -> bool:
        """Whether the split was created (its plan committed)."""
        return self.storage.size(f"{self._key}/split.json") is not None

    @property
    def is_growing(self) -> bool:
        """Whether examples are still added to the split: it has neither plan nor table yet."""
        with suppress(FileNotFoundError, CorruptStoreError):
            key = f"{self._key}/split.json"
            begun = self._parse(_Begun, key, self.storage.read(key))
            return GROWING in begun.requires and begun.final is None
        return False

    def remedy(self, usual: str) -> str:
        """Remedy of a split that is not finished, as a part of a message.

        Args:
            usual: Remedy in a store that can be written to.
        """
        if self.storage.read_only is None:
            return usual
        return (
            "this store can only be read, so finish the split in the one that it was made of, and "
            "zip or copy that again"
        )

    def read_split(self) -> SplitRecord:
        """The split's record.

        Raises:
            StoreNotFoundError: the split does not exist.
            IncompleteSplitError: examples are still added to it, and it has no plan yet.
            FormatVersionError: it was written in a newer format.
            CorruptStoreError: the record does not parse or tells of another split, or it is
                missing although shards are recorded.
        """
        key = f"{self._key}/split.json"
        try:
            text = self.storage.read(key)
        except FileNotFoundError:
            if self.shards():
                raise CorruptStoreError(
                    f"{self.storage}/{key} is missing, but shards are recorded; "
                    f"`bertvision store repair {self.name}` restores it"
                ) from None
            raise StoreNotFoundError(f"there is no split {self.name} in {self.storage}") from None
        version = re.search(rb'"format"\s*:\s*"(\d+)\.\d+"', text)
        foreign = version and version[1] != FORMAT.split(".")[0].encode()
        if version and foreign and (is_sealed(text) or SEAL not in text):
            raise FormatVersionError(
                f"{self.storage}/{key} is of store format {version[1].decode()}; this bertvision "
                f"reads format {FORMAT.split('.')[0]}: install a newer one"
            )
        # first: the rest may be different by what it requires
        requires = set(self._parse(Header, key, text).requires)
        if unknown := sorted(requires - _KNOWN):
            raise FormatVersionError(
                f"{self.storage}/{key} needs {', '.join(unknown)}, which this bertvision does not "
                "know: install a newer one"
            )
        if GROWING in requires:
            remedy = self.remedy(
                "`store.writer(...)` with the same arguments resumes it, and its `finish()` makes "
                "it readable"
            )
            raise IncompleteSplitError(
                f"{self.name} in {self.storage} is still being written, "
                f"{counted(len(self.shards()), 'shard')} so far: {remedy}"
            )
        record = self._parse(SplitRecord, key, text)
        if (record.tag, record.split) != (self.tag, self.split):
            raise CorruptStoreError(
                f"{self.storage}/{key} is the record of {record.tag}/{record.split}, "
                f"not of {self.name}"
            )
        return record

    def commit_split(self, record: SplitRecord, instead_of: str = ABSENT) -> None:
        """Commit the split's record: from now on the split exists.

        Args:
            record: Record of the split.
            instead_of: the version of the record that is there.

        Raises:
            ChangedError: another process committed another one meanwhile.
        """
        self._commit(f"{self._key}/split.json", record, instead_of)

    def restore_split(self) -> None:
        """Write a damaged record again from the copy in the split's Zarr group.

        Raises:
            CorruptStoreError: the copy is missing or damaged too.
        """
        key = f"{ROOT}/{self.tag}/{self.split}/zarr.json"
        damaged = self.storage.version(f"{self._key}/split.json")
        try:
            copy = json.loads(self.storage.read(key))["attributes"]["bertvision"]
            record = SplitRecord.model_validate_json(json.dumps(copy))
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            raise CorruptStoreError(
                f"the record of {self.name} in {self.storage} is damaged, and its copy in {key} "
                f"too: remove {self._key} and extract the split again"
            ) from None
        if (record.tag, record.split) != (self.tag, self.split):
            raise CorruptStoreError(f"{self.storage}/{key} is the record of another split")
        self.commit_split(record, damaged)

    def shards(self) -> set[int]:
        """Numbers of the committed shards."""
        names = self.storage.names(self._key)
        return {int(m[1]) for m in map(_SHARD.fullmatch, names) if m}

    def find_shard(self, shard: int, split: SplitRecord) -> ShardRecord | None:
        """The record of a shard, or None where it is not committed.

        Args:
            shard: its number.
            split: the split's record, which the shard must belong to.

        Raises:
            CorruptStoreError: the record does not parse, or tells of another shard or split.
        """
        record = self._read_shard(shard)
        if record is not None and not split.owns(record):
            raise CorruptStoreError(
                f"{self.storage}/{self._shard_key(shard)} belongs to another extraction of "
                f"{self.name}, as when files of two stores were mixed by a merge or a restore; "
                f"`bertvision store repair {self.name}` extracts the shard again"
            )
        return record

    def _read_shard(self, shard: int) -> ShardRecord | None:
        key = self._shard_key(shard)
        try:
            text = self.storage.read(key)
        except FileNotFoundError:
            return None
        record = self._parse(ShardRecord, key, text)
        if record.shard != shard:
            raise CorruptStoreError(
                f"{self.storage}/{key} is the record of shard {record.shard}, not of {shard}"
            )
        return record

    def shard_version(self, shard: int) -> str:
        """The version of a shard's record; `ABSENT` where there is none."""
        return self.storage.version(self._shard_key(shard))

    def commit_shard(self, record: ShardRecord, instead_of: str) -> None:
        """Commit a shard whose files are already durable.

        Args:
            record: Record of the shard.
            instead_of: the version of the record that is there.

        Raises:
            ChangedError: another process committed another one meanwhile.
        """
        self._commit(self._shard_key(record.shard), record, instead_of)

    def _commit(self, key: str, record: BaseModel, instead_of: str) -> None:
        text = _dump(record)
        try:
            self.storage.write(key, text, instead_of)
        except ChangedError as error:
            there = None
            with suppress(FileNotFoundError):
                there = self.storage.read(key)
            if there != text:  # else the answer to the first try was lost
                raise error from None

    def retract_shard(self, shard: int) -> None:
        """Take a shard's record back: it counts as not written, and will be written again."""
        self.storage.remove(self._shard_key(shard))

    def retract_split(self) -> None:
        """Take the split's record back, after those of its shards: then the split is gone."""
        self.storage.remove(f"{self._key}/split.json")

    def stored_bytes(self) -> int:
        """Bytes of the committed shards; of a record that is damaged nothing is counted."""
        total = 0
        for shard in self.shards():
            with suppress(CorruptStoreError):
                record = self._read_shard(shard)
                total += sum(file.bytes for file in record.files.values()) if record else 0
        return total

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the split for writing, alone.

        Raises:
            LockedError: another process holds it, or one of its parts.
        """
        with ExitStack() as locks:
            locks.enter_context(self.storage.lock(f"{self._key}/.lock", f"writing {self.name}"))
            for name in sorted(filter(_PART.fullmatch, self.storage.names(self._key))):
                what = f"adding examples to {self.name}"
                locks.enter_context(self.storage.lock(f"{self._key}/{name}", what))
            yield

    @contextmanager
    def lock_part(self, part: int) -> Iterator[None]:
        """Hold a part of the split for adding examples, beside others that hold other parts.

        Raises:
            LockedError: another process holds the part, or all of the split.
        """
        what = f"adding examples to part {part} of {self.name}"
        with ExitStack() as locks:
            with self.commit_lock(), self.storage.lock(f"{self._key}/.lock", what):
                locks.enter_context(self.storage.lock(f"{self._key}/.part-{part}.lock", what))
            yield

    def commit_lock(self) -> AbstractContextManager[None]:
        """Hold what the parts of a split write one after another; waits for it."""
        return self.storage.lock(f"{self._key}/.commit.lock", f"writing {self.name}", wait=True)

    def sweep(self) -> None:
        """Remove what killed writers left in the ledger."""
        self.storage.sweep(self._key)

    def _shard_key(self, shard: int) -> str:
        return f"{self._key}/{shard:05d}.json"

    def _parse(self, kind: type[_Record], key: str, text: bytes) -> _Record:
        if not is_sealed(text):
            raise CorruptStoreError(
                f"{self.storage}/{key} is damaged: it does not pass its own checksum"
            )
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise CorruptStoreError(
                f"{self.storage}/{key} is damaged: {where}: {first['msg']}"
            ) from None


def _dump(record: BaseModel) -> bytes:
    return sealed(record.model_dump_json(indent=1).encode())


def require_store(storage: Storage) -> Storage:
    """The storage itself, if a store is there.

    Raises:
        StoreNotFoundError: there is none.
    """
    names = storage.names("")
    if LEDGER not in names:
        if isinstance(storage, ZipStorage):
            there = (
                f"holds {', '.join(sorted(names)[:4])}" if names else "is not there, or is empty"
            )
            raise StoreNotFoundError(
                f"there is no activation store in the zip {storage}, which {there}: correct the "
                "path, or zip a store from the folder that it is in, such as `zip -0 -r "
                "activations.zip activations`"
            )
        hint = "`bertvision extract` writes one, and `bertvision status` says where"
        if "activations" in names:
            hint = f"open the one in {storage}/activations"
        elif names:
            hint = f"it holds {', '.join(sorted(names)[:4])}; {hint}"
        raise StoreNotFoundError(f"there is no activation store at {storage}: {hint}")
    return storage


def require_tag(storage: Storage, tag: SnapshotTag) -> None:
    """Make sure that a snapshot has a split.

    Raises:
        UnknownNameError: it has none.
    """
    if next(splits_of(storage, tag), None) is None:
        tags = ", ".join(sorted({tag for tag, _ in split_names(storage)}, key=SnapshotTag))
        raise UnknownNameError(
            f"no activations of {tag} in {storage}: it holds {tags or 'nothing yet'}; "
            f"`bertvision extract --checkpoint {tag}` writes them, or says what makes {tag}"
        )


def require_split(storage: Storage, tag: SnapshotTag, split: str) -> None:
    """Make sure that a split was created.

    Raises:
        UnknownNameError: it was not.
    """
    ledger = Ledger(storage, tag, check_name(split, "split"))
    if not (ledger.exists or ledger.shards()):  # all of them are listed for the message alone
        names = list(splits_of(storage, tag))
        raise UnknownNameError(
            f"no split {split!r} of {tag} in {storage}: "
            f"{did_you_mean(split, names)}it holds {', '.join(names)}; "
            "`bertvision status` says what can be extracted"
        )


def split_names(storage: Storage) -> list[tuple[str, str]]:
    """(tag, split) of every split that was created, tags ordered as numbers.

    Folders of other names are not looked at. A split whose record was lost is named as long as
    shards of it are recorded.
    """
    tags = sorted(map(SnapshotTag, filter(SnapshotTag.is_valid, storage.names(LEDGER))))
    return [(tag, split) for tag in tags for split in splits_of(storage, tag)]


def splits_of(storage: Storage, tag: str) -> Iterator[str]:
    """Names of the splits of one snapshot that were created, complete or not."""
    for split in sorted(filter(_is_name, storage.names(f"{LEDGER}/{tag}"))):
        ledger = Ledger(storage, tag, split)
        if ledger.exists or ledger.shards():
            yield split


def split_records(storage: Storage) -> list[SplitRecord]:
    """The records of all splits that can be read; damaged and growing ones are left out."""
    records = []
    for tag, split in split_names(storage):
        try:
            records.append(Ledger(storage, tag, split).read_split())
        except (CorruptStoreError, FormatVersionError, IncompleteSplitError):
            continue  # whoever opens that split is told
    return records


def _is_name(text: str) -> bool:
    try:
        check_name(text, "split")
    except InputError:
        return False
    return True
