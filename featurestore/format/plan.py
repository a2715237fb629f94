"""ShardPlan: token lengths → order, whole-example shards, offsets. Pure arithmetic, no IO.

Token lengths are known before BERT runs, so where every example will lie is computed up front:
extraction of a shard is then a function of (snapshot, shard) alone, and can be resumed, repeated
and spread over workers.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bertvision.errors import CorruptStoreError, InputError

SHARD_TOKENS = 4096
"""Tokens per shard: 105 MB at BERT-large in int8, large enough for sequential reads, small enough
that losing one to a crash costs seconds, and that a shuffle buffer of several fits in memory."""

_WINDOW = 256
_PLACED_AT_ONCE = 1 << 13  # examples


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Where each example lies. Examples are in stored order; a shard never splits one.

    Attributes:
        example_id: (examples,) int64, the row of each stored example in the caller's data.
        n_tokens: (examples,) int32, real tokens.
        first_token: (examples,) int64, offset on the token axis.
        shard: (examples,) int32, non-decreasing.
        shard_tokens: capacity of a shard; what examples leave of it is fill.
        seed: Seed of the permutation; None where the caller's order was kept.
    """

    example_id: npt.NDArray[np.int64]
    n_tokens: npt.NDArray[np.int32]
    first_token: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int32]
    shard_tokens: int
    seed: int | None

    @classmethod
    def make(
        cls, lengths: npt.ArrayLike, *, shard_tokens: int = SHARD_TOKENS, seed: int | None = None
    ) -> ShardPlan:
        """Plan the shards of examples with these token lengths.

        Args:
            lengths: (examples,) real tokens of each example, in the caller's order.
            shard_tokens: capacity of a shard.
            seed: permute the examples with it (training splits), which also lets shards be filled
                to the brim, or None to keep the order.

        Raises:
            InputError: no examples, a length below 1, or one above ``shard_tokens``.
        """
        n = np.asarray(lengths, dtype=np.int64)
        if n.ndim != 1 or n.size == 0:
            raise InputError("there are no examples to plan: the split is empty")
        if n.min() < 1 or n.max() > shard_tokens:
            bad = int(np.argmax((n < 1) | (n > shard_tokens)))
            raise InputError(
                f"example {bad} has {n[bad]} tokens: a shard holds examples of 1 to {shard_tokens}"
            )
        order = np.arange(n.size)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(n.size)
            order = order[_pack(n[order], shard_tokens)]
        n = n[order]
        shard, offset = _fill_shards(n, shard_tokens)
        return cls(
            example_id=order.astype(np.int64),
            n_tokens=n.astype(np.int32),
            first_token=shard * shard_tokens + offset,
            shard=shard.astype(np.int32),
            shard_tokens=shard_tokens,
            seed=seed,
        )

    @classmethod
    def fitted(
        cls, lengths: npt.ArrayLike, *, shard_tokens: int = SHARD_TOKENS, seed: int | None = None
    ) -> ShardPlan:
        """Plan as many shards as `make` does, each as small as they then can be.

        A shard takes its capacity on the disk whatever it holds, and the last one may be nearly
        empty; with a smaller capacity all of them are nearly full.

        Args:
            lengths: (examples,) real tokens of each example, in the caller's order.
            shard_tokens: Largest capacity of a shard.
            seed: Seed of the permutation, as of `make`.

        Raises:
            InputError: As of `make`.
        """
        plan = cls.make(lengths, shard_tokens=shard_tokens, seed=seed)
        shards = plan.n_shards
        n = np.asarray(lengths, dtype=np.int64)
        if seed is not None:
            n = n[np.random.default_rng(seed).permutation(n.size)]
        low, high = max(int(n.max()), -(-int(n.sum()) // shards)), shard_tokens
        while low < high:  # the smallest capacity at which there are no more shards
            middle = (low + high) // 2
            if _fill_shards(n, middle)[0][-1] < shards:
                high = middle
            else:
                low = middle + 1
        smaller = cls.make(lengths, shard_tokens=high, seed=seed)
        return smaller if smaller.n_shards <= shards else plan

    @property
    def fill(self) -> float:
        """Share of the shards' capacity that no token takes, from 0 to 1."""
        return 1 - self.total_tokens / (self.n_shards * self.shard_tokens)

    def check(self) -> None:
        """Check that the arrays of a plan that was read from a store fit together.

        Raises:
            CorruptStoreError: they do not.
        """
        n, shard = self.n_tokens.astype(np.int64), self.shard.astype(np.int64)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(shard)) + 1])
        offset = np.cumsum(n) - n
        offset -= np.repeat(offset[starts], np.diff(np.append(starts, n.size)))
        if not (
            n.min() >= 1
            and shard[0] == 0
            and np.all((np.diff(shard) == 0) | (np.diff(shard) == 1))
            and np.array_equal(self.first_token, shard * self.shard_tokens + offset)
            and np.all(offset + n <= self.shard_tokens)
        ):
            raise CorruptStoreError("the plan's arrays contradict each other")

    def __len__(self) -> int:
        return len(self.n_tokens)

    @property
    def n_shards(self) -> int:
        """How many shards there are."""
        return int(self.shard[-1]) + 1

    @cached_property
    def shard_starts(self) -> npt.NDArray[np.int64]:
        """(shards + 1,) first stored example of each shard, then the number of examples."""
        return np.searchsorted(self.shard, np.arange(self.n_shards + 1)).astype(np.int64)

    def examples_of(self, shard: int) -> range:
        """The stored examples of a shard: a run of consecutive ones.

        Raises:
            InputError: there is no such shard.
        """
        if not 0 <= shard < self.n_shards:
            raise InputError(f"there is no shard {shard}: the plan has {self.n_shards}, from 0")
        return range(int(self.shard_starts[shard]), int(self.shard_starts[shard + 1]))

    def tokens_of(self, shard: int) -> int:
        """Real tokens in a shard; the rest of its capacity is fill."""
        last = self.examples_of(shard)[-1]
        return int(self.first_token[last] + self.n_tokens[last]) - shard * self.shard_tokens

    def rows_of(self, examples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the token axis that examples have, one example after another: (tokens,)."""
        lengths = self.n_tokens[examples].astype(np.int64)
        rows = np.repeat(self.first_token[examples] - np.cumsum(lengths) + lengths, lengths)
        return np.asarray(rows + np.arange(len(rows)))

    @cached_property
    def total_tokens(self) -> int:
        """Real tokens in all shards."""
        return int(self.n_tokens.sum())

    @cached_property
    def digest(self) -> str:
        """sha256 over everything the plan says: equal plans place every token equally."""
        h = hashlib.sha256(f"{self.shard_tokens}".encode())
        for array in (self.example_id, self.n_tokens, self.first_token):
            h.update(np.ascontiguousarray(array).tobytes())
        return h.hexdigest()

    def place(self, values: npt.NDArray[np.generic], fill: int) -> npt.NDArray[np.generic]:
        """Lay ragged per-token values of the caller's order out on the stored token axis.

        Args:
            values: (tokens, …), examples concatenated in the caller's order, those that the plan
                has.
            fill: the value of the shards' tails.

        Returns:
            (n_shards · shard_tokens, …) in stored order.
        """
        lengths = np.zeros(int(self.example_id.max()) + 1, dtype=np.int64)
        lengths[self.example_id] = self.n_tokens
        starts = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        out = np.full((self.n_shards * self.shard_tokens, *values.shape[1:]), fill, values.dtype)
        sources = starts[self.example_id]
        for first in range(0, len(self), _PLACED_AT_ONCE):  # or indices would be twice the values
            part = slice(first, first + _PLACED_AT_ONCE)
            n = self.n_tokens[part].astype(np.int64)
            within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
            target = np.repeat(self.first_token[part], n) + within
            out[target] = values[np.repeat(sources[part], n) + within]
        return out


def _fill_shards(
    n: npt.NDArray[np.int64], capacity: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Greedy in order: an example that does not fit the current shard opens the next one."""
    end = np.cumsum(n)
    shard = np.empty(n.size, dtype=np.int64)
    offset = np.empty(n.size, dtype=np.int64)
    first, i = 0, 0
    while first < n.size:
        base = end[first] - n[first]
        last = int(np.searchsorted(end, base + capacity, side="right"))
        shard[first:last] = i
        offset[first:last] = end[first:last] - n[first:last] - base
        first, i = last, i + 1
    return shard, offset


def _pack(n: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """An order in which `_fill_shards` leaves hardly any fill.

    Examples come as they are given until a shard has room for two or so; these are the pair among
    the next `_WINDOW` that fits best. At SQuAD's lengths 0.2 % of a shard is fill instead of 2.4 %.
    """
    longest = int(n.max())
    order: list[int] = []
    upcoming = iter(range(n.size))
    window = list(itertools.islice(upcoming, _WINDOW))
    space = capacity
    while window:
        chosen = [0] if space > 2 * longest else _best_pair(n[window], space)
        # from the back, so that the first position stays right
        for i in sorted(chosen, reverse=True):
            example = window.pop(i)
            order.append(example)
            space -= int(n[example])
        window += itertools.islice(upcoming, len(chosen))
        if not chosen:
            space = capacity
    return np.array(order)


def _best_pair(n: npt.NDArray[np.int64], space: int) -> list[int]:
    """Positions of the two lengths that fill the space best, of one where no two fit, or none."""
    by_length = np.argsort(n, kind="stable")
    lengths = n[by_length]
    # for each length the longest other one that fits beside it
    partner = np.searchsorted(lengths, space - lengths, side="right") - 1
    partner = np.minimum(partner, np.arange(n.size) - 1)
    both = np.where(partner >= 0, lengths + lengths[partner], 0)
    best = int(both.argmax())
    if both[best]:
        return [int(by_length[best]), int(by_length[partner[best]])]
    fits = int(np.searchsorted(lengths, space, side="right"))
    return [int(by_length[fits - 1])] if fits else []
