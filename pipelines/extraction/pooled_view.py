"""Poolings of stored tokens by Dask: what `extract --pool` writes, without the encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, UnknownNameError
from bertvision.featurestore.lazy import SplitSource, decoded_layers, map_shards
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.encoders.token_pooling import pool_numpy
from bertvision.pipelines.tasks.registry import POOLINGS, TokenPooling

if TYPE_CHECKING:
    import dask.array as da


def pool_split(
    split: ActivationSplit, poolings: Sequence[TokenPooling], layers: Sequence[int] | None = None
) -> da.Array:
    """Poolings of the windows of a split that holds all tokens.

    Equal to the pooled extraction of the same snapshot but for the error of the split's encoding;
    the examples are in the split's own stored order (``split.plan.example_id``).

    Args:
        split: a complete split of all tokens.
        poolings: of cls, sep, mean and max; the order of the axis. Of an encoder whose windows do
            not begin or end with a special token, cls or sep is a token like any other (see
            `token_pooling.check_poolings`).
        layers: indices of hidden states, or all.

    Returns:
        Lazy float32 (example, pooling, layer, hidden), one task per shard.

    Raises:
        UnknownNameError: there is no such pooling.
        InputError: no pooling, one twice, or the split is pooled already.
        IncompleteSplitError: shards are not committed yet.
    """
    for pooling in poolings:
        if pooling not in POOLINGS:
            raise UnknownNameError(f"no pooling {pooling!r}: there are {', '.join(POOLINGS)}")
    if not poolings or len(set(poolings)) < len(poolings):
        raise InputError(f"poolings {list(poolings)}: name at least one, each once")
    held = split.record.provenance.get("tokens", "all")
    if held != "all":
        raise InputError(
            f"{split.name} holds one vector per window, its {held} pooling: take the split of all "
            "tokens, or read this one as it is"
        )
    positions = tuple(split.layer_positions(layers))
    sizes = tuple(len(split.plan.examples_of(shard)) for shard in range(split.plan.n_shards))
    tail = (len(poolings), len(positions))
    return map_shards(split, _pool_shard, positions, tuple(poolings), chunks=(sizes,), tail=tail)


def _pool_shard(
    shard: npt.NDArray[np.int64],
    source: SplitSource,
    positions: tuple[int, ...],
    poolings: tuple[TokenPooling, ...],
) -> npt.NDArray[np.float32]:
    """(examples of the shard, poolings, layers, hidden)."""
    split, number = source.open(), int(shard[0])
    examples = split.plan.examples_of(number)
    lengths = split.plan.n_tokens[examples.start : examples.stop]
    shape = (len(examples), len(poolings), len(positions), split.record.hidden_size)
    pooled = np.empty(shape, np.float32)
    for i, states in enumerate(decoded_layers(split, number, positions)):
        for p, pooling in enumerate(poolings):
            pooled[:, p, i] = pool_numpy(states, lengths, pooling)
    return pooled
