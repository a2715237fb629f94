"""Codes as a plain zarr array, chunked over tokens alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zarr

from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader

_CHUNK = 128


def all_layers(path: Path, split: ActivationSplit) -> zarr.Array:
    """The codes of a split as one plain zarr array whose chunks hold all layers of 128 tokens.

    Args:
        path: of the array, which is written where there is none.
        split: all of whose codes are copied, (tokens, layers, hidden).
    """
    record = split.record
    shape = (record.tokens, len(record.layers), record.hidden_size)
    if not (path / "zarr.json").exists():
        array = zarr.create_array(
            path.with_suffix(".part"),
            shape=shape,
            chunks=(_CHUNK, *shape[1:]),
            dtype="int8",
            compressors=None,
            overwrite=True,
        )
        buffer, first = np.empty((0, *shape[1:]), np.int8), 0
        for batch in ActivationLoader(split, batch_size=16, shuffle=False):
            buffer = np.concatenate([buffer, batch.codes.numpy()])
            # whole chunks only: a part of one would be read and written again
            whole = len(buffer) // _CHUNK * _CHUNK
            array[first : first + whole] = buffer[:whole]
            buffer, first = buffer[whole:], first + whole
        if len(buffer):
            array[first:] = buffer
        path.with_suffix(".part").rename(path)
    return zarr.open_array(path, mode="r")
