"""Lazy views for offline analysis: Dask arrays and xarray datasets, aligned to the shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bertvision.featurestore.encoding import decode_numpy
from bertvision.featurestore.split import ActivationSplit

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr


def to_dask(split: ActivationSplit, layers: Sequence[int] | None = None) -> da.Array:
    """The real tokens of a split, decoded, as float32 (token, layer, hidden).

    One chunk per shard (their lengths differ: fill is left out), so that no task reads a shard
    that another one reads too. Tasks open the store by path: they can run in threads, processes
    or on other machines that see it.

    Args:
        split: a complete split.
        layers: indices of hidden states, or all.

    Raises:
        IncompleteSplitError: shards are not committed yet.
    """
    import dask.array as da

    positions = tuple(split.require_complete().layer_positions(layers))
    plan, hidden = split.plan, split.record.hidden_size
    sizes = tuple(plan.tokens_of(shard) for shard in range(plan.n_shards))
    shards = da.arange(plan.n_shards, chunks=1)
    view: da.Array = shards.map_blocks(
        _read_shard,
        str(split.place),
        str(split.tag),
        split.split,
        positions,
        dtype=np.float32,
        chunks=(sizes, (len(positions),), (hidden,)),
        new_axis=[1, 2],
        meta=np.empty((0, 0, 0), np.float32),
    )
    return view


def to_dataset(split: ActivationSplit, layers: Sequence[int] | None = None) -> xr.Dataset:
    """A split as a lazy dataset over its real tokens.

    Returns:
        ``hidden_states`` (token, layer, hidden) float32 on Dask; coordinates ``layer`` (index of
        the hidden state), ``example_of_token`` and ``position`` (token): which example a token
        belongs to, and where in it; the split's own arrays by (example) and (token).
    """
    import xarray as xr

    plan = split.plan
    n = plan.n_tokens.astype(np.int64)
    within = np.arange(plan.total_tokens) - np.repeat(np.cumsum(n) - n, n)
    real = np.repeat(plan.first_token, n) + within
    stored = [split.record.layers[p] for p in split.layer_positions(layers)]
    dims = {name: array.dims for name, array in split.record.arrays.items()}
    per_token = [name for name in dims if dims[name][0] == "token"]
    return xr.Dataset(
        {
            "hidden_states": (("token", "layer", "hidden"), to_dask(split, layers)),
            **{name: (dims[name], split.array(name)[real]) for name in per_token},
            **{name: (dims[name], values) for name, values in split.labels.items()},
            "n_tokens": ("example", plan.n_tokens),
            "example_id": ("example", plan.example_id),
        },
        coords={
            "layer": stored,
            "example_of_token": ("token", np.repeat(np.arange(len(plan)), n)),
            "position": ("token", within),
        },
        attrs={k: v for k, v in split.record.provenance.items() if v is not None},
    )


@lru_cache(maxsize=8)
def _open(store: str, tag: str, split: str) -> ActivationSplit:
    return ActivationSplit(store, tag, split)


def _read_shard(
    shard: npt.NDArray[np.int64], store: str, tag: str, name: str, positions: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    split = _open(store, tag, name)
    reader = split.open_shard(int(shard[0]))
    codes, scale = split.buffers(reader.tokens, len(positions))
    reader.read(0, len(split.plan.examples_of(int(shard[0]))), positions, codes, scale)
    reader.close()
    stats = split.stats_of(positions)
    return decode_numpy(codes.transpose(1, 0, 2), scale, stats, split.encoding)
