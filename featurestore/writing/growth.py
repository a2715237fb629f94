"""Begin a growing split, and commit what fills a shard of it, beside other processes.

Remove a split, so that a kill at any moment leaves nothing false.
"""

from __future__ import annotations

import torch

from bertvision.errors import InputError, LockedError
from bertvision.featurestore.creation import Values, store_lock, write_arrays, write_root
from bertvision.featurestore.delegation import ShardAttempt
from bertvision.featurestore.format.arrays import group_key, read_array
from bertvision.featurestore.format.calibration import Calibration
from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.format.examples import read_examples, remove_examples
from bertvision.featurestore.format.ledger import Ledger, split_names
from bertvision.featurestore.format.logits import OUTPUTS
from bertvision.featurestore.format.records import ROOT, SplitRecord
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.writing.buffer import ShardBuffer
from bertvision.featurestore.writing.columns import write_rows
from bertvision.featurestore.writing.committed import Committed
from bertvision.featurestore.writing.growing import (
    ROWS,
    GrowingLedger,
    GrowingRecord,
    GrowingShard,
)
from bertvision.featurestore.writing.origin import check_layout


def begin(
    ledger: GrowingLedger, wanted: GrowingRecord, stats: ChannelStats | None, part: int
) -> GrowingRecord | SplitRecord:
    """Create a growing split, or find the one that is to be resumed.

    The caller holds a part of the split and what its parts write one after another.

    Args:
        ledger: Ledger of the split.
        wanted: its record, where there is none yet.
        stats: channel statistics that were given, or None.
        part: Part that begins to add examples; it counts as begun until `close_part`.

    Returns:
        Its record; of a split that is complete, an ordinary one.

    Raises:
        ProvenanceError: it was begun from something else.
    """
    state = ledger.state()
    if state is None:
        ledger.storage.remove(group_key(wanted))  # what was left of one that is gone
        ledger.remove_beside()
        state = wanted.model_copy(update={"parts": (part,)})
        ledger.commit_growing(state)
    check_layout(ledger, state, wanted)
    if not isinstance(state, GrowingRecord):
        return state
    if (
        stats is not None
        and state.arrays
        and not all(map(torch.equal, stats, known_stats(ledger, state) or ()))
    ):
        raise InputError(
            f"{ledger.name} was begun with other channel statistics: leave them out to go on with "
            "those that it has"
        )
    if part not in state.parts:
        state = state.model_copy(update={"parts": tuple(sorted({*state.parts, part}))})
        ledger.commit_growing(state)
    if stats is not None and not state.arrays:
        state = _with_stats(ledger, state, Calibration(stats))
    return state


def close_part(ledger: GrowingLedger, begun: GrowingRecord, part: int) -> None:
    """Note that a part has stored all that was added to it, which `finish` asks of each.

    Args:
        ledger: Ledger of the split, the part of which the caller holds.
        begun: its record when the part was opened.
        part: its number.
    """
    with ledger.commit_lock():
        state = ledger.state()
        if isinstance(state, GrowingRecord) and state.writing == begun.writing:
            left = tuple(other for other in state.parts if other != part)
            ledger.commit_growing(state.model_copy(update={"parts": left}))


def commit(
    ledger: GrowingLedger,
    begun: GrowingRecord,
    committed: Committed,
    buffer: ShardBuffer,
    batch: object,
) -> None:
    """Write what a buffer holds as the next shard, durably, and commit it.

    Args:
        ledger: Ledger of the split, a part of which the caller holds.
        begun: its record when that part was opened.
        committed: Content of its shards; the new one is added.
        buffer: nothing is committed where it holds nothing, or what was committed already.
        batch: `ShardBuffer.batch` when this was asked for; where the buffer holds others by now,
            these are not committed.

    Raises:
        InputError: another process committed one of the examples, or other arrays.
        LockedError: the split was removed or finished meanwhile.
    """
    with ledger.commit_lock():
        growing = ledger.state()
        if not isinstance(growing, GrowingRecord) or growing.writing != begun.writing:
            raise LockedError(
                f"{ledger.name} in {ledger.storage} was removed or replaced while examples were "
                "added to it: those of the last shard were not stored"
            )
        # an interrupt may have had the same examples committed twice
        if buffer.batch is not batch or buffer.is_committed:
            return
        if (attempted := buffer.attempted) is not None:
            record = ledger.read_growing(attempted, growing)
            if record is not None and list(record.keys) == buffer.keys:
                committed.refresh()  # it took its place although that ended with an error
                buffer.mark_committed()
                return
        if buffer.waits:
            if not growing.arrays:
                growing = _with_stats(ledger, growing, buffer.calibrate())
            stats = known_stats(ledger, growing)
            assert stats is not None
            buffer.use(stats)
        columns = buffer.columns
        if columns is None:
            return
        committed.refresh()
        committed.check(buffer.keys, columns)
        shard = committed.next_shard()
        content = buffer.content(shard)
        pieces = content.files()
        keys = {name: shard_key(growing, name, shard) for name in pieces}
        written = ShardAttempt(ledger, shard, keys, yields=False)
        for name, chunks in pieces.items():
            written.write(name, chunks)
        rows = write_rows(ledger, shard, buffer.rows, columns)
        files = written.files | ({ROWS: rows} if rows else {})
        plain = content.record(growing.identity, files)
        record = GrowingShard(
            **{name: getattr(plain, name) for name in type(plain).model_fields},
            keys=tuple(buffer.keys),
            lengths=tuple(buffer.lengths),
            columns=dict(columns),
        )
        buffer.attempt(shard)
        written.commit(record)
        committed.add(record)
        buffer.mark_committed()
        versions = dict(written.versions)
        if rows:
            versions[ROWS] = ledger.storage.version(ledger.rows_key(shard))
        committed.own[shard] = versions


def keys_due(storage: Storage, tag: str, split: str) -> set[str] | None:
    """The keys that a split of this name has in another snapshot, and must have in this one.

    Returns:
        None where there is none yet.

    Raises:
        InputError: it was not written by keys.
        CorruptStoreError: its table is damaged.
    """
    for other, name in split_names(storage):
        ledger = Ledger(storage, other, split)
        if name != split or other == tag or GrowingLedger(storage, other, name).grows:
            continue
        record = ledger.read_split()
        table = read_examples(storage, split, record.examples_sha256, record.format)
        if table.column_names != ["id"]:
            raise InputError(
                f"the store has a split {split!r} of other examples, in {other}: a split has the "
                "same ones in every snapshot; choose another name"
            )
        return set(table["id"].to_pylist())
    return None


def known_stats(ledger: GrowingLedger, growing: GrowingRecord) -> ChannelStats | None:
    """The channel statistics of a split; None where there are none, or not yet."""
    if not growing.arrays:
        return None
    group = group_key(growing)
    mean, std = (
        torch.from_numpy(read_array(ledger.storage, group, name, growing.arrays[name]))
        for name in ("channel_mean", "channel_std")
    )
    return ChannelStats(mean, std)


def _with_stats(
    ledger: GrowingLedger, growing: GrowingRecord, calibration: Calibration
) -> GrowingRecord:
    """Write channel statistics, and the record that names them."""
    values: Values = {
        name: (array.copy, ("layer", "hidden")[: array.ndim])
        for name, array in calibration.arrays().items()
    }
    arrays = write_arrays(ledger.storage, group_key(growing), values)
    growing = growing.model_copy(update={"arrays": arrays})
    ledger.commit_growing(growing)
    return growing


def remove_split(ledger: Ledger) -> None:
    """Remove a split, in an order that a kill at any moment leaves nothing false.

    First the shards are taken back, so that the split counts as unfinished, and extraction could go
    on with it; then go their files, the split's record, what it shared with others, and last its
    folder. What is left after a kill is removed by the same call. The caller holds the split's
    lock.
    """
    storage, group = ledger.storage, f"{ROOT}/{ledger.name}"
    for shard in sorted(ledger.shards()):
        ledger.retract_shard(shard)
    for name in ("hidden_states", "scale", *OUTPUTS):
        storage.remove(f"{group}/{name}/c")
    GrowingLedger(storage, ledger.tag, ledger.split).remove_beside()
    ledger.retract_split()
    with store_lock(storage):
        left = split_names(storage)
        if ledger.split not in (split for _, split in left):
            remove_examples(storage, ledger.split)
        write_root(storage)
        # the folder last: as long as it is there, the same call goes on
        last_of_tag = ledger.tag not in (tag for tag, _ in left)
        storage.remove(f"{ROOT}/{ledger.tag}" if last_of_tag else group)
