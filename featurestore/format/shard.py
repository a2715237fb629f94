"""ShardReader: a committed shard, from which nothing is read unchecked."""

from __future__ import annotations

import base64
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bertvision.errors import CorruptStoreError, InputError
from bertvision.featurestore.format.arrays import group_key
from bertvision.featurestore.format.compiled import KERNELS
from bertvision.featurestore.format.layout import get_encoding, transform_room
from bertvision.featurestore.format.logits import OUTPUTS, TopLogits
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import Layout, ShardRecord, SplitRecord
from bertvision.featurestore.format.shardfile import (
    CRC_BYTES,
    INDEX_BYTES,
    decompress,
    read_chunk,
    read_spans,
)
from bertvision.featurestore.format.transform import Transform
from bertvision.featurestore.storage.local import LocalFile
from bertvision.featurestore.storage.storage import SMALL_BYTES, OpenFile, Storage

_BLOCK_BYTES = 1 << 19  # of codes that are read at once
ADVICE = (
    "`bertvision store verify` lists all damage, `bertvision store repair` mends what was extracted"
)


def shard_key(record: Layout, name: str, shard: int) -> str:
    """Key of the file of one array's shard."""
    if name in OUTPUTS:
        more = len(record.top.shapes[name]) if record.top else 0
    else:
        more = 1 + (name == "hidden_states" or bool(_scale_row(record)))
    return f"{group_key(record)}/{name}/c/{shard}" + "/0" * more


def _scale_row(record: Layout) -> tuple[int, ...]:
    return get_encoding(record.encoding).scale_shape(record.hidden_size)


def example_checksums(rows: npt.NDArray[Any], offsets: Sequence[int]) -> list[int]:
    """xxh3-64 of each example's codes in one layer.

    Args:
        rows: (tokens, …) C-contiguous codes of the layer.
        offsets: (examples + 1,) where each example begins, and the last ends.
    """
    return [
        xxhash.xxh3_64_intdigest(rows[low:high].data)
        for low, high in zip(offsets[:-1], offsets[1:], strict=True)
    ]


def check_record_size(plan: ShardPlan, layers: int) -> None:
    """Refuse a plan with a shard whose record could not be read again, before anything is written.

    Args:
        plan: Plan of the split.
        layers: Number of stored layers.

    Raises:
        InputError: a shard has more examples than a record of `SMALL_BYTES` has checksums for.
    """
    most = int(np.bincount(plan.shard).max())
    size = most * layers * 8 * 4 // 3 + (1 << 12)
    if size > SMALL_BYTES:
        raise InputError(
            f"a shard would have {most:,} examples in {layers} layers, whose checksums take "
            f"{size:,} bytes of its record: {SMALL_BYTES:,} at most are read; take fewer tokens to "
            "a shard (shard_tokens), or fewer layers"
        )


class ShardReader:
    """Reads examples of one committed shard, each checked against the ledger.

    Uncompressed codes are read straight from their file into the caller's memory, so that they
    are copied once. Compressed layers are decoded when they are first asked for, and kept.

    Args:
        storage: Storage of the store.
        record: Record of the split.
        committed: Record of the shard.
        lengths: (examples of the shard,) tokens of each.
        transform: Coder of its layers, where the encoding is the transform.

    Raises:
        CorruptStoreError: a file is missing or has another length, or index or scale are damaged.
    """

    def __init__(
        self,
        storage: Storage,
        record: SplitRecord,
        committed: ShardRecord,
        lengths: npt.NDArray[np.integer],
        transform: Transform | None = None,
    ) -> None:
        self.name = f"{record.tag}/{record.split} shard {committed.shard}"
        self._record = record
        self._encoding = get_encoding(record.encoding)
        self._offsets: list[int] = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
        self._all_positions = list(range(len(record.layers)))
        self._checksums = self._decode_checksums(committed)
        self._row_bytes: int = (
            self._encoding.codes_size(record.hidden_size)
            * np.dtype(self._encoding.zarr_dtype).itemsize
        )
        self._transform, self._compression = transform, record.compression
        if transform is not None:
            self._row_bytes, self._compression = transform_room(1, record.hidden_size), "zstd"
        self._plain, self._distant = self._compression == "none", storage.distant
        self._decoded: dict[int, npt.NDArray[Any]] = {}
        self.scale: npt.NDArray[Any] | None = None
        self._storage, self._committed = storage, committed
        self._logits: TopLogits | None = None
        due = ["hidden_states", "scale"] if self._encoding.quantised else ["hidden_states"]
        due += OUTPUTS if record.top else []
        if sorted(committed.files) != sorted(due):
            raise CorruptStoreError(f"{self.name}: its record is not of {' and '.join(due)}")
        try:
            if self._encoding.quantised:
                self.scale = self._read_whole(
                    *("scale", self._encoding.scale_dtype),
                    (len(record.layers), *_scale_row(record)),
                )
            self._file = self._open(storage, committed)
            self._spans = read_spans(self._file, len(record.layers))
        except (CorruptStoreError, EOFError, OSError) as error:
            raise CorruptStoreError(f"{self.name}: {error}; {ADVICE}") from None
        whole = record.shard_tokens * self._row_bytes
        lengths_of = [span.length for span in self._spans]
        if any(n != whole if self._plain else n > 2 * whole + 1024 for n in lengths_of):
            raise CorruptStoreError(f"{self.name}: the index names chunks of a wrong length")

    @property
    def tokens(self) -> int:
        """Real tokens of the shard."""
        return self._offsets[-1]

    def prefetch(self, positions: Sequence[int]) -> None:
        """Begin to bring some layers near; where they are compressed, decode them.

        Args:
            positions: Places on the stored layer axis.

        Raises:
            CorruptStoreError: a compressed layer does not decode.
        """
        if self._transform is not None:  # each layer is told from those below
            positions = range(max(positions) + 1)
        spans = sorted(self._spans[position] for position in positions)
        start, end = spans[0].offset, spans[0].offset
        for span in spans:
            if span.offset > end + CRC_BYTES:
                self._file.prefetch(start, end - start)
                start = span.offset
            end = span.offset + span.length + CRC_BYTES
        self._file.prefetch(start, end - start)
        if not self._plain:
            for position in positions:
                self._decode(position)

    def read(
        self,
        first: int,
        last: int,
        positions: Sequence[int],
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
    ) -> None:
        """Read consecutive examples into memory that is already there.

        Args:
            first: First of the examples, counted in the shard.
            last: the one after the last.
            positions: Places on the stored layer axis.
            codes: (layers, tokens, width) in the encoding's Zarr dtype; each layer C-contiguous.
            scale: (tokens, layers, …), for quantised encodings.

        Raises:
            CorruptStoreError: what is stored does not pass its checksum.
        """
        if self._transform is not None:
            self._read_coded(self._transform, first, last, positions, codes)
            return
        low, high = self._offsets[first], self._offsets[last]
        ends = [offset - low for offset in self._offsets[first + 1 : last + 1]]
        if self._distant:
            self._file.expect(self._ranges(positions, low, high))
        if not self._read_at_once(first, last, positions, ends, codes):
            self._read_blocks(first, positions, ends, codes)
        if scale is not None and self.scale is not None:
            # as many layers in another order are not all of them as they lie
            if list(positions) == self._all_positions:
                scale[...] = self.scale[low:high]
            else:
                scale[...] = self.scale[low:high, list(positions)]

    def _read_at_once(
        self,
        first: int,
        last: int,
        positions: Sequence[int],
        ends: list[int],
        codes: npt.NDArray[Any],
    ) -> bool:
        """Read a run by the kernel; whether it is there, and all of the run was right."""
        if not (self._plain and isinstance(self._file, LocalFile) and ends and positions):
            return False
        shape, due = (len(codes), codes[0].nbytes), (len(positions), ends[-1] * self._row_bytes)
        plain = codes.flags.writeable and codes[0].flags.c_contiguous
        if shape != due or not plain or (kernel := KERNELS.get("read_run", codes.nbytes)) is None:
            return False
        begin = self._offsets[first] * self._row_bytes
        offsets = np.array([self._spans[position].offset + begin for position in positions])
        is_right = np.zeros(1, np.bool_)
        kernel(
            *(self._file.descriptor, offsets, self._row_bytes, np.array(ends)),
            np.ascontiguousarray(self._checksums[positions, first:last]),
            *(_BLOCK_BYTES, codes.__array_interface__["data"][0], codes.strides[0], is_right),
        )
        return bool(is_right[0])

    def _read_blocks(
        self, first: int, positions: Sequence[int], ends: list[int], codes: npt.NDArray[Any]
    ) -> None:
        """Read a run block by block; what is not right is said."""
        low, blocks = self._offsets[first], self._blocks(first, ends)
        # a few microseconds here are a tenth of the whole reading time: 25 layers × 16 examples
        checksum = xxhash.xxh3_64_intdigest
        for rows, position in zip(codes.view(np.uint8), positions, strict=True):
            checksums = self._checksums[position, first : first + len(ends)].tolist()
            for begin, example, block in blocks:
                end = block[-1]
                part = rows if end - begin == len(rows) else rows[begin:end]
                self._read_rows(position, low + begin, low + end, part)
                for end in block:
                    part = rows if end - begin == len(rows) else rows[begin:end]
                    if checksum(part.data) != checksums[example - first]:
                        raise CorruptStoreError(
                            f"{self.name}: example {example} of it, layer "
                            f"{self._record.layers[position]}, does not pass its checksum; {ADVICE}"
                        )
                    begin, example = end, example + 1

    def read_logits(self, first: int, last: int, out: TopLogits) -> None:
        """Read the log-probabilities of consecutive examples into memory that is already there.

        Args:
            first: First of the examples, counted in the shard.
            last: the one after the last.
            out: Arrays of their tokens.

        Raises:
            CorruptStoreError: what is stored is not what was recorded.
        """
        top = self._record.top
        assert top is not None
        if self._logits is None:
            try:
                shapes = top.shapes.items()
                arrays = [self._read_whole(name, OUTPUTS[name], row) for name, row in shapes]
            except (CorruptStoreError, OSError) as error:
                raise CorruptStoreError(f"{self.name}: {error}; {ADVICE}") from None
            self._logits = TopLogits(*arrays)
        rows = slice(self._offsets[first], self._offsets[last])
        for stored, given in zip(self._logits, out, strict=True):
            given[...] = stored[rows]

    def _read_coded(
        self,
        transform: Transform,
        first: int,
        last: int,
        positions: Sequence[int],
        out: npt.NDArray[Any],
    ) -> None:
        """Read examples whose layers are coded together, one after another, as float32."""
        below = range(max(positions) + 1) if positions else range(0)
        low = self._offsets[first]
        for example in range(first, last):
            codes = [self._code(position, example) for position in below]
            rows = slice(self._offsets[example] - low, self._offsets[example + 1] - low)
            try:
                transform.decode_layers(codes, positions, out[:, rows])
            except CorruptStoreError as error:
                raise CorruptStoreError(
                    f"{self.name}: example {example} of it: {error}; {ADVICE}"
                ) from None

    def _code(self, position: int, example: int) -> npt.NDArray[np.uint16]:
        """The code of an example in a layer, checked."""
        chunk = self._decode(position).reshape(-1)
        examples = len(self._offsets) - 1
        lengths = chunk[: 4 * examples].view("<u4")
        begin = 4 * examples + int(lengths[:example].sum(dtype=np.int64))
        code = chunk[begin : begin + int(lengths[example])]
        if xxhash.xxh3_64_intdigest(code.data) != self._checksums[position][example] or (
            len(code) % 2
        ):
            raise CorruptStoreError(
                f"{self.name}: example {example} of it, layer {self._record.layers[position]}, "
                f"does not pass its checksum; {ADVICE}"
            )
        return code.view("<u2")

    def _blocks(self, first: int, ends: list[int]) -> list[tuple[int, int, list[int]]]:
        """Runs of examples that are still in the processor's cache when they are checked.

        Returns:
            Of each run its first row, its first example, and where its examples end.
        """
        most = _BLOCK_BYTES // self._row_bytes
        if len(ends) < 2 or ends[-1] <= most:
            return [(0, first, ends)] if ends else []
        blocks, begin, i = [], 0, 0
        while i < len(ends):
            j = max(i + 1, bisect_right(ends, begin + most))
            blocks.append((begin, first + i, ends[i:j]))
            begin, i = ends[j - 1], j
        return blocks

    def close(self) -> None:
        """Let go of the file, of what was decoded and of the scales."""
        self._file.close()
        self._decoded.clear()
        self.scale = self._logits = None

    def _ranges(self, positions: Sequence[int], low: int, high: int) -> list[tuple[int, int]]:
        """(offset, length) in the file of tokens ``low`` to ``high``, of layers not decoded yet."""
        spans = [self._spans[position] for position in positions if position not in self._decoded]
        if not self._plain:
            return [(span.offset, span.length + CRC_BYTES) for span in spans]
        row = self._row_bytes
        return [(span.offset + low * row, (high - low) * row) for span in spans]

    def _read_rows(self, position: int, low: int, high: int, out: npt.NDArray[np.uint8]) -> None:
        span = self._spans[position]
        try:
            if self._plain:
                self._file.read_into(out, span.offset + low * self._row_bytes)
            else:
                out[...] = self._decode(position)[low:high]
        except (EOFError, OSError) as error:
            raise self._damaged(position, error) from None

    def _decode(self, position: int) -> npt.NDArray[np.uint8]:
        """The rows of a compressed layer, (shard_tokens, bytes of a row)."""
        if position not in self._decoded:
            rows = np.empty((self._record.shard_tokens, self._row_bytes), np.uint8)
            values = rows if self._transform else rows.view(self._encoding.zarr_dtype)
            try:
                data = read_chunk(self._file, self._spans[position])
                decompress(data, self._compression, values)
            except (CorruptStoreError, EOFError, OSError) as error:
                raise self._damaged(position, error) from None
            self._decoded[position] = rows
        return self._decoded[position]

    def _damaged(self, position: int, error: Exception) -> CorruptStoreError:
        layer = self._record.layers[position]
        return CorruptStoreError(f"{self.name}: layer {layer}: {error}; {ADVICE}")

    def _open(self, storage: Storage, committed: ShardRecord) -> OpenFile:
        key = shard_key(self._record, "hidden_states", committed.shard)
        try:
            file = storage.open(key)
        except FileNotFoundError:
            raise CorruptStoreError("hidden_states is missing") from None
        expected = committed.files["hidden_states"].bytes
        if file.size != expected:
            raise CorruptStoreError(
                f"hidden_states has {file.size} bytes, the ledger says {expected}"
            )
        return file

    def _read_whole(self, name: str, dtype: str, row: tuple[int, ...]) -> npt.NDArray[Any]:
        """Read a file of one chunk, (shard_tokens, *row)."""
        shape, committed = (self._record.shard_tokens, *row), self._committed
        count, kind = math.prod(shape), np.dtype(dtype).newbyteorder("<")
        size = count * kind.itemsize + INDEX_BYTES + 2 * CRC_BYTES
        try:
            data = self._storage.read(shard_key(self._record, name, committed.shard), size)
        except FileNotFoundError:
            raise CorruptStoreError(f"{name} is missing") from None
        if xxhash.xxh3_128_hexdigest(data) != committed.files[name].xxh3_128:
            raise CorruptStoreError(f"{name} was changed on the disk")
        if len(data) != size:
            raise CorruptStoreError(f"{name} has {len(data)} bytes, {size} are due")
        return np.frombuffer(data, kind, count).reshape(shape)

    def _decode_checksums(self, committed: ShardRecord) -> npt.NDArray[np.uint64]:
        """Checksums (layers, examples)."""
        examples = len(self._offsets) - 1
        try:
            packed = np.frombuffer(base64.b64decode(committed.checksums, validate=True), "<u8")
            table = packed.reshape(len(self._record.layers), examples)
        except ValueError:
            raise CorruptStoreError(
                f"{self.name}: its record holds no checksum for each of {examples} examples and "
                f"{len(self._record.layers)} layers; {ADVICE}"
            ) from None
        if committed.examples != examples or committed.tokens != self.tokens:
            raise CorruptStoreError(f"{self.name}: its record contradicts the plan; {ADVICE}")
        return table.astype(np.uint64)
