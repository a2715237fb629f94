"""The bytes of a shard file: a Zarr v3 shard of one chunk per layer, each with its crc32c.

    chunk 0 | crc32c | chunk 1 | crc32c | …     one chunk per layer, (shard_tokens, width) values
    index                                        a little-endian uint64 (offset, length) per chunk
    crc32c of the index

These are the bytes that zarr itself writes with the codecs ``[bytes, crc32c]`` (or a compressor
between the two) in a ``sharding_indexed`` codec. They are written and read here because one pass
through memory is several times faster than the general pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash
from numcodecs.zstd import Zstd

from bertvision.errors import CorruptStoreError
from bertvision.featurestore.format.names import CompressionName
from bertvision.featurestore.storage.storage import OpenFile

ZSTD_LEVEL = 1
CRC_BYTES = 4
INDEX_BYTES = 16  # of a chunk: offset and length
_MISSING = (1 << 64) - 1
_BLOCK_BYTES = 1 << 22


class Span(NamedTuple):
    """Where the bytes of a chunk lie in its file, without their crc32c."""

    offset: int
    length: int


def shard_pieces(chunks: Iterable[npt.NDArray[Any] | bytes]) -> Iterator[bytes | memoryview]:
    """The bytes of a shard file, piece by piece.

    Args:
        chunks: encoded chunks in C order of the chunk grid; each is used before the next is asked
            for, so they may share their memory.
    """
    index, offset = [], 0
    for chunk in chunks:
        data = chunk if isinstance(chunk, bytes) else chunk.reshape(-1).view(np.uint8).data
        yield data
        yield _crc(chunk)
        index += [offset, len(data) + CRC_BYTES]
        offset += len(data) + CRC_BYTES
    encoded = np.array(index, "<u8").tobytes()
    yield encoded
    yield _crc(encoded)


def read_spans(file: OpenFile, chunks: int) -> list[Span]:
    """The places of a shard file's chunks, from its index.

    Raises:
        CorruptStoreError: the index is damaged, or points out of the file.
    """
    data = np.empty(INDEX_BYTES * chunks + CRC_BYTES, np.uint8)
    if file.size < data.nbytes:
        raise CorruptStoreError(f"{file.size} bytes are too few for the index of {chunks} chunks")
    file.read_into(data, file.size - data.nbytes)
    index = data[:-CRC_BYTES]
    if _crc(index) != data[-CRC_BYTES:].tobytes():
        raise CorruptStoreError("the index does not pass its checksum")
    spans = []
    for offset, length in index.view("<u8").reshape(-1, 2).tolist():
        if offset == _MISSING or length <= CRC_BYTES or offset + length > file.size - data.nbytes:
            raise CorruptStoreError("the index points out of the file")
        spans.append(Span(offset, length - CRC_BYTES))
    return spans


def read_chunk(file: OpenFile, span: Span) -> npt.NDArray[np.uint8]:
    """The encoded bytes of a chunk, checked.

    Raises:
        CorruptStoreError: they do not pass their checksum.
    """
    data = np.empty(span.length + CRC_BYTES, np.uint8)
    file.read_into(data, span.offset)
    return unsealed(data)


def unsealed(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Encoded bytes without the crc32c at their end.

    Raises:
        CorruptStoreError: they do not pass it.
    """
    if len(data) < CRC_BYTES or _crc(data[:-CRC_BYTES]) != data[-CRC_BYTES:].tobytes():
        raise CorruptStoreError("the data does not pass its checksum")
    return data[:-CRC_BYTES]


def compress(chunk: npt.NDArray[Any], compression: CompressionName) -> npt.NDArray[Any] | bytes:
    """Encode a chunk as Zarr's codec of that name does."""
    if compression == "zstd":
        return bytes(Zstd(level=ZSTD_LEVEL).encode(chunk))
    if compression == "pcodec":
        from numcodecs.pcodec import PCodec

        return bytes(PCodec().encode(chunk))
    return chunk


def decompress(
    data: npt.NDArray[np.uint8], compression: CompressionName, out: npt.NDArray[Any]
) -> None:
    """Decode a chunk into memory of its size; what claims to be larger is refused.

    Raises:
        CorruptStoreError: the data does not decode to exactly ``out``.
    """
    import pyarrow as pa

    try:
        if compression == "zstd":
            # not numcodecs: it allocates what the frame claims
            plain = pa.Codec("zstd").decompress(pa.py_buffer(data), decompressed_size=out.nbytes)
            out.reshape(-1).view(np.uint8)[:] = np.frombuffer(plain, np.uint8)
        elif compression == "pcodec":
            from pcodec import standalone

            done = standalone.simple_decompress_into(data.tobytes(), out.reshape(-1))
            if not done.finished or done.n_processed != out.size:
                raise CorruptStoreError("it holds another number of values")
        else:
            out.reshape(-1).view(np.uint8)[:] = data
    except Exception as error:
        # each decoder has errors of its own, all of which mean the same here
        raise CorruptStoreError(f"a chunk does not decode: {error}") from None


def _crc(data: npt.NDArray[Any] | bytes) -> bytes:
    if not isinstance(data, bytes):
        data = data.reshape(-1).view(np.uint8)
    return int(google_crc32c.value(data)).to_bytes(CRC_BYTES, "little")


def file_digest(file: OpenFile) -> str:
    """xxh3-128 of a file, in hexadecimal; closes it.

    Raises:
        EOFError: it became shorter.
    """
    digest, block = xxhash.xxh3_128(), np.empty(_BLOCK_BYTES, np.uint8)
    try:
        for offset in range(0, file.size, _BLOCK_BYTES):
            part = block[: file.size - offset]
            file.read_into(part, offset)
            digest.update(part.data)
    finally:
        file.close()
    return digest.hexdigest()
