"""From the arguments of `ActivationStore.writer` to a writer: what is given, checked."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from pydantic import ValidationError

from bertvision.errors import InputError
from bertvision.featurestore.creation import library_versions
from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.names import NonFinite, SnapshotTag, check_name
from bertvision.featurestore.format.plan import SHARD_TOKENS
from bertvision.featurestore.format.records import FEATURES, FORMAT, GROWING
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.writing.appending import ActivationWriter
from bertvision.featurestore.writing.columns import as_whole
from bertvision.featurestore.writing.growing import GrowingLedger, GrowingRecord
from bertvision.featurestore.writing.origin import tokenizer_digest

_PARTS = 1 << 16


def open_appending(
    storage: Storage,
    tag: str,
    split: str,
    *,
    hidden_size: int,
    layers: Sequence[int | str],
    encoding: str,
    compression: str,
    shard_tokens: int | None,
    provenance: Mapping[str, object],
    tokenizer: Any,
    channel_stats: tuple[Any, Any] | None,
    nonfinite: NonFinite,
    part: int,
) -> ActivationWriter:
    """A writer; arguments and errors are those of `ActivationStore.writer`."""
    if not isinstance(tag, str):
        raise InputError(f"tag is {tag!r}: give a text such as 0e")
    tag = SnapshotTag(tag)
    check_name(split, "split")
    kind = get_encoding(encoding)
    if nonfinite not in get_args(NonFinite):
        raise InputError(f"nonfinite is {nonfinite!r}: choose error or record")
    hidden_size = as_whole("hidden_size", hidden_size)
    shard_tokens = as_whole("shard_tokens", SHARD_TOKENS if shard_tokens is None else shard_tokens)
    if not 0 <= (part := as_whole("part", part)) < _PARTS:
        raise InputError(f"part is {part}: give a number from 0 to {_PARTS - 1}")
    if compression == "pcodec" and np.dtype(kind.zarr_dtype).itemsize == 1:
        raise InputError(
            f"pcodec takes values of two bytes and more: store {kind.name} plain or with zstd"
        )
    positions, origin = _layers(layers, provenance)
    if tokenizer is not None:
        origin["tokenizer_sha256"] = tokenizer_digest(tokenizer)
    try:
        wanted = GrowingRecord(
            format=FORMAT,
            requires=tuple(sorted(FEATURES | {GROWING})),
            tag=tag,
            split=split,
            encoding=kind.name,
            compression=compression,  # type: ignore[arg-type]  # it is checked here
            layers=positions,
            hidden_size=hidden_size,
            shard_tokens=shard_tokens,
            provenance=origin,
            versions=library_versions(),
            writing=secrets.token_hex(16),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the split"
        raise InputError(f"{tag}/{split} cannot be stored: {field}: {first['msg']}") from None
    stats = None
    if channel_stats is not None:
        stats = _stats(channel_stats, (len(positions), hidden_size), kind.quantised)
    ledger = GrowingLedger(storage, tag, split)
    return ActivationWriter(ledger, wanted, stats=stats, nonfinite=nonfinite, part=part)


def _layers(
    layers: Sequence[int | str], provenance: Mapping[str, object]
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Indices of the layers, and the provenance with their names, where they have some."""
    if not isinstance(provenance, Mapping):
        raise InputError(f"provenance is {provenance!r}: give what it was made from, by name")
    origin = dict(provenance)
    given = [] if isinstance(layers, str) or not isinstance(layers, Iterable) else list(layers)
    named = [layer for layer in given if isinstance(layer, str)]
    if not given or (named and len(named) < len(given)):
        raise InputError(
            f"layers are {layers!r}: give a list of indices, or one of names, of one layer at least"
        )
    if not named:
        return tuple(as_whole("a layer", layer) for layer in given), origin
    if len(set(named)) < len(named) or "layer_names" in origin:
        raise InputError(f"layers are {layers!r}: name each once, and only here")
    if not all(name and name.isprintable() for name in named):
        raise InputError(f"layers are {layers!r}: use characters that can be printed")
    origin["layer_names"] = json.dumps(named)
    return tuple(range(len(named))), origin


def _stats(given: tuple[Any, Any], shape: tuple[int, int], quantised: bool) -> ChannelStats:
    """Channel statistics that were given."""
    if not quantised:
        raise InputError("channel_stats are for int8 and int4: leave them out")
    try:
        mean, std = (torch.as_tensor(of, dtype=torch.float32).cpu().clone() for of in given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"channel_stats are no pair of arrays: {error}") from None
    if not mean.shape == std.shape == shape:
        raise InputError(
            f"channel_stats have shapes {tuple(mean.shape)} and {tuple(std.shape)}: give mean and "
            f"deviation of (layers, hidden) = {shape}"
        )
    if not bool(mean.isfinite().all() and std.isfinite().all() and (std > 0).all()):
        raise InputError("channel_stats hold NaN, infinity or a deviation that is not above 0")
    return ChannelStats(mean, std)
