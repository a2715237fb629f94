"""Finish a growing split: its plan and arrays are put together, its shards bound to its record.

What comes out is a split as extraction writes it, which every reader of the format knows. A finish
that is killed is ended by the next one: as soon as the split's record is known it stands in the
growing one, and from then on everything else follows from it.

Finish a growing split in another order, or in smaller shards: its examples move to a new plan.

Stored codes are copied, nothing is encoded again. All new shards are written beside the old ones
first, then each takes its place; so a kill at any moment loses nothing, and the next finish goes
on. Until then the split takes twice its space.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from bertvision.errors import (
    CorruptStoreError,
    DiskSpaceError,
    IncompleteSplitError,
    InputError,
    counted,
)
from bertvision.featurestore.creation import (
    SplitContents,
    SplitSpec,
    Values,
    described,
    more_dims,
    store_lock,
    write_beside,
    write_root,
)
from bertvision.featurestore.delegation import ShardAttempt
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.arrays import group_key, read_array
from bertvision.featurestore.format.examples import examples_digest, read_examples
from bertvision.featurestore.format.layout import PLAN_ARRAYS, get_encoding
from bertvision.featurestore.format.logits import OUTPUTS
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import FORMAT, MOVES, SplitRecord
from bertvision.featurestore.format.shard import ShardReader, check_record_size, shard_key
from bertvision.featurestore.writing.buffer import ShardContent
from bertvision.featurestore.writing.columns import read_column
from bertvision.featurestore.writing.committed import Versions, find_changed, read_shards
from bertvision.featurestore.writing.growing import GrowingLedger, GrowingRecord, GrowingShard

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
        for name in ("hidden_states", "scale", *OUTPUTS):
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
            sources: Sources of each of its examples, the old shard and the place there.
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
        logits = final.top.empty(ends[-1]) if final.top else None
        for (number, i), n, end in zip(sources, lengths, ends, strict=True):
            part = slice(end - n, end)
            of_part = None if scale is None else scale[part]
            self._reader(number).read(i, i + 1, positions, codes[:, part], of_part)
            if logits is not None:
                self._reader(number).read_logits(i, i + 1, logits.map(itemgetter(part)))
        return ShardContent(
            final,
            shard,
            lengths,
            torch.from_numpy(codes).transpose(0, 1),
            None if scale is None else torch.from_numpy(scale),
            nonfinite,
            logits=logits,
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


_MOST_FILL = 0.1
"""Share of a split that may be fill, before its examples move to fewer or smaller shards."""
_MOST_MOVED = 10
"""Shards of a split whose examples move: the last shard of more is less than a tenth of the split,
and to write a large split again costs more than its fill."""


def finish(ledger: GrowingLedger, seed: int | None = None, own: Versions | None = None) -> None:
    """Make a growing split a complete one; one that is complete stays as it is.

    Args:
        ledger: Ledger of the split.
        seed: Seed of another order; None keeps that in which shards were committed. Where a finish
            was begun, its own stays.
        own: `Committed.own` of the caller. Shards that others committed, which is also to
            say this process before it was killed, are read again as a whole.

    Raises:
        InputError: there is no example in it, or the format cannot hold what was given beside them.
        IncompleteSplitError: a shard in the middle is missing.
        CorruptStoreError: a shard is damaged.
        ProvenanceError: another snapshot has the split with other examples.
        LockedError: another process is adding examples.
    """
    with ledger.lock():
        growing = ledger.state()
        if isinstance(growing, GrowingRecord):
            ledger.sweep()
            if growing.final is None:
                growing = _with_final(ledger, growing, seed, own or {})
            _bind(ledger, growing)
        # of a finish too that was killed when all else was done
        ledger.remove_beside()
        with store_lock(ledger.storage):
            write_root(ledger.storage)


def _bind(ledger: GrowingLedger, growing: GrowingRecord) -> None:
    """Bind the shards to the final record and commit it; the caller holds the lock."""
    final = growing.final
    assert final is not None
    if growing.moves or final.permutation_seed is not None:
        rearrange(ledger, growing, final)
    for shard in sorted(ledger.shards()):
        if record := ledger.read_growing(shard, growing):
            ledger.commit_shard(record.plain(final), ledger.shard_version(shard))
    if strange := ledger.shards().symmetric_difference(range(final.shards)):
        raise CorruptStoreError(
            f"{ledger.name}: shard {min(strange)} came or went while the split was finished: look "
            f"for what else writes to {ledger.storage}; `store.remove` removes the split"
        )
    ledger.commit_growing(final)


def _with_final(
    ledger: GrowingLedger, growing: GrowingRecord, seed: int | None, own: Versions
) -> GrowingRecord:
    """Write everything beside the shards, and the record that comes of it into the growing one."""
    if growing.parts:
        others = counted(len(growing.parts), "part")
        raise InputError(
            f"{others} of {ledger.name} began and did not end, part {growing.parts[0]} first: run "
            f"it again, or where it has nothing to add, close `store.writer(…, part="
            f"{growing.parts[0]})` again"
        )
    shards = _whole_shards(ledger, growing, own)
    keys = pa.array([key for record in shards for key in record.keys], pa.string())
    order = pc.sort_indices(keys)
    table = pa.table({"id": keys.take(order)})
    if len(pc.unique(keys)) < len(keys):
        raise CorruptStoreError(f"{ledger.name}: two of its shards hold the same example")
    rows = order.to_numpy().astype(np.int64)
    plan = as_filled = _plan(shards, rows, growing.shard_tokens)
    if seed is not None:
        lengths = np.empty(len(plan), np.int64)
        lengths[plan.example_id] = plan.n_tokens
        plan = ShardPlan.fitted(lengths, shard_tokens=growing.shard_tokens, seed=seed)
        check_record_size(plan, len(growing.layers))
    elif plan.fill > _MOST_FILL:
        tight = ShardPlan.fitted(plan.n_tokens, shard_tokens=growing.shard_tokens)
        smaller = tight.n_shards * tight.shard_tokens < plan.n_shards * plan.shard_tokens
        few = tight.n_shards <= _MOST_MOVED
        if smaller and few and _has_room(ledger, shards, tight, len(growing.layers)):
            plan = replace(tight, example_id=plan.example_id)
    spec = SplitSpec(
        tag=growing.tag,
        split=growing.split,
        encoding=growing.encoding,
        layers=growing.layers,
        hidden_size=growing.hidden_size,
        provenance=growing.provenance,
        compression=growing.compression,
    )
    fields = described(spec, SplitContents(plan, {}, {}, table))
    fields["examples_sha256"] = examples_digest(table, FORMAT)
    values = _values(ledger, growing, shards, plan, rows)
    with store_lock(ledger.storage):
        final = write_beside(ledger, fields, values, table)
        moves = plan is not as_filled
        # a version that does not know of it would bind the shards as they lie to the new plan
        requires = tuple(sorted({*growing.requires, *([MOVES] if moves else [])}))
        update = {"final": final, "moves": moves, "requires": requires}
        finishing = growing.model_copy(update=update)
        ledger.commit_growing(finishing)
    return finishing


def _has_room(
    ledger: GrowingLedger, shards: Sequence[GrowingShard], tight: ShardPlan, layers: int
) -> bool:
    """Whether shards can be written beside those that are there, and their records be read."""
    try:
        check_record_size(tight, layers)
    except InputError:
        return False
    stored = sum(file.bytes for record in shards for file in record.files.values())
    free = ledger.storage.free_bytes()
    return free is None or free > stored


def _whole_shards(
    ledger: GrowingLedger, growing: GrowingRecord, own: Versions
) -> list[GrowingShard]:
    """The records of all shards, whose files are whole: once finished, none could be replaced."""
    numbers = sorted(ledger.shards())
    if not numbers:
        raise InputError(f"{ledger.name} has no example yet: add some before it is finished")
    if numbers != list(range(len(numbers))):
        missing = min(set(range(numbers[-1])) - set(numbers))
        raise IncompleteSplitError(
            f"{ledger.name} lacks shard {missing}, which was removed: add its examples again, "
            "those that `key in writer` does not know"
        )
    shards = list(read_shards(ledger, growing, numbers))
    for record in shards:
        if damage := find_changed(ledger, growing, record, own.get(record.shard)):
            raise CorruptStoreError(
                f"{damage[0]}: remove {ledger.storage}/{ledger.record_key(record.shard)} and add "
                "the shard's examples again, those that `key in writer` does not know then"
            )
    return shards


def _plan(shards: Sequence[GrowingShard], order: npt.NDArray[Any], shard_tokens: int) -> ShardPlan:
    """The plan that the shards were filled by; rows of the examples' table are in key order."""
    examples = [record.examples for record in shards]
    n = np.array([length for record in shards for length in record.lengths], np.int64)
    shard = np.repeat(np.arange(len(shards)), examples)
    first = np.cumsum(n) - n
    starts = np.repeat(first[np.cumsum([0, *examples[:-1]])], examples)
    rank = np.empty(len(n), np.int64)
    rank[order] = np.arange(len(n))
    plan = ShardPlan(
        example_id=rank,
        n_tokens=n.astype(np.int32),
        first_token=shard * shard_tokens + first - starts,
        shard=shard.astype(np.int32),
        shard_tokens=shard_tokens,
        seed=None,
    )
    plan.check()
    return plan


def _values(
    ledger: GrowingLedger,
    growing: GrowingRecord,
    shards: Sequence[GrowingShard],
    plan: ShardPlan,
    order: npt.NDArray[np.int64],
) -> Values:
    """Maker and dimensions of each array beside the hidden states."""
    entries: Values = {name: (partial(getattr, plan, name), ("example",)) for name in PLAN_ARRAYS}
    group = arrays.group_key(growing)
    for name, record in growing.arrays.items():
        entries[name] = (
            partial(arrays.read_array, ledger.storage, group, name, record),
            record.dims,
        )
    # of each stored example, the place in the order in which they were committed
    placing = replace(plan, example_id=order[plan.example_id])

    def gathered(name: str, per: str) -> npt.NDArray[Any]:
        values = np.concatenate([read_column(ledger, record, name) for record in shards])
        return placing.place(values, 0) if per == "token" else values[placing.example_id]

    for name, column in shards[0].columns.items():
        dims = (column.per, *more_dims(name, np.empty((1, *column.shape), np.uint8)))
        entries[name] = partial(gathered, name, column.per), dims
    return entries
