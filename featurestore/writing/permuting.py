"""Finish a growing split in another order, or in smaller shards: its examples move to a new plan.

Stored codes are copied, nothing is encoded again. All new shards are written beside the old ones
first, then each takes its place; so a kill at any moment loses nothing, and the next finish goes
on. Until then the split takes twice its space.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch

from bertvision.errors import DiskSpaceError
from bertvision.featurestore.delegation import ShardAttempt
from bertvision.featurestore.format.arrays import group_key, read_array
from bertvision.featurestore.format.examples import read_examples
from bertvision.featurestore.format.layout import PLAN_ARRAYS, get_encoding
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import SplitRecord
from bertvision.featurestore.format.shard import ShardReader, shard_key
from bertvision.featurestore.writing.committed import read_shards
from bertvision.featurestore.writing.growing import GrowingLedger, GrowingRecord, GrowingShard
from bertvision.featurestore.writing.shards import ShardContent

_OPEN_SHARDS = 64


def rearrange(ledger: GrowingLedger, growing: GrowingRecord, final: SplitRecord) -> None:
    """Bring the shards into the order of the final record's plan, and bind them to it.

    The caller holds the split. What was done before it was killed is not done again.

    Raises:
        DiskSpaceError: the disk has no room for the shards once more.
        CorruptStoreError: a shard is damaged.
    """
    if missing := set(range(final.shards)) - ledger.next_shards():
        _write_beside(ledger, growing, final, missing)
    for shard in range(final.shards):
        record = ledger.read_next(shard, final)
        for name in record.files:
            staged = _beside(shard_key(final, name, shard))
            if ledger.storage.size(staged) is not None:  # else it is in its place already
                ledger.storage.move(staged, shard_key(final, name, shard))
        ledger.commit_shard(record, ledger.shard_version(shard))
    for shard in sorted(ledger.shards().difference(range(final.shards))):
        ledger.retract_shard(shard)
        for name in ("hidden_states", "scale"):
            ledger.storage.remove(f"{group_key(final)}/{name}/c/{shard}")


def _write_beside(
    ledger: GrowingLedger, growing: GrowingRecord, final: SplitRecord, missing: set[int]
) -> None:
    """Write new shards beside the old ones, each with its record."""
    storage, group = ledger.storage, group_key(final)
    old = {record.shard: record for record in read_shards(ledger, growing, ledger.shards())}
    stored = sum(file.bytes for record in old.values() for file in record.files.values())
    free = storage.free_bytes()
    capacity = len(old) * growing.shard_tokens
    needed = stored * len(missing) * final.shard_tokens // capacity
    if free is not None and free < needed:
        raise DiskSpaceError(
            f"the examples of {ledger.name} cannot be moved to other shards: that takes "
            f"{needed:,} bytes for a while, and {storage} has room for {free:,}; free some space "
            "and finish it again"
        )
    plan = ShardPlan(
        **{name: read_array(storage, group, name, final.arrays[name]) for name in PLAN_ARRAYS},
        shard_tokens=final.shard_tokens,
        seed=final.permutation_seed,
    )
    table = read_examples(storage, final.split, final.examples_sha256, final.format)
    keys = table["id"].to_pylist()
    places = {key: (shard, i) for shard, record in old.items() for i, key in enumerate(record.keys)}
    as_filled = final.model_copy(update={"shard_tokens": growing.shard_tokens})
    readers = _Readers(ledger, final, as_filled, old)
    # which were replaced is counted by shard, not by example
    replaced = sum(record.nonfinite for record in old.values())
    for shard in sorted(missing):
        sources = [places[keys[plan.example_id[i]]] for i in plan.examples_of(shard)]
        content = readers.gather(shard, sources, replaced if shard == 0 else 0)
        pieces = content.files()
        beside = {name: _beside(shard_key(final, name, shard)) for name in pieces}
        written = ShardAttempt(ledger, shard, beside, yields=False)
        for name, chunks in pieces.items():
            written.write(name, chunks)
        ledger.commit_next(content.record(final.identity, written.files))
    readers.close()


class _Readers:
    """The old shards, of which a few are open at a time."""

    def __init__(
        self,
        ledger: GrowingLedger,
        final: SplitRecord,
        as_filled: SplitRecord,
        old: Mapping[int, GrowingShard],
    ) -> None:
        self._storage, self._final, self._as_filled = ledger.storage, final, as_filled
        self._old = old
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    def gather(self, shard: int, sources: list[tuple[int, int]], nonfinite: int) -> ShardContent:
        """The content of a new shard.

        Args:
            shard: its number.
            sources: of each of its examples, the old shard and the place there.
            nonfinite: values replaced, to be recorded of it.
        """
        final, encoding = self._final, get_encoding(self._final.encoding)
        lengths = [self._old[number].lengths[i] for number, i in sources]
        ends = np.cumsum(lengths).tolist()
        positions = range(len(final.layers))
        width = encoding.codes_size(final.hidden_size)
        codes = np.empty((len(final.layers), ends[-1], width), encoding.zarr_dtype)
        scale = None
        if encoding.quantised:
            row = (len(final.layers), *encoding.scale_shape(final.hidden_size))
            scale = np.empty((ends[-1], *row), encoding.scale_dtype)
        for (number, i), n, end in zip(sources, lengths, ends, strict=True):
            part = slice(end - n, end)
            of_part = None if scale is None else scale[part]
            self._reader(number).read(i, i + 1, positions, codes[:, part], of_part)
        return ShardContent(
            final,
            shard,
            lengths,
            torch.from_numpy(codes).transpose(0, 1),
            None if scale is None else torch.from_numpy(scale),
            nonfinite,
        )

    def close(self) -> None:
        """Close those that are open."""
        while self._open:
            self._open.popitem()[1].close()

    def _reader(self, number: int) -> ShardReader:
        reader = self._open.pop(number, None)
        if reader is None:
            record = self._old[number]
            plain = record.plain(self._as_filled)
            lengths = np.array(record.lengths)
            reader = ShardReader(self._storage, self._as_filled, plain, lengths)
        self._open[number] = reader
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return reader


def _beside(key: str) -> str:
    """Where a file waits until it takes its place."""
    folder, _, name = key.rpartition("/")
    return f"{folder}/.{name}.next"
