"""ActivationLoader: stream a split in shuffled, packed batches, with exact resume.

A few threads read the examples of the next batches straight from the shard files into the batches'
memory (the reads release the GIL, so worker processes would only add copies). A shard is opened a
little before it is first needed, which lets the system bring it near in one sequential read: the
shuffle buffer is the system's own file cache, and the loader's memory is a few batches. What comes
when is decided by `order`, whatever the threads do; so the position of a stream is {epoch, batch},
and nothing else needs saving.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.order import EpochOrder, epoch_order
from bertvision.featurestore.split import ActivationSplit

BUFFER_BYTES = 768 << 20
"""Default bound of the shuffle buffer: bytes of the shards whose examples are mixed."""
_BATCHES_AHEAD = 2
_EARLY_BYTES, _MOST_EARLY = 128 << 20, 8  # shards that are opened before they are needed
_Result = TypeVar("_Result")


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
        readers: threads that read; 0 reads in the caller's thread, without read-ahead.
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
        self._pools: defaultdict[tuple[str, int], BufferPool] = defaultdict(BufferPool)
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
        try:
            while True:
                started = time.perf_counter()
                batch = next(batches, None)
                self.wait_seconds += time.perf_counter() - started
                if batch is None:
                    break
                self.batch += 1
                yield batch
                del batch  # or its memory could not be used for the batch after the next
        finally:
            batches.close()

    def _batches(self, order: EpochOrder, start: int) -> Generator[ActivationBatch, None, None]:
        """Batches from ``start`` on, read ahead in threads; their errors are raised here."""
        shards = _Shards(self.split, self._positions, order, start, self._readers)
        threads = _Threads(self._readers, "bertvision-batch")
        pending: deque[Future[ActivationBatch]] = deque()
        try:
            for i in range(start, len(order)):
                while len(pending) < max(1, min(_BATCHES_AHEAD, self._readers + 1)):
                    ahead = i + len(pending)
                    if ahead == len(order):
                        break
                    shards.need(ahead)
                    pending.append(threads.submit(self._read, order.batch(ahead), shards.get))
                yield pending.popleft().result()
                shards.done(i)
        finally:
            threads.shutdown()
            shards.close()

    def _read(
        self, examples: npt.NDArray[np.int64], shard_of: Callable[[int], ShardReader]
    ) -> ActivationBatch:
        """Read the tokens of ``examples`` into one packed batch in pooled memory."""
        split, positions = self.split, self._positions
        tokens = int(split.plan.n_tokens[examples].sum())
        shard_of(int(split.plan.shard[examples[0]]))  # fails before memory is taken
        codes, scale = split.buffers(tokens, len(positions), self._take)
        split.gather(examples, shard_of, positions, codes, scale)
        return split.batch(codes, scale, examples, positions, split.labels)

    def _take(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self._pools[dtype, shape[-1]].take(shape, dtype)


class _Threads:
    """A thread pool, or the caller's own thread where there are none."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name) if threads else None

    def submit(self, function: Callable[..., _Result], *args: Any) -> Future[_Result]:
        if self._executor is not None:
            return self._executor.submit(function, *args)
        done: Future[_Result] = Future()
        done.set_result(function(*args))
        return done

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


class _Shards:
    """The open shards of an epoch: each is opened once, a little before it is first needed."""

    def __init__(
        self,
        split: ActivationSplit,
        positions: Sequence[int],
        order: EpochOrder,
        start: int,
        readers: int,
    ) -> None:
        shards = order.shards.tolist()
        self._first = dict(zip(shards, order.first_batch.tolist(), strict=True))
        self._last = dict(zip(shards, order.last_batch.tolist(), strict=True))
        self._upcoming = deque(shard for shard in shards if self._last[shard] >= start)
        self._split = split
        self._positions = positions
        self._prefetch = readers > 0
        # small shards (of few layers, say) are nearer to a distant store when more are on the way
        fitting = min(_MOST_EARLY, _EARLY_BYTES // _shard_bytes(split, len(positions)))
        self._early = max(readers, fitting) if readers else 0
        self._threads = _Threads(self._early, "bertvision-shard")
        self._open: dict[int, Future[ShardReader]] = {}

    def need(self, batch: int) -> None:
        """Open what a batch needs, and a few of the shards that come next."""
        early = sum(self._first[shard] > batch for shard in self._open)
        while self._upcoming:
            shard = self._upcoming[0]
            if self._first[shard] > batch:
                if early == self._early:
                    break
                early += 1
            self._open[self._upcoming.popleft()] = self._threads.submit(self._prefetched, shard)

    def get(self, shard: int) -> ShardReader:
        """A shard that is open or about to be."""
        return self._open[shard].result()

    def done(self, batch: int) -> None:
        """Let go of the shards that no batch after this one needs."""
        for shard in [shard for shard in self._open if self._last[shard] <= batch]:
            self._open.pop(shard).result().close()

    def close(self) -> None:
        """Let go of everything."""
        self._threads.shutdown()
        for shard in self._open.values():
            if not shard.cancelled() and shard.exception() is None:
                shard.result().close()

    def _prefetched(self, shard: int) -> ShardReader:
        reader = self._split.open_shard(shard)
        if self._prefetch:
            reader.prefetch(self._positions)
        return reader


def _default_buffer(split: ActivationSplit, layers: int) -> int:
    """As many shards as fit in `BUFFER_BYTES`, from 2 to 64."""
    return max(2, min(64, BUFFER_BYTES // _shard_bytes(split, layers) - 1))


def _shard_bytes(split: ActivationSplit, layers: int) -> int:
    """Bytes of the codes of so many layers of a shard."""
    width = split.encoding.codes_size(split.record.hidden_size)
    itemsize = np.dtype(split.encoding.zarr_dtype).itemsize
    return int(split.record.shard_tokens * layers * width * itemsize)
