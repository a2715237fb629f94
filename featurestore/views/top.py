"""The tokens that lie furthest along a direction, of a whole split: streamed, exact."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.featurestore.lazy import decoded_layers
from bertvision.featurestore.reader import SplitReader

Floats = npt.NDArray[np.float64]


class TopToken(NamedTuple):
    """A token that lies far along a direction."""

    score: float
    """Its state times the direction, or its value of the channel."""
    example: int
    """Its example, by the position in the split."""
    position: int
    """Its place in the example."""


def as_direction(direction: npt.ArrayLike, hidden: int) -> Floats:
    """A direction of the hidden space, checked.

    Args:
        direction: (hidden,) numbers, or the index of a channel, negative from the end.
        hidden: Width of the hidden states.

    Returns:
        (hidden,) float64; of a channel one at its index and zero elsewhere.

    Raises:
        InputError: the direction has another shape, is zero or not finite, or there is no such
            channel.
    """
    try:
        given = np.asarray(direction)
        values: Floats = given.astype(np.float64)
    except (TypeError, ValueError):  # ragged, or no numbers
        raise InputError(
            f"direction is {type(direction).__name__}: give {hidden} numbers, or the index of a "
            "channel"
        ) from None
    if given.ndim == 0:
        if given.dtype.kind not in "iu" or not -hidden <= int(given) < hidden:
            raise InputError(f"channel {given}: give a whole number from 0 to {hidden - 1}")
        values = np.zeros(hidden)
        values[int(given)] = 1
        return values
    if given.shape != (hidden,):
        raise InputError(
            f"direction of shape {given.shape}: the hidden states have {hidden} channels, so give "
            f"({hidden},)"
        )
    if not np.isfinite(values).all() or not values.any():
        raise InputError("the direction is zero, or holds NaN or infinity: give finite numbers")
    return values


def top_tokens(
    split: SplitReader, directions: Floats, position: int, k: int
) -> list[list[TopToken]]:
    """The tokens with the largest scores along each of some directions, in one pass.

    A shard is in memory at a time. Sums are in float64 and in the same order for every token, so
    that equal states have equal scores; of equal scores the token that is stored first comes first.
    A score that is NaN is left out.

    Args:
        split: Split that is whole; its tokens may be shuffled.
        directions: (n, hidden)
        position: Place of the layer on the stored layer axis.
        k: Most tokens of a direction.

    Returns:
        For each direction its tokens, the largest score first; fewer than ``k`` where there are no
        more.

    Raises:
        IncompleteSplitError: shards are not committed yet.
        InputError: ``k`` is below 1.
        CorruptStoreError: what is stored is damaged.
    """
    if k < 1:
        raise InputError(f"k is {k}: give 1 or more")
    best = [(np.empty(0), np.empty((2, 0), np.int64)) for _ in directions]
    channels = [_channel(direction) for direction in directions]
    for shard in range(split.require_complete(any_order=True).plan.n_shards):
        (states,) = decoded_layers(split, shard, [position], any_order=True)
        places = np.stack(split.token_places(shard))
        doubles = states.astype(np.float64) if None in channels else np.empty(0)
        for i, (direction, channel) in enumerate(zip(directions, channels, strict=True)):
            if channel is not None:
                scores = states[:, channel].astype(np.float64)
            else:  # not BLAS, whose sums depend on the place of a row among the others
                scores = np.einsum("th,h->t", doubles, direction)
            before, of_before = best[i]
            merged = np.concatenate([before, scores])
            rows = np.argsort(-merged, kind="stable")[:k]
            rows = rows[~np.isnan(merged[rows])]
            best[i] = merged[rows], np.concatenate([of_before, places], axis=1)[:, rows]
    return [
        [TopToken(*row) for row in zip(scores.tolist(), *places.tolist(), strict=True)]
        for scores, places in best
    ]


def _channel(direction: Floats) -> int | None:
    """The channel that a direction is, if it is one: its values need no sum."""
    (used,) = np.nonzero(direction)
    return int(used[0]) if len(used) == 1 and direction[used[0]] == 1 else None
