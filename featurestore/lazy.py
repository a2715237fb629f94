"""Lazy views for offline analysis: Dask arrays and xarray datasets, aligned to the shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        str(split.store),
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
    per_token = [a for a in split.record.arrays_sha256 if split.dims(a)[0] == "token"]
    return xr.Dataset(
        {
            "hidden_states": (("token", "layer", "hidden"), to_dask(split, layers)),
            **{a: (split.dims(a), split.array(a)[real]) for a in per_token},
            **{a: (split.dims(a), values) for a, values in split.labels.items()},
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
    return ActivationSplit(Path(store), tag, split)


def _read_shard(
    shard: npt.NDArray[np.int64], store: str, tag: str, name: str, positions: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    split = _open(store, tag, name)
    capacity, tokens = split.record.shard_tokens, split.plan.tokens_of(int(shard[0]))
    codes: npt.NDArray[Any] = np.empty(
        (capacity, len(positions), split.record.hidden_size), split.encoding.zarr_dtype
    )
    scale = np.empty(codes.shape[:2], np.float32) if split.encoding.quantised else None
    split.read_chunks(int(shard[0]), slice(0, capacity), positions, codes, scale)
    real = None if scale is None else scale[:tokens]
    return decode_numpy(codes[:tokens], real, split.stats_of(positions), split.encoding)
