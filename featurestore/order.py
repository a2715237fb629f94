"""The order of examples: a pure function of (seed, epoch, rank, world size). No IO.

Whole shards are visited in a seeded random order. The example of the shard at position p is drawn
at time p + buffer · u with u uniform in [0, 1), and examples are sorted by that time. So at time t
only shards with t − buffer < p ≤ t are needed: a shuffle buffer of `buffer` shards whose memory is
bounded whatever the size of the store, and that needs no state but the position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The batches of one rank in one epoch.

    Attributes:
        examples: (examples of this rank,) int64 in the order they are drawn.
        boundaries: (batches + 1,) int64: batch i is ``examples[boundaries[i]:boundaries[i + 1]]``.
        shards: (shards of this rank,) int64 in the order they are first needed.
        first_batch: (shards,) the batch that first needs each of ``shards``; non-decreasing.
        last_batch: (shards,) the batch that last needs each of ``shards``.
    """

    examples: npt.NDArray[np.int64]
    boundaries: npt.NDArray[np.int64]
    shards: npt.NDArray[np.int64]
    first_batch: npt.NDArray[np.int64]
    last_batch: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def batch(self, i: int) -> npt.NDArray[np.int64]:
        """The stored examples of batch ``i``."""
        return self.examples[self.boundaries[i] : self.boundaries[i + 1]]


def epoch_order(
    shard_of_example: npt.NDArray[np.integer],
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    buffer: int = 8,
    shuffle: bool = True,
) -> EpochOrder:
    """The order of one rank's examples; over all ranks every example comes exactly once.

    Ranks take equal, contiguous pieces of the shard sequence (they differ by at most one example),
    so that at most one shard is read by two neighbours, and yield equally many batches wherever
    each has at least one example for each.

    Args:
        shard_of_example: (examples,) non-decreasing.
        batch_size: examples per batch and rank.
        seed: of the shuffling.
        epoch: from 0; another epoch is another order.
        rank: of this process.
        world_size: how many processes share the epoch.
        buffer: how many shards' examples are mixed.
        shuffle: False gives the stored order.

    Raises:
        InputError: a count below 1, or a rank outside the world.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("world_size", world_size),
        ("buffer", buffer),
    ):
        if value < 1:
            raise InputError(f"{name} is {value}: it must be at least 1")
    if not 0 <= rank < world_size:
        raise InputError(f"rank {rank} is outside the world of {world_size}")
    shard = np.asarray(shard_of_example, dtype=np.int64)
    n = shard.size
    position = np.arange(int(shard[-1]) + 1)
    if shuffle:
        rng = np.random.default_rng([seed, epoch])
        position = rng.permutation(position.size)
    # a stable sort by the shard's position lays the shards one after another
    sequence = np.argsort(position[shard], kind="stable")
    low, high = n * rank // world_size, n * (rank + 1) // world_size
    mine = sequence[low:high]
    if shuffle:
        rng = np.random.default_rng([seed, epoch, rank])
        time = position[shard[mine]] + buffer * rng.random(mine.size)
        mine = mine[np.argsort(time, kind="stable")]
    largest = -(-n // world_size)
    boundaries = _boundaries(mine.size, batch_size, -(-largest // batch_size))
    batch_of_example = np.repeat(np.arange(boundaries.size - 1), np.diff(boundaries))
    return EpochOrder(mine, boundaries, *_shard_spans(shard[mine], batch_of_example))


def _boundaries(n: int, batch_size: int, batches: int) -> npt.NDArray[np.int64]:
    """Full batches; where this rank would come one batch short of the others, the last is split."""
    i = np.arange(batches + 1)
    if n < batches:
        return np.arange(n + 1)
    return np.minimum(i * batch_size, n - (batches - i))


def _shard_spans(
    shard: npt.NDArray[np.int64], batch: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Shards by first need, with the first and last batch that needs each."""
    shards, first = np.unique(shard, return_index=True)
    last = shard.size - 1 - np.unique(shard[::-1], return_index=True)[1]
    order = np.argsort(first, kind="stable")
    return shards[order], batch[first[order]], batch[last[order]]
