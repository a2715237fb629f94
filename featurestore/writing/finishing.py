"""Finish a growing split: its plan and arrays are put together, its shards bound to its record.

What comes out is a split as extraction writes it, which every reader of the format knows. A finish
that is killed is ended by the next one: as soon as the split's record is known it stands in the
growing one, and from then on everything else follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bertvision.errors import CorruptStoreError, IncompleteSplitError, InputError, counted
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
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.examples import examples_digest
from bertvision.featurestore.format.layout import PLAN_ARRAYS
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import FORMAT, MOVES
from bertvision.featurestore.format.shard import check_record_size
from bertvision.featurestore.writing.columns import read_column
from bertvision.featurestore.writing.committed import Versions, find_changed, read_shards
from bertvision.featurestore.writing.growing import GrowingLedger, GrowingRecord, GrowingShard
from bertvision.featurestore.writing.permuting import rearrange

_MOST_FILL = 0.1
"""Share of a split that may be fill, before its examples move to fewer or smaller shards."""
_MOST_MOVED = 10
"""Shards of a split whose examples move: the last shard of more is less than a tenth of the split,
and to write a large split again costs more than its fill."""


def finish(ledger: GrowingLedger, seed: int | None = None, own: Versions | None = None) -> None:
    """Make a growing split a complete one; one that is complete stays as it is.

    Args:
        ledger: of the split.
        seed: of another order; None keeps that in which shards were committed. Where a finish was
            begun, its own stays.
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
    """What makes each array beside the hidden states, and its dimensions."""
    found: Values = {name: (partial(getattr, plan, name), ("example",)) for name in PLAN_ARRAYS}
    group = arrays.group_key(growing)
    for name, record in growing.arrays.items():
        found[name] = partial(arrays.read_array, ledger.storage, group, name, record), record.dims
    # of each stored example, the place in the order in which they were committed
    placing = replace(plan, example_id=order[plan.example_id])

    def gathered(name: str, per: str) -> npt.NDArray[Any]:
        values = np.concatenate([read_column(ledger, record, name) for record in shards])
        return placing.place(values, 0) if per == "token" else values[placing.example_id]

    for name, column in shards[0].columns.items():
        dims = (column.per, *more_dims(name, np.empty((1, *column.shape), np.uint8)))
        found[name] = partial(gathered, name, column.per), dims
    return found
