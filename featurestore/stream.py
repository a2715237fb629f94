"""ActivationLoader: stream a split in shuffled, packed batches, with exact resume.

Whole shards are read ahead by a few threads (decoding releases the GIL, so worker processes would
only add copies), batches are gathered from the shards that are resident, and one more thread keeps
the next batches ready. What comes when is decided by `order`, whatever the threads do; so the
position of a stream is {epoch, batch}, and nothing else needs saving.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.order import EpochOrder, epoch_order
from bertvision.featurestore.split import ActivationSplit

BUFFER_BYTES = 768 << 20
"""Default bound of the shuffle buffer; with batches and read-ahead a loader stays below 1 GiB."""
_BATCHES_AHEAD = 2


class Resident(NamedTuple):
    """A shard in memory.

    Attributes:
        codes: (tokens, layers, hidden).
        scale: (tokens, layers) or None.
    """

    codes: npt.NDArray[Any]
    scale: npt.NDArray[np.float32] | None


class BufferPool:
    """Memory that is used again as soon as nobody refers to it.

    Filling fresh memory costs several times more than filling pages that were touched before. A
    buffer is free when only the pool refers to it, which CPython's reference count tells exactly:
    views, tensors made from them and tensors made from those all hold the buffer. So a batch that
    somebody keeps is never overwritten.
    """

    def __init__(self) -> None:
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised array over a free buffer of at least its size, or over a new one."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            for i in range(len(self._buffers)):
                # 2: the list and getrefcount's own argument
                if sys.getrefcount(self._buffers[i]) == 2:
                    if self._buffers[i].size >= nbytes:
                        return self._buffers[i][:nbytes].view(dtype).reshape(shape)
                    # too small: replace it, so that the pool does not grow with ever larger ones
                    self._buffers[i] = np.empty(nbytes, np.uint8)
                    return self._buffers[i].view(dtype).reshape(shape)
            buffer = np.empty(nbytes, np.uint8)
            self._buffers.append(buffer)
            return buffer.view(dtype).reshape(shape)


class ActivationLoader:
    """Iterates over the batches of one epoch; each new iteration is the next epoch.

    Args:
        split: a complete split.
        batch_size: examples per batch and rank.
        layers: indices of hidden states to read, or all.
        shuffle: a seeded order per epoch, or the stored order.
        seed: of the order.
        rank: of this process among ``world_size``.
        world_size: how many processes share each epoch.
        readers: threads that read shards; 0 reads in the caller's thread, without read-ahead.
        buffer: shards in the shuffle buffer; by default as many as fit in `BUFFER_BYTES`.

    Attributes:
        epoch: the epoch that the current or last iteration goes through.
        batch: batches of it that were yielded.
        wait_seconds: how long the consumer has waited for batches, in all.

    Raises:
        IncompleteSplitError: shards of the split are not committed yet.
        InputError: an argument is out of range.
    """

    def __init__(
        self,
        split: ActivationSplit,
        *,
        batch_size: int = 16,
        layers: Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        readers: int = 2,
        buffer: int | None = None,
    ) -> None:
        if readers < 0:
            raise InputError(f"readers is {readers}: it must be 0 or more")
        self.split = split.require_complete()
        self._positions = split.layer_positions(layers)
        self._buffer = _default_buffer(split, len(self._positions)) if buffer is None else buffer
        self._readers = readers
        self._options = {
            "batch_size": batch_size,
            "seed": seed,
            "rank": rank,
            "world_size": world_size,
            "buffer": self._buffer,
            "shuffle": shuffle,
        }
        # one pool for each use, because the buffers of one use are all about as large
        self._shard_pools = BufferPool(), BufferPool()
        self._batch_pools = BufferPool(), BufferPool()
        self.epoch = 0
        self.batch = 0
        self._start: tuple[int, int] | None = (0, 0)
        self.wait_seconds = 0.0
        self._length = len(self.order(0))

    def __len__(self) -> int:
        """Batches of an epoch of this rank."""
        return self._length

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch."""
        return epoch_order(self.split.plan.shard, epoch=epoch, **self._options)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, int]:
        """The position, counted when a batch is given out: resume goes on after it."""
        if self.batch == self._length:
            return {"epoch": self.epoch + 1, "batch": 0}
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on from a position, in the middle of an epoch or not."""
        self.epoch, self.batch = self._start = int(state["epoch"]), int(state["batch"])

    def __iter__(self) -> Iterator[ActivationBatch]:
        self.epoch, self.batch = self._start or (self.epoch + 1, 0)
        self._start = None
        batches = self._batches(self.order(self.epoch), self.batch)
        stream = _ahead(batches) if self._readers else batches
        try:
            while True:
                started = time.perf_counter()
                batch = next(stream, None)
                self.wait_seconds += time.perf_counter() - started
                if batch is None:
                    break
                self.batch += 1
                yield batch
                del batch  # or its memory could not be used for the batch after the next
        finally:
            stream.close()

    def _batches(self, order: EpochOrder, start: int) -> Generator[ActivationBatch, None, None]:
        """Batches from ``start`` on, gathered from shards that are read ahead."""
        needed = order.last_batch >= start
        upcoming = deque(order.shards[needed].tolist())
        last = dict(zip(order.shards.tolist(), order.last_batch.tolist(), strict=True))
        pending: dict[int, Future[Resident]] = {}
        capacity = self._buffer + self._readers
        executor = ThreadPoolExecutor(max(1, self._readers), "bertvision-reader")
        try:
            for i in range(start, len(order)):
                examples = order.batch(i)
                shards = set(self.split.plan.shard[examples].tolist())
                while self._readers and upcoming and len(pending) < capacity:
                    shard = upcoming.popleft()
                    pending[shard] = executor.submit(self._read, shard)
                while not shards <= pending.keys():
                    # without readers, or where a batch spans more shards than fit: read now
                    shard = upcoming.popleft()
                    pending[shard] = executor.submit(self._read, shard)
                yield self._gather(examples, {s: pending[s].result() for s in shards})
                for shard in shards:
                    if last[shard] == i:
                        del pending[shard]
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _read(self, shard: int) -> Resident:
        """Read a shard into pooled memory."""
        capacity = self.split.record.shard_tokens
        codes, scale = self._take(self._shard_pools, capacity)
        self.split.read_chunks(shard, slice(0, capacity), self._positions, codes, scale)
        return Resident(codes, scale)

    def _take(
        self, pools: tuple[BufferPool, BufferPool], tokens: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None]:
        """Pooled memory for the codes and, where there is one, the scale of so many tokens."""
        layers, split = len(self._positions), self.split
        codes = pools[0].take((tokens, layers, split.record.hidden_size), split.encoding.zarr_dtype)
        if not split.encoding.quantised:
            return codes, None
        return codes, pools[1].take((tokens, layers), np.float32)

    def _gather(
        self, examples: npt.NDArray[np.int64], resident: dict[int, Resident]
    ) -> ActivationBatch:
        """Copy the tokens of ``examples`` from resident shards into one packed batch."""
        split, plan = self.split, self.split.plan
        shards = plan.shard[examples]
        starts = plan.first_token[examples] - shards.astype(np.int64) * plan.shard_tokens
        lengths = plan.n_tokens[examples].astype(np.int64)
        ends = np.cumsum(lengths)
        codes, scale = self._take(self._batch_pools, int(ends[-1]))
        for shard, start, n, end in zip(shards, starts, lengths, ends, strict=True):
            source = resident[int(shard)]
            codes[end - n : end] = source.codes[start : start + n]
            if scale is not None and source.scale is not None:
                scale[end - n : end] = source.scale[start : start + n]
        return split.batch(codes, scale, examples, self._positions, split.labels)


def _default_buffer(split: ActivationSplit, layers: int) -> int:
    """As many shards as fit in `BUFFER_BYTES`, from 2 to 64."""
    shard = split.record.shard_tokens * layers * split.record.hidden_size * split.encoding.itemsize
    return max(2, min(64, BUFFER_BYTES // max(1, shard) - 1))


def _ahead(
    batches: Generator[ActivationBatch, None, None],
) -> Generator[ActivationBatch, None, None]:
    """Run a generator in a thread that stays `_BATCHES_AHEAD` ahead; its errors are raised here."""
    executor = ThreadPoolExecutor(1, "bertvision-batches")
    pending: deque[Future[ActivationBatch | None]] = deque()
    try:
        for _ in range(_BATCHES_AHEAD):
            pending.append(executor.submit(next, batches, None))
        while (batch := pending.popleft().result()) is not None:
            pending.append(executor.submit(next, batches, None))
            yield batch
            del batch  # or its memory could not be used for the batch after the next
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        batches.close()
