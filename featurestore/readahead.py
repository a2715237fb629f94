"""Readahead of a stream: threads, the open shards of its next batches, and their memory."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from bertvision.errors import InputError
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.sampler import EpochOrder

_EARLY_BYTES = 128 << 20
MOST_EARLY = 8
"""Shards that are opened before they are needed, at most."""
_SMALL_EXAMPLE = 4 << 10  # bytes of a layer
_LOADED_BYTES = 256 << 20  # of the small examples of a split
_LARGE_BYTES = 4 << 20  # of codes that keep a thread busy for half a millisecond
_MOST_OPEN = 192  # a sampler may come back to any shard, but systems allow only so many open files
_Result = TypeVar("_Result")
_Batch = TypeVar("_Batch")


class BufferPool:
    """Memory that is used again as soon as nobody refers to it.

    Filling fresh memory costs several times more than filling pages that were touched before. A
    buffer is free when only the pool refers to it, which CPython's reference count tells exactly:
    views, tensors made from them and tensors made from those all hold the buffer. So a batch that
    somebody keeps is never overwritten. Where an interpreter counts otherwise (see
    `idle_references`), all memory is fresh.

    Args:
        most: buffers that are kept to be used again. What is taken beyond them is the taker's, and
            is given back with it, or the pool would hold whatever somebody has ever kept at a time.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._lock, self._process = threading.Lock(), os.getpid()

    def take(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialised array over a free buffer of at least its size, or over a new one."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if (idle := idle_references()) is None:
            return np.empty(nbytes, np.uint8).view(dtype).reshape(shape)
        if self._process != os.getpid():  # a thread that a fork left behind may hold the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            for i in range(len(self._buffers)):
                if sys.getrefcount(self._buffers[i]) == idle:
                    if self._buffers[i].size >= nbytes:
                        return self._buffers[i][:nbytes].view(dtype).reshape(shape)
                    # too small: replace it, so that the pool does not grow with ever larger ones
                    self._buffers[i] = np.empty(nbytes, np.uint8)
                    return self._buffers[i].view(dtype).reshape(shape)
            buffer = np.empty(nbytes, np.uint8)
            if len(self._buffers) < self._most:
                self._buffers.append(buffer)
            return buffer.view(dtype).reshape(shape)


@cache
def idle_references() -> int | None:
    """Reference count of a buffer to which nothing but a list refers.

    It differs between versions of CPython, and other interpreters may not count at all, so it is
    tried once: None where a view of the buffer, or a view of that, is not told by the count.
    """
    references = [np.empty(8, np.uint8)]
    idle = sys.getrefcount(references[0])
    view = references[0][:4].view(np.int16)
    with_view = sys.getrefcount(references[0])
    further = view.reshape(2, 1).T
    del view
    with_further = sys.getrefcount(references[0])
    del further
    counts = with_view > idle and with_further > idle and sys.getrefcount(references[0]) == idle
    return idle if counts else None


class DecodedMemory:
    """Memory for decoded vectors, used again when nobody refers to them any more."""

    def __init__(self) -> None:
        # one pool for each type, because the buffers of one use are all about as large; one buffer
        # is filled while the one before is in use, and a trainer may refer to the one before that
        self._pools: defaultdict[torch.dtype, BufferPool] = defaultdict(lambda: BufferPool(3))

    def __reduce__(self) -> tuple[type[DecodedMemory], tuple[()]]:
        return type(self), ()  # of another process it is empty

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        taken = self._pools[dtype].take((math.prod(shape), dtype.itemsize), np.uint8)
        return torch.from_numpy(taken).view(dtype).view(shape)


class Threads:
    """A thread pool, or the caller's own thread where there are none."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name) if threads else None

    def submit(
        self, function: Callable[..., _Result], *args: Any, **options: Any
    ) -> Future[_Result]:
        """The result to come of a call, or the one that has come."""
        if self._executor is not None:
            return self._executor.submit(function, *args, **options)
        done: Future[_Result] = Future()
        done.set_result(function(*args, **options))
        return done

    def shutdown(self) -> None:
        """Wait for the calls that have begun; the others are not made."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


class Iteration(Iterator[_Batch]):
    """The batches of one iteration, drawn by one thread at a time of the process that began it.

    Args:
        name: Name of the split, for messages.
        batches: The batches, which threads of this process read ahead.

    Raises:
        InputError: ``next`` is called in a forked process, or by two threads at once.
    """

    def __init__(self, name: str, batches: Generator[_Batch, None, None]) -> None:
        self._name, self._batches = name, batches
        self._lock, self._process = threading.Lock(), os.getpid()

    def __next__(self) -> _Batch:
        if self._process != os.getpid():
            raise InputError(
                f"this iteration of {self._name} was begun in process {self._process}, and a fork "
                "does not carry the threads that read for it: begin an iteration in the process "
                "that draws from it"
            )
        with self._alone():
            return next(self._batches)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        mine = False
        try:
            mine = self._lock.acquire(blocking=False)
            if not mine:
                raise InputError(
                    f"two threads use one iteration of {self._name} at once: give each thread a "
                    "loader or stream of its own, with rank= and world_size= to share an epoch"
                )
            yield
        finally:
            if mine:
                self._lock.release()

    def close(self) -> None:
        """End the iteration and its threads, as dropping the iterator does."""
        with self._alone():
            self._batches.close()


class EpochSetter(NamedTuple):
    """Has Lightning call ``set_epoch`` of a loader at the beginning of each of its epochs.

    Lightning looks for ``batch_sampler.sampler.set_epoch``, as torch's loaders have it.

    Attributes:
        sampler: The loader.
    """

    sampler: Any


class LoadedSplit:
    """Small examples of a split in memory, shard by shard as they are first needed, checked.

    An example of a few hundred bytes a layer takes longer to ask for than to read. What was read
    stays for later epochs, in the process that read it.

    Args:
        split: Split of at most `_LOADED_BYTES` of codes.
        positions: Places on the stored layer axis.
    """

    def __init__(self, split: SplitReader, positions: Sequence[int]) -> None:
        rows = split.plan.n_shards * split.plan.shard_tokens
        self._split, self._positions = split, positions
        self._codes, self._scale = split.buffers(rows, len(positions))
        self._there = np.zeros(split.plan.n_shards, bool)
        self._lock, self._process = threading.Lock(), os.getpid()

    @classmethod
    def of(
        cls, split: SplitReader, positions: Sequence[int], before: LoadedSplit | None
    ) -> LoadedSplit | None:
        """Memory for a split with small examples; None of one that is read from its files.

        Args:
            split: Split to read.
            positions: Places on the stored layer axis.
            before: Memory of an earlier epoch, which is taken unless it is of another process.
        """
        if before is not None and before._process == os.getpid():
            return before
        size = split.plan.n_shards * shard_bytes(split, len(positions))
        small = has_small_examples(split) and not split.encoding.transformed
        return cls(split, positions) if small and size <= _LOADED_BYTES else None

    @property
    def whole(self) -> bool:
        """Whether all shards are there."""
        return bool(self._there.all())

    def load(self, shard: int, reader: ShardReader) -> None:
        """Read a shard, where that was not done yet.

        Args:
            shard: Number of the shard.
            reader: Reader of the shard.

        Raises:
            CorruptStoreError: what is stored does not pass its checksum.
        """
        with self._lock:
            if self._there[shard]:
                return
            begin = shard * self._split.plan.shard_tokens
            rows = slice(begin, begin + reader.tokens)
            scale = None if self._scale is None else self._scale[rows]
            examples = len(self._split.plan.examples_of(shard))
            reader.read(0, examples, self._positions, self._codes[:, rows], scale)
            self._there[shard] = True

    def gather(
        self,
        examples: npt.NDArray[np.int64],
        shard_of: Callable[[int], ShardReader] | None,
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
    ) -> None:
        """As `SplitReader.gather`; no shard is asked for once all are there."""
        plan = self._split.plan
        if shard_of is not None:
            shards = plan.shard[examples]
            for shard in np.unique(shards[~self._there[shards]]).tolist():
                self.load(shard, shard_of(shard))
        rows = plan.rows_of(examples)
        # "clip", since "raise" copies through memory of its own
        np.take(self._codes, rows, axis=1, out=codes, mode="clip")
        if scale is not None and self._scale is not None:
            np.take(self._scale, rows, axis=0, out=scale, mode="clip")


class OpenShards:
    """The open shards of an epoch: each is opened a little before it is first needed.

    An order that comes back to more shards than may be open has them opened again.
    """

    def __init__(
        self,
        split: SplitReader,
        positions: Sequence[int],
        order: EpochOrder,
        start: int,
        readers: int,
    ) -> None:
        shards = order.shards.tolist()
        self._first = dict(zip(shards, order.first_batch.tolist(), strict=True))
        self._last = dict(zip(shards, order.last_batch.tolist(), strict=True))
        self._upcoming = deque(shard for shard in shards if self._first[shard] > start)
        self._order = order
        self._split = split
        self._positions = positions
        self._prefetch = readers > 0
        self._early = early_shards(split, len(positions), readers)
        self._threads = Threads(self._early, "bertvision-shard")
        self._open: dict[int, Future[ShardReader]] = {}
        self._pending: deque[set[int]] = deque()  # shards of the batches that are being read

    def need(self, batch: int) -> None:
        """Open what a batch needs, and a few of the shards that come next."""
        needed = self._split.plan.shard[self._order.batch(batch)].tolist()
        self._pending.append(set(needed))
        for shard in dict.fromkeys(needed):
            self._begin(shard)
        while self._upcoming and self._first[self._upcoming[0]] <= batch:
            self._upcoming.popleft()
        early = sum(self._first[shard] > batch for shard in self._open)
        for _ in range(min(self._early - early, len(self._upcoming))):
            self._begin(self._upcoming.popleft())

    def _begin(self, shard: int) -> None:
        if shard not in self._open:
            positions = self._positions if self._prefetch else ()
            self._open[shard] = self._threads.submit(prefetched, self._split, shard, positions)

    def get(self, shard: int) -> ShardReader:
        """A shard that is open or about to be."""
        return self._open[shard].result()

    def done(self, batch: int) -> None:
        """Let go of the shards that no later batch needs, and of those that are too many."""
        self._pending.popleft()
        pending = set().union(*self._pending)
        surplus = len(self._open) - _MOST_OPEN
        for shard in list(self._open):
            if self._last[shard] <= batch or (surplus > 0 and shard not in pending):
                self._open.pop(shard).result().close()
                surplus -= 1

    def close(self) -> None:
        """Let go of everything."""
        self._threads.shutdown()
        for shard in self._open.values():
            # in a forked process, where the threads are not, some are never done
            if shard.done() and not shard.cancelled() and shard.exception() is None:
                shard.result().close()


def prefetched(
    split: SplitReader, shard: int, positions: Sequence[int], *, any_order: bool = False
) -> ShardReader:
    """Open a shard, and begin to bring some layers of it near.

    Raises:
        IncompleteSplitError: it is not committed.
        CorruptStoreError: it is damaged, as far as that shows.
    """
    reader = split.open_shard(shard, any_order=any_order)
    try:
        if positions:
            reader.prefetch(positions)
    except BaseException:
        reader.close()
        raise
    return reader


def shard_bytes(split: SplitReader, layers: int) -> int:
    """Bytes of the codes of so many layers of a shard."""
    width = split.encoding.codes_size(split.record.hidden_size)
    itemsize = np.dtype(split.encoding.zarr_dtype).itemsize
    return int(split.record.shard_tokens * layers * width * itemsize)


def has_small_examples(split: SplitReader) -> bool:
    """Whether asking for the bytes of an example in a layer takes longer than reading them."""
    tokens = split.record.tokens / max(1, len(split))
    return tokens * shard_bytes(split, 1) / split.record.shard_tokens <= _SMALL_EXAMPLE


def default_readers(split: SplitReader, nbytes: int) -> int:
    """Threads that read, where nobody says how many: two, or one of what is small and near.

    Two threads read more in the same time where each reads, or decodes a transform, for
    some time. Of small batches they wait for each other and for the interpreter, and two read
    less than one.

    Args:
        split: Split to read.
        nbytes: codes that one of them reads at a time.
    """
    slow = split.storage.distant or split.encoding.transformed
    return 2 if slow or nbytes >= _LARGE_BYTES else 1


def early_shards(split: SplitReader, layers: int, readers: int) -> int:
    """Shards of so many layers that are opened before they are needed; none without readers."""
    # small shards (of few layers, say) are nearer to a distant store when more are on the way
    fitting = min(MOST_EARLY, _EARLY_BYTES // shard_bytes(split, layers))
    return max(readers, fitting) if readers else 0
