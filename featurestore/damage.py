"""Verify a split: read every committed byte again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bertvision.errors import CorruptStoreError, counted
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.examples import check_bytes
from bertvision.featurestore.format.ledger import split_names, split_records
from bertvision.featurestore.format.records import ROOT
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.format.shardfile import file_digest
from bertvision.featurestore.reader import SplitReader


class Damage(NamedTuple):
    """One thing that is wrong with a split.

    Attributes:
        what: is wrong, naming shard or file.
        shard: Number of the shard, or None where the damage is beside the shards.
    """

    what: str
    shard: int | None = None


def find_damage(split: SplitReader) -> list[Damage]:
    """Read every committed byte of a split again and compare it with the ledger.

    Returns:
        What is wrong; empty when all is well.
    """
    return [*_beside_the_shards(split), *_in_the_shards(split)]


def _beside_the_shards(split: SplitReader) -> Iterator[Damage]:
    group = arrays.group_key(split.record)
    expected = {f"{group}/{k}": v for k, v in arrays.split_metadata(split.record).items()}
    records = split_records(split.storage)
    if len(records) == len(split_names(split.storage)):
        # or what stands there of a split with a damaged record would be held against this one
        for key, content in arrays.root_files(records).items():
            if key in ("zarr.json", f"{split.tag}/zarr.json"):
                expected[f"{ROOT}/{key}"] = content
    for key, content in expected.items():
        try:
            if not arrays.same_metadata(split.storage.read(key), content):
                yield Damage(f"{split.name} {key}: differs from what the ledger describes")
        except (OSError, CorruptStoreError) as error:
            yield Damage(f"{split.name} {key}: {_reason(error)}")
    for name in split.record.arrays:
        try:
            split.array(name)
        except CorruptStoreError as error:
            yield Damage(str(error))
    try:
        split.table()
        check_bytes(split.storage, split.split)
    except CorruptStoreError as error:
        yield Damage(str(error))


def _in_the_shards(split: SplitReader) -> Iterator[Damage]:
    try:
        readable = bool(len(split.plan))
    except CorruptStoreError:
        readable = False  # said beside the shards; their files can still be compared
    for shard in sorted(split.ledger.shards()):
        try:
            _check_shard(split, shard, readable)
        except CorruptStoreError as error:
            what = str(error)
            where = f"{split.name} shard {shard}"
            yield Damage(what if what.startswith(where) else f"{where}: {what}", shard)


def _check_shard(split: SplitReader, shard: int, readable: bool) -> None:
    if shard >= split.record.shards:
        raise CorruptStoreError(f"the plan has only {counted(split.record.shards, 'shard')}")
    record = split.ledger.find_shard(shard, split.record)
    for name, file in record.files.items() if record else ():
        try:
            opened = split.storage.open(shard_key(split.record, name, shard))
            if opened.size != file.bytes:
                opened.close()
                raise CorruptStoreError(f"has {opened.size} bytes, the ledger says {file.bytes}")
            digest = file_digest(opened)
        except (OSError, EOFError, CorruptStoreError) as error:
            raise CorruptStoreError(f"{name} {_reason(error)}") from None
        if digest != file.xxh3_128:
            raise CorruptStoreError(f"{name} was changed on the disk")
    if not readable:
        return
    # the record too: its checksums are what every read is compared with
    reader = split.open_shard(shard, any_order=True)
    examples = split.plan.examples_of(shard)
    if split.encoding.transformed:  # one layer alone takes all below it
        layers = range(len(split.record.layers))
        for i, example in enumerate(examples):
            codes, _ = split.buffers(int(split.plan.n_tokens[example]), len(layers))
            reader.read(i, i + 1, layers, codes, None)
        return
    codes, scale = split.buffers(reader.tokens, 1)
    for position in range(len(split.record.layers)):
        reader.read(0, len(examples), [position], codes, scale)


def _reason(error: Exception) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else str(error)
