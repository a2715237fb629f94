"""The one place that creates and opens Zarr arrays, with what zarr's defaults would lose.

- Inner chunks end in crc32c, so that a flipped bit raises when it is read.
- ``write_empty_chunks`` is on, or chunks of zeros would vanish and look like missing ones.
- Reading and writing goes through zarrs, the Rust codec pipeline, 2 to 4 times faster; it is
  chosen while an array is opened, so that the user's own zarr settings stay as they are.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
import zarrs  # noqa: F401  (registers its pipeline)
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec
from zarr.core.array_spec import ArrayConfigParams
from zarr.core.buffer import default_buffer_prototype

from bertvision.errors import CorruptStoreError

_PIPELINE = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
# Several threads would lay the inner chunks of a shard in the order they finish: the same data
# would give another file, and another digest, each time.
_WRITING = {**_PIPELINE, "threading.max_workers": 1}
_CONFIG: ArrayConfigParams = {"write_empty_chunks": True}
_METADATA_CHUNK = 1 << 18


def create_sharded(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    *,
    shards: tuple[int, ...],
    chunks: tuple[int, ...],
    dims: tuple[str, ...],
) -> None:
    """Create an array of whole shards: uncompressed inner chunks, each with its crc32c."""
    group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        shards=shards,
        chunks=chunks,
        serializer=_serializer(dtype),
        compressors=[Crc32cCodec()],
        filters=None,
        fill_value=0,
        dimension_names=dims,
        overwrite=True,
        config=_CONFIG,
    )


def write_array(
    group: zarr.Group, name: str, values: npt.NDArray[Any], dims: tuple[str, ...]
) -> None:
    """Create and fill an array that is written at once: zstd, then crc32c."""
    chunk = (min(len(values), _METADATA_CHUNK), *values.shape[1:])
    with zarr.config.set(_WRITING):
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunk,
            serializer=_serializer(values.dtype.name),
            compressors=[ZstdCodec(level=3), Crc32cCodec()],
            filters=None,
            fill_value=0,
            dimension_names=dims,
            overwrite=True,
            config=_CONFIG,
        )
        array[...] = values


def open_any(group: zarr.Group, name: str, *, writing: bool = False) -> zarr.Array[Any]:
    """Open an array, for writing with the same bytes for the same data.

    Raises:
        CorruptStoreError: it is missing.
    """
    # the pipeline is chosen where an array object is made
    with zarr.config.set(_WRITING if writing else _PIPELINE):
        array = group.get(name)
        if not isinstance(array, zarr.Array):
            raise CorruptStoreError(f"array {group.path}/{name} is missing from the store")
        configured: zarr.Array[Any] = array.with_config(_CONFIG)
        return configured


def open_array(group: zarr.Group, name: str, shape: tuple[int, ...], dtype: str) -> zarr.Array[Any]:
    """Open an array and check that it has the declared shape and type before anything is read.

    Raises:
        CorruptStoreError: it is missing or has another shape or type.
    """
    array = open_any(group, name)
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise CorruptStoreError(
            f"array {group.path}/{name} is {array.dtype} {array.shape}; "
            f"the ledger says {dtype} {shape}"
        )
    return array


def consolidate(root: Path) -> None:
    """Gather all metadata in the root, where xarray looks for it; bertvision itself does not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(root)


def read_into(
    array: zarr.Array[Any], selection: tuple[slice | int, ...], out: npt.NDArray[Any]
) -> None:
    """Read a selection into memory that is already there (a fresh buffer costs several times more).

    Raises:
        CorruptStoreError: the data does not pass its checksum or does not decode.
    """
    buffer = default_buffer_prototype().nd_buffer.from_numpy_array(out)
    try:
        array.get_basic_selection(selection, out=buffer)
    except Exception as error:
        # zarrs raises RuntimeError, zarr-python ValueError, a truncated file OSError or IndexError
        raise CorruptStoreError(f"array {array.path} does not decode: {error}") from error


def _serializer(dtype: str) -> BytesCodec:
    return BytesCodec(endian=None if np.dtype(dtype).itemsize == 1 else "little")


def shard_key(name: str, shard: int, ndim: int) -> Path:
    """Where the file of a shard lies in its group's folder."""
    return Path(name, "c", str(shard), *("0" for _ in range(ndim - 1)))


def digest(values: npt.NDArray[Any]) -> str:
    """sha256 of an array's little-endian bytes."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(np.ascontiguousarray(little).tobytes()).hexdigest()
