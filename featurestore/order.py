"""The batches of one rank in one epoch: a sampler's sequence, checked, dealt out and cut. No IO."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from bertvision.errors import InputError
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.sampler import Sampler, checked_sequence, piece_of_rank


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The batches of one rank in one epoch.

    Attributes:
        examples: (examples of this rank,) int64 in the order they are drawn.
        boundaries: (batches + 1,) int64: batch i is ``examples[boundaries[i]:boundaries[i + 1]]``.
        shards: (shards of this rank,) int64 in the order they are first needed.
        first_batch: (shards,) the batch that first needs each of ``shards``; non-decreasing.
        last_batch: (shards,) the batch that last needs each of ``shards``.
        digest: of the order of all ranks; a stream is resumed inside an epoch only where it is the
            same again.
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
        plan: of the split.
        sampler: gives the sequence.
        epoch: from 0.
        batch_size: examples per batch and rank.
        rank: of this process.
        world_size: how many processes share the epoch.

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
