"""Choosing the tokens of a split that are streamed: all real ones, or those not left out."""

from __future__ import annotations

import operator
from collections.abc import Collection
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
        """It is the same of equal choices of equally many tokens."""
        digest = xxhash.xxh3_128(self.tokens.tobytes())
        if self.packed is not None:
            digest.update(self.packed.tobytes())
        return digest.hexdigest()


def kept_tokens(
    split: SplitReader,
    without: Collection[int] = (),
    keep: str | npt.ArrayLike | None = None,
) -> KeptTokens:
    """Choose the tokens of a split.

    Args:
        split: with the tokens.
        without: vocabulary indices that are left out, as ``input_ids`` has them.
        keep: a per-token array of the split by its name, or such an array, (token axis,) as
            `SplitReader.array` gives one: tokens are left out where it is 0 or False.

    Raises:
        UnknownNameError: the split has no such array, or no ``input_ids``.
        InputError: ``without`` or ``keep`` is something else, or no token is left.
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
    if not len(left_out) and keep is None:
        return KeptTokens(real)
    axis = plan.n_shards, plan.shard_tokens
    kept = np.arange(plan.shard_tokens) < real[:, None]  # (shards, shard_tokens)
    if len(left_out):
        kept &= ~np.isin(split.array("input_ids").reshape(axis), left_out)
    if keep is not None:
        given = split.array(keep) if isinstance(keep, str) else np.asarray(keep)
        if given.shape != (kept.size,) or given.dtype.kind not in "biuf":
            raise InputError(
                f"keep is {given.dtype} of shape {given.shape}: give a number or bool for each of "
                f"the {kept.size:,} places on the token axis of {split.name}, as "
                "split.array('input_ids') does"
            )
        if missing := int(np.isnan(given[kept.reshape(-1)]).sum()):
            raise InputError(
                f"keep has NaN for {counted(missing, 'token')} of {split.name}: give 0 or False "
                "for a token that is left out, any other number for one that is kept"
            )
        kept &= given.reshape(axis) != 0
    chosen = KeptTokens(real, np.packbits(kept, axis=1))
    if not chosen.counts.any():
        raise InputError(
            f"all {counted(int(real.sum()), 'token')} of {split.name} are left out: "
            "name fewer in without, or another array in keep"
        )
    return chosen


def tokens_of_shards(plan: ShardPlan) -> npt.NDArray[np.int64]:
    """Real tokens of each shard, (shards,)."""
    return np.add.reduceat(plan.n_tokens.astype(np.int64), plan.shard_starts[:-1])
