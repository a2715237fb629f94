"""The Zarr side of a split: its metadata, and the arrays that are written with the plan.

zarr writes all of it, into memory, from where it goes to the store durably. Reading does
not ask the metadata in the store, which anybody can edit: what an array is stands in the ledger. So
a declared shape of 10^15, another codec or a fill value changes nothing, and nothing is allocated
that the files there could not fill.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec
from zarr.core.array_spec import ArrayConfigParams
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from bertvision.errors import CorruptStoreError
from bertvision.featurestore.format.layout import get_encoding, transform_room
from bertvision.featurestore.format.logits import OUTPUTS
from bertvision.featurestore.format.names import CompressionName
from bertvision.featurestore.format.records import ROOT, ArrayRecord, Layout, SplitRecord
from bertvision.featurestore.format.shardfile import (
    ZSTD_LEVEL,
    decompress,
    unsealed,
)
from bertvision.featurestore.storage.storage import Storage

_CHUNK = 1 << 18  # entries of the first axis in a chunk of an array that is written at once
_MAX_CHUNK_BYTES = 1 << 25
# or chunks of zeros would vanish and look like missing ones
_CONFIG: ArrayConfigParams = {"write_empty_chunks": True}


def group_key(record: Layout) -> str:
    """Key of a split's group."""
    return f"{ROOT}/{record.tag}/{record.split}"


def array_record(values: npt.NDArray[Any], dims: tuple[str, ...]) -> ArrayRecord:
    """Describe an array."""
    return ArrayRecord.model_validate(
        {
            "dtype": values.dtype.name,
            "dims": dims,
            "shape": values.shape,
            "sha256": digest(values),
        }
    )


def array_files(
    name: str, record: ArrayRecord, values: npt.NDArray[Any] | None = None
) -> dict[str, bytes]:
    """The files of an array that is written at once: zstd, then crc32c.

    Args:
        name: Name of the array.
        record: Record of the array.
        values: its values; without them only its metadata is made.
    """
    shape, dims = tuple(record.shape), tuple(record.dims)
    if values is None:
        length = max(1, chunk_length(shape, record.dtype))  # `read_array` refuses what has none
        return {f"{name}/zarr.json": _array_metadata(shape, record.dtype, dims, length)}
    files: dict[str, Buffer] = {}
    length = max(1, chunk_length(shape, record.dtype))
    _create_array(files, name, shape, record.dtype, dims, length)[...] = values
    # zarr also makes an empty group around it, which is not the split's
    return {key: value for key, value in _files(files).items() if key != "zarr.json"}


# the arrays of the splits of a store are alike, and zarr takes a millisecond for each
@lru_cache(maxsize=1024)
def _array_metadata(
    shape: tuple[int, ...], dtype: str, dims: tuple[str, ...], length: int
) -> bytes:
    files: dict[str, Buffer] = {}
    _create_array(files, "array", shape, dtype, dims, length)
    return files["array/zarr.json"].to_bytes()


def _create_array(
    files: dict[str, Buffer],
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    dims: tuple[str, ...],
    length: int,
) -> zarr.Array[Any]:
    return zarr.create_array(
        MemoryStore(files),
        name=name,
        shape=shape,
        dtype=dtype,
        chunks=(length, *shape[1:]),
        serializer=_serializer(dtype),
        compressors=[ZstdCodec(level=3), Crc32cCodec()],
        filters=None,
        fill_value=0,
        dimension_names=dims,
        config=_CONFIG,
    )


def group_files(record: SplitRecord) -> dict[str, bytes]:
    """The metadata of a split's group and of its sharded arrays."""
    files: dict[str, Buffer] = {}
    encoding = get_encoding(record.encoding)
    attributes = {"bertvision": record.model_dump(mode="json")}
    zarr.create_group(MemoryStore(files), attributes=attributes)
    made = _files(files)
    layers = len(record.layers)
    width = encoding.codes_size(record.hidden_size)
    for name, shape in record.top.shapes.items() if record.top else ():
        made[f"{name}/zarr.json"] = _sharded_metadata(
            (record.axis, *shape),
            OUTPUTS[name],
            shards=(record.shard_tokens, *shape),
            chunks=(record.shard_tokens, *shape),
            dims=("token", "topk")[: 1 + len(shape)],
            compression="none",
        )
    if encoding.transformed:
        room = transform_room(record.shard_tokens, record.hidden_size)
        made["hidden_states/zarr.json"] = _sharded_metadata(
            (record.shards, layers, room),
            "uint8",
            shards=(1, layers, room),
            chunks=(1, 1, room),
            dims=("file", "layer", "byte"),
            compression="zstd",
        )
        return made
    made["hidden_states/zarr.json"] = _sharded_metadata(
        (record.axis, layers, width),
        encoding.zarr_dtype,
        shards=(record.shard_tokens, layers, width),
        chunks=(record.shard_tokens, 1, width),
        dims=("token", "layer", "hidden"),
        compression=record.compression,
    )
    if encoding.quantised:
        row = (layers, *encoding.scale_shape(record.hidden_size))
        shard = (record.shard_tokens, *row)
        made["scale/zarr.json"] = _sharded_metadata(
            (record.axis, *row),
            encoding.scale_dtype,
            shards=shard,
            chunks=shard,
            dims=("token", "layer", "group")[: len(shard)],
            compression="none",
        )
    return made


@lru_cache(maxsize=1024)
def _sharded_metadata(
    shape: tuple[int, ...],
    dtype: str,
    *,
    shards: tuple[int, ...],
    chunks: tuple[int, ...],
    dims: tuple[str, ...],
    compression: CompressionName,
) -> bytes:
    compressors: list[Any] = [Crc32cCodec()]
    serializer: Any = _serializer(dtype)
    if compression == "zstd":
        compressors = [ZstdCodec(level=ZSTD_LEVEL), Crc32cCodec()]
    files: dict[str, Buffer] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Numcodecs codecs are not in the Zarr")
        if compression == "pcodec":
            from zarr.codecs.numcodecs import PCodec

            serializer = PCodec()
        zarr.create_array(
            MemoryStore(files),
            name="array",
            shape=shape,
            dtype=dtype,
            shards=shards,
            chunks=chunks,
            serializer=serializer,
            compressors=compressors,
            filters=None,
            fill_value=0,
            dimension_names=dims,
            config=_CONFIG,
        )
    return files["array/zarr.json"].to_bytes()


def root_files(records: Iterable[SplitRecord]) -> dict[str, bytes]:
    """The metadata above the splits: the root's with all below it, for xarray, and the snapshots'.

    bertvision itself does not read it.
    """
    files: dict[str, Buffer] = {}
    store = MemoryStore(files)
    root = zarr.create_group(store)
    for record in records:
        root.require_group(f"{record.tag}/{record.split}")
        for key, content in split_metadata(record).items():
            files[f"{record.tag}/{record.split}/{key}"] = _buffer(content)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        warnings.filterwarnings("ignore", message="Numcodecs codecs are not in the Zarr")
        zarr.consolidate_metadata(store)
    made = _files(files)
    return {key: made[key] for key in made if key.count("/") <= 1}


def split_metadata(record: SplitRecord) -> dict[str, bytes]:
    """Every ``zarr.json`` below a split's group, by key within it."""
    files = group_files(record)
    for name, array in record.arrays.items():
        files |= array_files(name, array)
    return files


def same_metadata(one: bytes, other: bytes) -> bool:
    """Whether two ``zarr.json`` say the same of an array or group.

    Releases of zarr differ in whether a group says that it consolidates nothing: that is the same.
    """
    try:
        return bool(_parsed(one) == _parsed(other))
    except (ValueError, RecursionError):
        return False


def _parsed(content: bytes) -> Any:
    return json.loads(
        content,
        object_hook=lambda values: {
            key: value
            for key, value in values.items()
            if (key, value) != ("consolidated_metadata", None)
        },
    )


def read_array(storage: Storage, group: str, name: str, record: ArrayRecord) -> npt.NDArray[Any]:
    """Read an array that was written at once, as the ledger describes it.

    Raises:
        CorruptStoreError: files are missing or damaged, or hold other values.
    """
    folder = f"{group}/{name}/c"
    dtype = np.dtype(record.dtype)
    length = chunk_length(record.shape, record.dtype)
    if not length:
        raise CorruptStoreError(f"array {name}: no chunk is as large as {record.shape[1:]}")
    chunk_shape = (length, *record.shape[1:])
    count = -(-record.shape[0] // length)
    # before anything is allocated: each chunk must be there; one may be about to be written again
    names = {name for name in storage.names(folder) if not name.startswith(".")}
    if missing := count - len(names):
        raise CorruptStoreError(f"array {name}: {abs(missing)} chunks missing or too many")
    out: npt.NDArray[Any] = np.empty(record.shape, dtype.newbyteorder("<"))
    tail = "/0" * (len(record.shape) - 1)
    scratch = np.empty(chunk_shape, out.dtype)
    for i in range(count):
        try:
            data = np.frombuffer(
                storage.read(f"{folder}/{i}{tail}", 2 * _MAX_CHUNK_BYTES), np.uint8
            )
            decompress(unsealed(data), "zstd", scratch)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise CorruptStoreError(f"array {name}: chunk {i} is missing") from None
        except CorruptStoreError as error:
            raise CorruptStoreError(f"array {name}: chunk {i}: {error}") from None
        rows = slice(i * length, min((i + 1) * length, record.shape[0]))
        out[rows] = scratch[: rows.stop - rows.start]
    if digest(out) != record.sha256:
        raise CorruptStoreError(f"array {name} holds other values than were recorded")
    return out


def chunk_length(shape: tuple[int, ...], dtype: str) -> int:
    """Entries of the first axis in a chunk of an array that is written at once.

    As many as a reader unpacks at once; 0 where not even one entry is so small.
    """
    row = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    return min(shape[0], _CHUNK, _MAX_CHUNK_BYTES // row)


def digest(values: npt.NDArray[Any]) -> str:
    """sha256 of an array's little-endian bytes."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(np.ascontiguousarray(little).data).hexdigest()


def _serializer(dtype: str) -> BytesCodec:
    return BytesCodec(endian=None if np.dtype(dtype).itemsize == 1 else "little")


def _files(made: Mapping[str, Buffer]) -> dict[str, bytes]:
    return {key: value.to_bytes() for key, value in made.items()}


def _buffer(content: bytes) -> Buffer:
    from zarr.core.buffer import default_buffer_prototype

    return default_buffer_prototype().buffer.from_bytes(content)
