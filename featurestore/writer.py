"""Fill the shards of a plan, once each: lock, plan, then shard after shard with its record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from bertvision.featurestore.creation import (
    SplitContents,
    SplitSpec,
    create_split,
    mend_split,
    write_shared,
)
from bertvision.featurestore.delegation import Grant, ShardAttempt, withdraw
from bertvision.featurestore.format.calibration import Calibration
from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.logits import TopLogits
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import ShardRecord, SplitRecord
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import full_disk_named
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import ChangedError, Storage
from bertvision.featurestore.writing.buffer import ShardContent
from bertvision.featurestore.writing.origin import check_split


def expected_bytes(plan: ShardPlan, spec: SplitSpec | SplitRecord) -> int:
    """Bytes the shards of a split will take, checksums included and before any compression.

    Those of the transform's matrices are counted too.
    """
    encoding = get_encoding(spec.encoding)
    layers, beside = len(spec.layers), 0
    if spec.top is not None:
        beside = plan.n_shards * (plan.shard_tokens * spec.top.token_bytes + 3 * (4 + 16 + 4))
    codes = encoding.codes_size(spec.hidden_size) * np.dtype(encoding.zarr_dtype).itemsize
    if encoding.transformed:
        # at most: what rounding to the error and coding it takes without predicting anything
        bits = np.log2(1 / encoding.error) + 0.25
        beside += encoding.matrix_bytes(layers, spec.hidden_size)
        return int(plan.total_tokens * layers * spec.hidden_size * bits / 8 + beside)
    total = plan.shard_tokens * layers * codes + layers * (4 + 16) + 4
    if encoding.quantised:
        groups = int(np.prod(encoding.scale_shape(spec.hidden_size)))
        scale = groups * np.dtype(encoding.scale_dtype).itemsize
        total += plan.shard_tokens * layers * scale + (4 + 16) + 4
    return int(plan.n_shards * total + beside)


class SplitWriter:
    """Writes one split; made by `open_writer`, which holds its lock, or by `granted_writer`.

    Several threads may write different shards at once.
    """

    def __init__(
        self, ledger: Ledger, grant: Grant | None = None, again: Collection[int] = ()
    ) -> None:
        self.split = ActivationSplit(ledger.storage, ledger.tag, ledger.split)
        self.plan = self.split.plan
        self.ledger = ledger
        self._grant = grant
        self._again = set(again)

    @property
    def stats(self) -> ChannelStats | None:
        """Channel statistics to encode with."""
        return self.split.stats

    def pending(self) -> list[int]:
        """Shards that are not committed yet, or are to be written again and were not."""
        return sorted(self._again.union(self.split.missing_shards()))

    def write_shard(
        self,
        shard: int,
        codes: Tensor,
        scale: Tensor | None,
        nonfinite: int = 0,
        logits: TopLogits | None = None,
    ) -> ShardRecord:
        """Write a whole shard durably, then commit it.

        Args:
            shard: Shard of the plan.
            codes: (real tokens of the shard, layers, width) from `encode`, on the CPU; fastest
                where each layer is contiguous.
            scale: (real tokens of the shard, layers, …) or None.
            nonfinite: values that were NaN or infinite and were replaced.
            logits: Log-probabilities of the real tokens, arrays of NumPy, where the split has some.

        Returns:
            The shard's record: this writer's, or where the right to write was lent, that of whoever
            committed the shard before.

        Raises:
            InputError: the shapes are not those of the plan.
            DiskSpaceError: the disk is full; what was committed before stays whole.
            LockedError: the right to write was lent, and taken away; or another process writes the
                shard.
        """
        record = self.split.record
        examples = self.plan.examples_of(shard)
        lengths = self.plan.n_tokens[examples.start : examples.stop].tolist()
        transform = self.split.transform
        content = ShardContent(record, shard, lengths, codes, scale, nonfinite, transform, logits)
        pieces = content.files()
        with full_disk_named(self.ledger.storage):
            self._check_right()
            # before the versions: what is written after them is seen by them
            if (others := self._committed_by_others(shard)) is not None:
                return others
            keys = {name: shard_key(record, name, shard) for name in pieces}
            yields = self._grant is not None
            written = ShardAttempt(self.ledger, shard, keys, yields=yields)
            try:
                for name, chunks in pieces.items():
                    written.write(name, chunks)
                committed = content.record(record.identity, written.files)
                self._check_right()
                written.commit(committed)
            except ChangedError:
                others = self._committed_by_others(shard)
                if others is not None and written.stands(others):
                    return others
                raise
        self._again.discard(shard)
        return committed

    def _check_right(self) -> None:
        if self._grant is not None:
            self._grant.check(self.ledger.storage)

    def _committed_by_others(self, shard: int) -> ShardRecord | None:
        """Where the right to write was lent: the record of whoever committed the shard before.

        A worker that comes back late may be of another kind of machine, and what it computed differ
        in the last bit: it leaves a committed shard alone.
        """
        return self.ledger.find_shard(shard, self.split.record) if self._grant else None


def granted_writer(grant: Grant) -> SplitWriter:
    """A writer of a split whose lock another process holds (see `delegation`).

    Raises:
        StoreNotFoundError: the split is not there, as seen from this machine.
        LockedError: the right to write it was taken away.
    """
    ledger = grant.ledger()
    writer = SplitWriter(ledger, grant)
    grant.check(ledger.storage)
    return writer


def free_bytes(store: str | Path | Storage) -> int | None:
    """Bytes that can still be written where a store lies or will lie, where that is known."""
    return open_storage(store).free_bytes()


@contextmanager
def open_writer(
    store: str | Path | Storage,
    spec: SplitSpec,
    contents: SplitContents,
    calibrate: Callable[[], Calibration],
    *,
    mend: Collection[int] | None = None,
) -> Iterator[SplitWriter]:
    """Create a split, or take up one that was begun from exactly the same things.

    Args:
        store: folder or fsspec URL of the store; made if it does not exist.
        spec: Description of the split that is written.
        contents: the plan and everything beside the activations.
        calibrate: called when a quantised split is created; gives its channel statistics.
        mend: shards of the plan to write again although they are recorded; everything beside the
            shards is written again too, and must come out as it was recorded, and records of shards
            that the plan does not have are removed. None mends nothing.

    Yields:
        A writer that holds the split's lock.

    Raises:
        LockedError: another process is writing the split.
        ProvenanceError: the split was begun from something else; the message names the field.
        DiskSpaceError: the disk is full.
    """
    SnapshotTag(spec.tag)
    check_name(spec.split, "split")
    storage = open_storage(store)
    ledger = Ledger(storage, spec.tag, spec.split)
    with full_disk_named(storage), ledger.lock():
        withdraw(ledger)
        ledger.sweep()
        if not ledger.exists:
            create_split(ledger, spec, contents, calibrate)
        else:
            check_split(ledger, spec, contents)
            if mend is not None:
                mend_split(ledger, contents, calibrate)
                for shard in ledger.shards().difference(range(contents.plan.n_shards)):
                    ledger.retract_shard(shard)
        write_shared(storage, spec, contents)
        # of what is mended each record stays until the next one takes its place: a writer that is
        # killed leaves damage that is found again, and not a gap that looks unfinished
        again = set(mend or ()).intersection(range(contents.plan.n_shards))
        yield SplitWriter(ledger, again=again)
