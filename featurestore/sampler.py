"""Samplers: the order in which the examples of a split come in an epoch. No IO, no state.

The batches of one rank in one epoch: a sampler's sequence, checked, dealt out and cut. No IO.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from bertvision.errors import InputError
from bertvision.featurestore.format.plan import ShardPlan

_LONGEST_REPR = 60  # characters of a setting


class Sampler(ABC):
    """Says in which order the examples of a split come; subclass it for an order of your own.

    A sampler is a pure function: what is random in it is drawn from a seed of its own and the
    epoch. So a stream is resumed by calling it again, and all ranks agree without a word. Its
    ``repr`` identifies it where a stream is resumed; a dataclass, or plain attributes, will do.

    An order that stays near a few shards for a while is read fast; one that jumps through the whole
    store seeks for every example.

    Examples:
        >>> import numpy as np
        >>> class LongestFirst(bertvision.Sampler):
        ...     def sequence(self, plan, epoch, world_size):
        ...         return np.argsort(-plan.n_tokens, kind="stable")
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> batch = next(iter(bertvision.ActivationLoader(split, sampler=LongestFirst())))
        >>> batch.lengths[:4].tolist(), int(split.plan.n_tokens.max())
        ([85, 85, 85, 85], 85)
    """

    exactly_once: bool = True
    """Whether each example comes once in each epoch, which is then checked. False lets a sampler
    repeat examples and leave some out, equally many in every epoch."""

    @abstractmethod
    def sequence(self, plan: ShardPlan, epoch: int, world_size: int) -> npt.ArrayLike:
        """The order of one epoch, of all ranks together.

        Args:
            plan: Place of each example: ``plan.n_tokens`` and ``plan.shard`` have a value for
                each, in stored order.
            epoch: Epoch, from 0.
            world_size: Number of ranks that share the epoch; each takes one of so many equal,
                contiguous pieces of the sequence, in batches.

        Returns:
            (examples drawn,) positions in the split.
        """

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)] if is_dataclass(self) else vars(self)
        arguments = (f"{name}={_identified(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({', '.join(arguments)})"

    @property
    def identity(self) -> str:
        """Identity that is compared where a stream is resumed: the ``repr``.

        That which a dataclass makes for itself shows no more than the ends of a long array.
        """
        return Sampler.__repr__(self) if is_dataclass(self) else repr(self)


@dataclass(frozen=True)
class ShuffleSampler(Sampler):
    """The default: shards in a random order, their examples mixed through a bounded buffer.

    The example of the shard at position p is drawn at time p + buffer · u with u uniform in [0, 1),
    and examples are sorted by that time. So at time t only shards with t − buffer < p ≤ t are
    needed: a shuffle buffer of `buffer` shards, which bounds what is read at a time whatever the
    size of the store. Ranks take neighbouring pieces of the sequence of shards and mix their own,
    so that at most one shard is read by two of them.

    Attributes:
        seed: from 0; with the epoch it gives the order.
        buffer: Number of shards whose examples are mixed.

    Raises:
        InputError: the seed is negative, or the buffer below 1.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> bertvision.ActivationLoader(split, sampler=bertvision.ShuffleSampler(seed=1, buffer=4))
        <ActivationLoader 1e/train: 5 batches of 16 examples, next is batch 0 of epoch 0>
          ShuffleSampler(seed=1, buffer=4)
    """

    seed: int = 0
    buffer: int = 8

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}: it must be 0 or more")
        if self.buffer < 1:
            raise InputError(f"buffer is {self.buffer}: it must be at least 1")

    def sequence(  # noqa: D102
        self, plan: ShardPlan, epoch: int, world_size: int
    ) -> npt.NDArray[np.int64]:
        position = np.random.default_rng([self.seed, epoch]).permutation(plan.n_shards)
        time = position[plan.shard].astype(np.float64)
        # a stable sort by the shard's position lays the shards one after another
        sequence = np.argsort(time, kind="stable")
        for rank in range(world_size):
            piece = piece_of_rank(sequence, rank, world_size)
            rng = np.random.default_rng([self.seed, epoch, rank])
            drawn = time[piece] + self.buffer * rng.random(piece.size)
            piece[:] = piece[np.argsort(drawn, kind="stable")]
        return sequence


@dataclass(frozen=True)
class SequentialSampler(Sampler):
    """Examples in stored order, which for other splits than train is that of the data.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["dev"]
        >>> loader = bertvision.ActivationLoader(split, sampler=bertvision.SequentialSampler())
        >>> next(iter(loader)).examples[:4].tolist()
        [0, 1, 2, 3]
    """

    def sequence(  # noqa: D102
        self, plan: ShardPlan, epoch: int, world_size: int
    ) -> npt.NDArray[np.int64]:
        return np.arange(len(plan))


def _identified(value: object) -> str:
    """The repr of a sampler's setting; with a digest, where it is too long to be shown whole."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
        return f"<{value.dtype} {value.shape} {digest[:12]}>"
    text = repr(value)
    if len(text) <= _LONGEST_REPR:
        return text
    return f"{text[:_LONGEST_REPR]}… {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def piece_of_rank(
    sequence: npt.NDArray[np.int64], rank: int, world_size: int
) -> npt.NDArray[np.int64]:
    """The part of an epoch that a rank draws, a view; parts differ by at most one example."""
    n = sequence.size
    return sequence[n * rank // world_size : n * (rank + 1) // world_size]


def checked_sequence(
    sampler: Sampler, plan: ShardPlan, epoch: int, world_size: int
) -> npt.NDArray[np.int64]:
    """Check that a sampler's sequence for an epoch is an order of the split's examples.

    Raises:
        InputError: it is not; the message names the sampler and an example.
    """
    given = np.asarray(sampler.sequence(plan, epoch, world_size))
    where = f"{sampler} in epoch {epoch}"
    if given.ndim != 1 or given.size == 0 or not np.issubdtype(given.dtype, np.integer):
        raise InputError(
            f"{where} gives {given.dtype} of shape {given.shape}: a sampler returns a sequence of "
            "integers, the positions of examples in the split"
        )
    if outside := given[(given < 0) | (given >= len(plan))].tolist():
        raise InputError(
            f"{where} names example {outside[0]}: the split has those from 0 to {len(plan) - 1}"
        )
    sequence = given.astype(np.int64, copy=False)
    if sampler.exactly_once:
        times = np.bincount(sequence, minlength=len(plan))
        if (wrong := np.flatnonzero(times != 1)).size:
            example = int(wrong[0])
            raise InputError(
                f"{where} names example {example} {times[example]} times, and so {wrong.size} of "
                f"{len(plan)}: name each once, or set `exactly_once = False` in the class"
            )
    return sequence


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The batches of one rank in one epoch.

    Attributes:
        examples: (examples of this rank,) int64 in the order they are drawn.
        boundaries: (batches + 1,) int64: batch i is ``examples[boundaries[i]:boundaries[i + 1]]``.
        shards: (shards of this rank,) int64 in the order they are first needed.
        first_batch: (shards,) the batch that first needs each of ``shards``; non-decreasing.
        last_batch: (shards,) the batch that last needs each of ``shards``.
        digest: Digest of the order of all ranks; a stream is resumed inside an epoch only where it
            is the same again.
    """

    examples: npt.NDArray[np.int64]
    boundaries: npt.NDArray[np.int64]
    shards: npt.NDArray[np.int64]
    first_batch: npt.NDArray[np.int64]
    last_batch: npt.NDArray[np.int64]
    digest: str

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def batch(self, i: int) -> npt.NDArray[np.int64]:
        """The stored examples of batch ``i``."""
        return self.examples[self.boundaries[i] : self.boundaries[i + 1]]


def epoch_order(
    plan: ShardPlan,
    sampler: Sampler,
    *,
    epoch: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> EpochOrder:
    """The order of one rank's examples; over all ranks the sampler's sequence comes once.

    Ranks take equal, contiguous pieces of it (they differ by at most one example), and yield
    equally many batches, or a distributed trainer would wait for ever for the one that has fewer.
    Where a rank has no example for its last batch, which happens with ``batch_size=1`` and with
    fewer examples than ranks, it draws one a second time, as torch's ``DistributedSampler`` does:
    its own first one, or where it has none the first of the sequence.

    Args:
        plan: Plan of the split.
        sampler: gives the sequence.
        epoch: Epoch, from 0.
        batch_size: examples per batch and rank.
        rank: Rank of this process.
        world_size: Number of processes that share the epoch.

    Raises:
        InputError: a count below 1, a rank outside the world, or a sequence that is none.
    """
    for name, value in (("batch_size", batch_size), ("world_size", world_size)):
        if value < 1:
            raise InputError(f"{name} is {value}: it must be at least 1")
    if not 0 <= rank < world_size:
        raise InputError(f"rank {rank} is outside the world of {world_size}")
    sequence = checked_sequence(sampler, plan, epoch, world_size)
    mine = piece_of_rank(sequence, rank, world_size)
    largest = -(-sequence.size // world_size)
    batches = -(-largest // batch_size)
    if mine.size < batches:  # by one: pieces differ by one example
        mine = np.append(mine, (mine if mine.size else sequence)[0])
    boundaries = _boundaries(mine.size, batch_size, batches)
    batch_of_example = np.repeat(np.arange(boundaries.size - 1), np.diff(boundaries))
    spans = _shard_spans(plan.shard[mine].astype(np.int64), batch_of_example)
    digest = xxhash.xxh3_128(f"{batch_size} {world_size} ".encode())
    digest.update(np.ascontiguousarray(sequence, "<i8").data)
    return EpochOrder(mine, boundaries, *spans, digest.hexdigest())


def _boundaries(n: int, batch_size: int, batches: int) -> npt.NDArray[np.int64]:
    """Full batches; where this rank would come one batch short of the others, the last is split."""
    i = np.arange(batches + 1)
    return np.minimum(i * batch_size, n - (batches - i))


def _shard_spans(
    shard: npt.NDArray[np.int64], batch: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Shards by first need, with the first and last batch that needs each."""
    shards, first = np.unique(shard, return_index=True)
    last = shard.size - 1 - np.unique(shard[::-1], return_index=True)[1]
    order = np.argsort(first, kind="stable")
    return shards[order], batch[first[order]], batch[last[order]]
