"""ActivationLoader: stream a split in shuffled, packed batches, with exact resume.

A few threads read the examples of the next batches straight from the shard files into the batches'
memory (the reads release the GIL, so worker processes would only add copies). A shard is opened a
little before it is first needed, which lets the system bring it near in one sequential read: the
shuffle buffer is the system's own file cache, and the loader's memory is a few batches; of small
examples, such as pooled states, it is the split as it is stored, up to 256 MB. What comes when is
decided by a sampler, whatever the threads do; so the position of a stream is its epoch and batch,
and nothing else needs saving.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from bertvision.errors import BertvisionWarning, InputError, counted, truth_value
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.readahead import (
    BufferPool,
    DecodedMemory,
    EpochSetter,
    Iteration,
    LoadedSplit,
    OpenShards,
    Threads,
    default_readers,
    shard_bytes,
)
from bertvision.featurestore.sampler import (
    EpochOrder,
    Sampler,
    SequentialSampler,
    ShuffleSampler,
    epoch_order,
)
from bertvision.featurestore.split import ActivationSplit

BUFFER_BYTES = 768 << 20
"""Default bound of the shuffle buffer: bytes of the shards whose examples are mixed."""
_BATCHES_AHEAD = 2


class ActivationLoader:
    """Iterates over the batches of one epoch; each new iteration is the next epoch.

    There is one iteration at a time, in one thread: a new one ends those before it, and whoever
    draws from them nonetheless is told by an InputError.

    Args:
        split: a complete split; `ActivationSplit.to` keeps its codes, and so its batches, on a
            device.
        batch_size: examples per batch and rank.
        layers: indices of hidden states to read, or all.
        shuffle: a seeded order per epoch (`ShuffleSampler`), or the stored one.
        seed: Seed of the order.
        rank: Rank of this process among ``world_size``.
        world_size: Number of processes that share each epoch.
        readers: threads that read, by default 2, or 1 where batches are small and the store is
            near; 0 reads in the caller's thread, without read-ahead.
        buffer: shards in the shuffle buffer; by default as many as fit in `BUFFER_BYTES`.
        sampler: an order of your own, in place of ``shuffle``, ``seed`` and ``buffer``.
        logits: Whether batches have the log-probabilities of next tokens.

    Attributes:
        sampler: Sampler of the order.
        epoch: the epoch that the current or last iteration goes through.
        batch: batches of it that were yielded.
        wait_seconds: Seconds that the consumer has waited for batches, in all.

    Raises:
        IncompleteSplitError: shards of the split are not committed yet.
        InputError: an argument is out of range, or the sampler gives no order of the examples.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> loader = bertvision.ActivationLoader(split, batch_size=20, seed=1)
        >>> [len(batch) for batch in loader]
        [20, 20, 20, 12]
        >>> loader.state_dict()  # the next iteration is the next epoch
        {'epoch': 1, 'batch': 0, 'sampler': 'ShuffleSampler(seed=1, buffer=64)'}
    """

    def __init__(
        self,
        split: ActivationSplit,
        *,
        batch_size: int = 16,
        layers: Sequence[int | str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        readers: int | None = None,
        buffer: int | None = None,
        sampler: Sampler | None = None,
        logits: bool = False,
    ) -> None:
        if readers is not None and readers < 0:
            raise InputError(f"readers is {readers}: it must be 0 or more")
        shuffle = truth_value("shuffle", shuffle)
        self.split = split.require_complete()
        self._positions = split.layer_positions(layers)
        self._logits = truth_value("logits", logits)
        if self._logits:
            split.require_logits()
            if split.resident is not None:
                raise InputError(
                    "logits=True: log-probabilities are read from the store, not from a device; "
                    "leave `to` out"
                )
        if sampler is not None and not isinstance(sampler, Sampler):
            raise InputError(f"sampler is {sampler!r}: give a subclass of bertvision.Sampler")
        if sampler is None:
            buffer = default_buffer(split, len(self._positions)) if buffer is None else buffer
            sampler = ShuffleSampler(seed, buffer) if shuffle else SequentialSampler()
        elif (shuffle, seed, buffer) != (True, 0, None):
            raise InputError(f"{sampler} decides the order: leave shuffle, seed and buffer out")
        # not `sampler`: Lightning takes who has that for torch's own loader, and looks for the rest
        self._sampler = sampler
        self._options = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
        # one pool for each use, because the buffers of one use are all about as large
        self._pools: defaultdict[tuple[str, int], BufferPool] = defaultdict(BufferPool)
        self._decoded = DecodedMemory()
        self._loaded: LoadedSplit | None = None
        self.epoch = 0
        self.batch = 0
        self._start: tuple[int, int] | None = (0, 0)
        self._iteration: object | None = None  # the one that counts ``batch``
        self.wait_seconds = 0.0
        self._order = 0, epoch_order(split.plan, sampler, epoch=0, **self._options)
        self._length = len(self._order[1])
        if split.resident is not None:
            readers = 0  # nothing is read
        if readers is None:
            tokens = batch_size * split.record.tokens / len(split)
            of_shard = shard_bytes(split, len(self._positions))
            readers = default_readers(split, round(tokens / split.record.shard_tokens * of_shard))
        self._readers = readers

    def __repr__(self) -> str:
        state = self.state_dict()
        return (
            f"<ActivationLoader {self.split.name}: {self._length:,} batches of "
            f"{counted(self._options['batch_size'], 'example')}, next is batch {state['batch']} "
            f"of epoch {state['epoch']}>\n  {self._sampler}"
        )

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse to be indexed, as a ``DataLoader`` of torch does.

        Raises:
            InputError: says what to iterate over.
        """
        raise InputError(
            "an ActivationLoader gives whole batches in an order of its own: iterate over it, "
            "without a DataLoader (it reads ahead by itself); a DataLoader takes single "
            "examples, of split.to_dataset()"
        )

    def __len__(self) -> int:
        """Batches of an epoch of this rank."""
        return self._length

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch.

        Raises:
            InputError: the sampler gives none, or other than so many batches.
        """
        if self._order[0] != epoch:
            order = epoch_order(self.split.plan, self._sampler, epoch=epoch, **self._options)
            if len(order) != self._length:
                raise InputError(
                    f"{self._sampler} gives {len(order)} batches in epoch {epoch}, {self._length} "
                    "in epoch 0: name equally many examples in every epoch"
                )
            self._order = epoch, order
        return self._order[1]

    def state_dict(self) -> dict[str, int | str]:
        """The position, counted when a batch is given out: resume goes on after it.

        Returns:
            ``epoch``, ``batch`` and ``sampler``; inside an epoch also ``order``, its digest.
        """
        if self.batch == self._length:
            return {"epoch": self.epoch + 1, "batch": 0, "sampler": self._sampler.identity}
        state: dict[str, int | str] = {"epoch": self.epoch, "batch": self.batch}
        state["sampler"] = self._sampler.identity
        if self.batch:
            state["order"] = self.order(self.epoch).digest
        return state

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Let the next iteration go on from a position, in the middle of an epoch or not.

        Args:
            state: State of `state_dict`. One of epoch and batch alone is taken without a check.

        Raises:
            InputError: the position is in the order of another sampler, or in another order.
        """
        epoch, batch = int(state["epoch"]), int(state["batch"])
        if (saved := state.get("sampler", self._sampler.identity)) != self._sampler.identity:
            raise InputError(
                f"the position in {self.split.name} is one of {saved}, but the order is that of "
                f"{self._sampler}: give the same sampler to go on, or begin anew"
            )
        if batch and "order" in state and state["order"] != self.order(epoch).digest:
            raise InputError(
                f"{self._sampler} gives another order of epoch {epoch} than when the position was "
                "saved: go on with the same split, batch size and number of ranks, and draw what "
                "is random in a sampler from its seed and the epoch alone"
            )
        self.epoch, self.batch = self._start = epoch, batch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of an epoch; a position inside of it stays.

        Lightning calls it at the beginning of each of its epochs, so that a trainer that resumes
        between two, or asks for its loaders anew, goes on in the order of its own epoch.

        Args:
            epoch: Number of the epoch, from 0.

        Warns:
            BertvisionWarning: A position inside of another epoch was loaded, and is dropped.
        """
        begin, batch = self._start or (self.epoch + 1, 0)
        if begin != epoch:
            if batch:
                warnings.warn(
                    f"the position in {self.split.name} that was loaded, batch {batch} of epoch "
                    f"{begin}, is dropped: the trainer begins epoch {epoch}",
                    BertvisionWarning,
                    stacklevel=2,
                )
            self.epoch, self.batch = self._start = epoch, 0

    @property
    def batch_sampler(self) -> EpochSetter:
        """The place where Lightning looks for `set_epoch`."""
        return EpochSetter(self)

    def __iter__(self) -> Iteration[ActivationBatch]:
        return Iteration(self.split.name, self._iterate())

    def _iterate(self) -> Generator[ActivationBatch, None, None]:
        mine = self._iteration = object()
        self.epoch, self.batch = self._start or (self.epoch + 1, 0)
        self._start = None
        batches = self._batches(self.order(self.epoch), self.batch)
        try:
            while True:
                if self._iteration is not mine:
                    raise InputError(
                        f"this iteration of {self.split.name} has ended, because another one of "
                        "the same loader was begun, which counts the position: make a second loader"
                    )
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

    def _batches(
        self, order: EpochOrder, start: int, ending: Callable[[], bool] = sys.is_finalizing
    ) -> Generator[ActivationBatch, None, None]:
        """Batches from ``start`` on, read ahead in threads; their errors are raised here."""
        resident = self.split.resident is not None
        if not self._logits and not resident:  # log-probabilities are read from shards
            self._loaded = LoadedSplit.of(self.split, self._positions, self._loaded)
        shards: OpenShards | None = None
        if not resident and (self._loaded is None or not self._loaded.whole):
            shards = OpenShards(self.split, self._positions, order, start, self._readers)
        get = None if shards is None else shards.get
        threads = Threads(self._readers, "bertvision-batch")
        pending: deque[Future[ActivationBatch]] = deque()
        try:
            for i in range(start, len(order)):
                while len(pending) < max(1, min(_BATCHES_AHEAD, self._readers + 1)):
                    ahead = i + len(pending)
                    if ahead == len(order):
                        break
                    if shards is not None:
                        shards.need(ahead)
                    pending.append(threads.submit(self._read, order.batch(ahead), get))
                yield pending.popleft().result()
                if shards is not None:
                    shards.done(i)
        finally:
            # where an iterator is left open at the end of the interpreter, the threads have ended
            # and modules are gone, this one too
            if not ending():
                threads.shutdown()
                if shards is not None:
                    shards.close()

    def _read(
        self, examples: npt.NDArray[np.int64], shard_of: Callable[[int], ShardReader] | None
    ) -> ActivationBatch:
        """Read the tokens of ``examples`` into one packed batch in pooled memory.

        Args:
            examples: Their positions in the split.
            shard_of: Gives an open shard; None where all of the split is in memory.
        """
        split, positions = self.split, self._positions
        if split.resident is not None:
            return split.resident.batch(examples, positions, self._decoded)
        tokens = int(split.plan.n_tokens[examples].sum())
        if shard_of is not None:
            shard_of(int(split.plan.shard[examples[0]]))  # fails before memory is taken
        codes, scale = split.buffers(tokens, len(positions), self._take)
        if self._loaded is not None:
            self._loaded.gather(examples, shard_of, codes, scale)
        elif shard_of is not None:
            split.gather(examples, shard_of, positions, codes, scale)
        logits = None
        if self._logits and shard_of is not None:
            logits = split.gather_logits(examples, shard_of)
        return split.batch(codes, scale, examples, positions, split.labels, self._decoded, logits)

    def _take(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self._pools[dtype, shape[-1]].take(shape, dtype)


def default_buffer(split: ActivationSplit, layers: int) -> int:
    """Shards in the shuffle buffer of so many layers: what fits in `BUFFER_BYTES`, from 2 to 64."""
    return max(2, min(64, BUFFER_BYTES // shard_bytes(split, layers) - 1))
