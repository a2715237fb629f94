"""The tokens of a split that are streamed, and their order: a bounded shuffle that is arithmetic.

Shards come in a random order, and the tokens of each are dealt out at random, in equal parts, to
``buffer`` consecutive *groups*. A group is then permuted, and drawn from its beginning to its end.
So while group g is drawn, the shards at positions g to g + buffer − 1 are needed and no others; the
first group waits until the buffer is full and the last takes what is left, so that the ends of an
epoch are as well mixed as its middle. Where an epoch has no more shards than the buffer, it is one
group: a permutation of all its tokens.

How many tokens a group has follows from counts alone, so that a stream is resumed anywhere in an
epoch without drawing the part before.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.reader import SplitReader


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens of each shard that are streamed.

    Attributes:
        tokens: (shards,) int64 real tokens of each shard; what follows them is fill.
        packed: (shards, bytes) uint8, a bit for each place of a shard, set where its token is
            kept; None where every real token is. A bit, because a split may have 10⁹ tokens.
    """

    tokens: npt.NDArray[np.int64]
    packed: npt.NDArray[np.uint8] | None = None

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """(shards,) kept tokens of each shard."""
        if self.packed is None:
            return self.tokens
        counts: npt.NDArray[np.int64] = np.bitwise_count(self.packed).sum(axis=1, dtype=np.int64)
        return counts

    def of_shard(self, shard: int) -> npt.NDArray[np.int64]:
        """The kept tokens of a shard, counted from its beginning, ascending."""
        if self.packed is None:
            return np.arange(self.tokens[shard])
        return np.flatnonzero(np.unpackbits(self.packed[shard]))

    @cached_property
    def digest(self) -> str:
        """Digest, the same for equal choices of equally many tokens."""
        digest = xxhash.xxh3_128(self.tokens.tobytes())
        if self.packed is not None:
            digest.update(self.packed.tobytes())
        return digest.hexdigest()


def kept_tokens(
    split: SplitReader,
    without: Collection[int] = (),
    keep: str | npt.ArrayLike | None = None,
    examples: npt.ArrayLike | None = None,
) -> KeptTokens:
    """Choose the tokens of a split.

    Args:
        split: Split with the tokens.
        without: vocabulary indices that are left out, as ``input_ids`` has them.
        keep: a per-token array of the split by its name, or such an array, (token axis,) as
            `SplitReader.array` gives one: tokens are left out where it is 0 or False.
        examples: (n,) positions of the examples whose tokens are chosen; None is all.

    Raises:
        UnknownNameError: the split has no such array, or no ``input_ids``.
        InputError: ``without``, ``keep`` or ``examples`` is something else, or no token is left.
    """
    plan = split.plan
    real = tokens_of_shards(plan)
    try:
        left_out = np.array([operator.index(index) for index in without], np.int64)
    except (TypeError, OverflowError):
        raise InputError(
            f"without is {without!r}: give vocabulary indices, such as [101, 102]"
        ) from None
    if len(left_out) and (left_out.min() < 0 or left_out.max() >= 1 << 31):
        wrong = next(index for index in left_out.tolist() if not 0 <= index < 1 << 31)
        raise InputError(
            f"without has {wrong}: give vocabulary indices, from 0 to 2^31 - 1, such as [101, 102]"
        )
    if not len(left_out) and keep is None and examples is None:
        return KeptTokens(real)
    axis = plan.n_shards, plan.shard_tokens
    is_kept = np.arange(plan.shard_tokens) < real[:, None]  # (shards, shard_tokens)
    if len(left_out):
        is_kept &= ~np.isin(split.array("input_ids").reshape(axis), left_out)
    if keep is not None:
        given = split.array(keep) if isinstance(keep, str) else np.asarray(keep)
        if given.shape != (is_kept.size,) or given.dtype.kind not in "biuf":
            raise InputError(
                f"keep is {given.dtype} of shape {given.shape}: give a number or bool for each of "
                f"the {is_kept.size:,} places on the token axis of {split.name}, as "
                "split.array('input_ids') does"
            )
        if missing := int(np.isnan(given[is_kept.reshape(-1)]).sum()):
            raise InputError(
                f"keep has NaN for {counted(missing, 'token')} of {split.name}: give 0 or False "
                "for a token that is left out, any other number for one that is kept"
            )
        is_kept &= given.reshape(axis) != 0
    if examples is not None:
        wanted = _example_mask(split, examples)
        for shard in range(plan.n_shards):
            own, _ = split.token_places(shard)
            is_kept[shard, : len(own)] &= wanted[own]
    chosen = KeptTokens(real, np.packbits(is_kept, axis=1))
    if not chosen.counts.any():
        raise InputError(
            f"all {counted(int(real.sum()), 'token')} of {split.name} are left out: "
            "name fewer in without, or others in keep or examples"
        )
    return chosen


def _example_mask(split: SplitReader, examples: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """(examples,) whether each is named."""
    total = split.record.examples
    try:
        given = np.asarray(examples)
    except ValueError:  # lists of several lengths
        given = np.zeros((0, 0))
    if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given):
        raise InputError(
            f"examples is {given.dtype} of shape {given.shape}: give positions of examples of "
            f"{split.name}, from 0 to {total - 1}, such as those of split.hold_out(0.05)"
        )
    if given.min() < 0 or given.max() >= total:
        wrong = given[(given < 0) | (given >= total)][0]
        raise InputError(f"examples has {wrong}: {split.name} has 0 to {total - 1}")
    mask = np.zeros(total, bool)
    mask[given] = True
    return mask


def tokens_of_shards(plan: ShardPlan) -> npt.NDArray[np.int64]:
    """Real tokens of each shard, (shards,)."""
    return np.add.reduceat(plan.n_tokens.astype(np.int64), plan.shard_starts[:-1])


_OF_SHARD, _OF_GROUP = 1, 2  # part the seeds: numpy fills a short one up with zeros


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """The tokens of one rank in one epoch.

    A *piece* is what a rank draws of a shard: all of it, but for the first and the last piece.

    Attributes:
        shards: (pieces,) int64 the shard of each piece, in the order they are needed.
        begin: (pieces,) int64 first token of each piece among the shard's kept ones, permuted.
        end: (pieces,) int64 the one after the last.
        buffer: pieces that are mixed at a time.
        seed: Seed of the epoch, or None: tokens come in stored order.
        rank: Rank of this process, which mixes in its own way.
        mix: number of the way in which the tokens of the shards are mixed.
    """

    shards: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    buffer: int
    seed: tuple[int, int] | None
    rank: int
    mix: int

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return max(1, len(self.shards) - self.buffer + 1)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """(groups + 1,) tokens that are drawn before each group, and in all."""
        pieces = len(self.shards)
        counts = self.end - self.begin
        of_window = np.zeros(pieces + self.buffer - 1, np.int64)
        for part in range(self.buffer):
            of_window[part : part + pieces] += self._cut(counts, part + 1) - self._cut(counts, part)
        group = np.clip(np.arange(of_window.size) - self.buffer + 1, 0, self.groups - 1)
        sizes = np.bincount(group, of_window, self.groups).astype(np.int64)
        return np.concatenate([[0], np.cumsum(sizes)])

    def group_of(self, drawn: int) -> int:
        """The group that the next token comes from, after so many of the epoch."""
        return int(np.searchsorted(self.starts, drawn, side="right")) - 1

    def pieces_of(self, group: int) -> range:
        """The pieces that a group is drawn from."""
        return range(group, min(group + self.buffer, len(self.shards)))

    def part(self, group: int, piece: int) -> slice:
        """The tokens of a piece that come in a group, in the order of `permutation`."""
        first = 0 if group == 0 else group + self.buffer - 1 - piece
        last = self.buffer if group == self.groups - 1 else group + self.buffer - piece
        count = int(self.end[piece] - self.begin[piece])
        return slice(count * first // self.buffer, count * last // self.buffer)

    def permutation(self, piece: int, tokens: int) -> npt.NDArray[np.int64]:
        """The kept tokens of its shard that a piece has, in the order they are dealt out.

        Args:
            piece: its number.
            tokens: kept ones of the shard. All ranks permute them alike, so that no token of a
                shard that two of them read comes twice.
        """
        whole = np.arange(tokens)
        if self.seed is not None:
            rng = np.random.default_rng([*self.seed, _OF_SHARD, self.mix, int(self.shards[piece])])
            whole = rng.permutation(tokens)
        return whole[self.begin[piece] : self.end[piece]]

    def mixed(self, group: int) -> npt.NDArray[np.int64] | slice:
        """How the tokens of a group, piece after piece, are permuted."""
        if self.seed is None:
            return slice(None)
        rng = np.random.default_rng([*self.seed, _OF_GROUP, self.mix, group, self.rank])
        return rng.permutation(int(self.starts[group + 1] - self.starts[group]))

    def _cut(self, counts: npt.NDArray[np.int64], part: int) -> npt.NDArray[np.int64]:
        return counts * part // self.buffer


def token_order(
    counts: npt.NDArray[np.int64],
    *,
    epoch: int,
    seed: int | None,
    buffer: int,
    rank: int = 0,
    world_size: int = 1,
    mix: int = 0,
) -> TokenOrder:
    """The order of one rank's tokens in one epoch; over all ranks each token comes once.

    Ranks take equal, contiguous pieces of the sequence of shards (they differ by at most one
    token), so that at most one shard is read by two neighbours.

    Args:
        counts: (shards,) tokens of each shard that are streamed.
        epoch: Epoch, from 0.
        seed: Seed, from 0, or None for the stored order.
        buffer: shards whose tokens are mixed.
        rank: Rank of this process.
        world_size: Number of processes that share the epoch.
        mix: orders of one seed need the same shards at the same time; where this differs, they mix
            the tokens of these in other ways.
    """
    sequence = np.arange(counts.size)
    if seed is not None:
        sequence = np.random.default_rng([seed, epoch]).permutation(counts.size)
    ends = np.cumsum(counts[sequence])
    low, high = rank_bounds(int(ends[-1]), rank, world_size)
    begin = np.maximum(low - (ends - counts[sequence]), 0)
    end = np.minimum(high - (ends - counts[sequence]), counts[sequence])
    mine = begin < end
    return TokenOrder(
        shards=sequence[mine],
        begin=begin[mine],
        end=end[mine],
        buffer=buffer if seed is not None else 1,
        seed=None if seed is None else (seed, epoch),
        rank=rank,
        mix=mix,
    )


def rank_bounds(tokens: int, rank: int, world_size: int) -> tuple[int, int]:
    """The first token of an epoch that a rank draws, and the one after its last."""
    return tokens * rank // world_size, tokens * (rank + 1) // world_size


@dataclass(frozen=True)
class TokenCuts:
    """How the tokens of one rank are cut into batches.

    Attributes:
        tokens: Tokens of an epoch, of this rank.
        most: Tokens of the rank that has most.
        batch_size: tokens of a batch.
        endless: epochs follow each other without a seam and every batch is full. Otherwise a batch
            is of one epoch, its last one smaller, and all ranks have equally many.

    Raises:
        InputError: a rank has no token.
    """

    tokens: int
    most: int
    batch_size: int
    endless: bool

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(
                f"there are fewer tokens than ranks: the largest share is {self.most}, and this "
                "rank has none; give a smaller world_size"
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-self.most // self.batch_size)

    def place(self, batch: int) -> tuple[int, int]:
        """The epoch of a batch, counted from the first of all, and the tokens drawn before it."""
        if self.endless:
            return divmod(batch * self.batch_size, self.tokens)
        epoch, i = divmod(batch, len(self))
        return epoch, self._boundary(i)

    def most_pieces(self, counts: npt.NDArray[np.int64]) -> int:
        """Shards that this rank needs in an epoch, whatever their order: no more than these.

        All but the first and the last are its own, so they are the most where they are smallest.

        Args:
            counts: (shards,) tokens of each shard that are streamed.
        """
        smallest = np.cumsum(np.sort(counts[counts > 0]))
        own = int(np.searchsorted(smallest, self.tokens, side="right"))
        return min(own + 2, len(smallest))

    def sizes(self, batch: int) -> Iterator[int]:
        """Tokens of the batches from one on: without end, or to the end of its epoch."""
        while self.endless:
            yield self.batch_size
        for i in range(batch % len(self), len(self)):
            if size := self._boundary(i + 1) - self._boundary(i):
                yield size

    def _boundary(self, i: int) -> int:
        """Tokens before batch i of an epoch: full ones, unless later ones would have none."""
        return min(i * self.batch_size, max(self.tokens - (len(self) - i), min(i, self.tokens)))
