"""The text side of a split, once for all snapshots: ``examples/<split>.parquet``.

The records of the splits have the digest of what the table holds. Beside the file stands that of
its bytes, as ``sha256sum --check`` reads it: Parquet does not protect all of them.

sha256 of a table's content: the same for every way in which Arrow and Parquet may lay it out.
"""

from __future__ import annotations

import hashlib
import io
import json
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bertvision.errors import CorruptStoreError, InputError, ProvenanceError
from bertvision.featurestore.storage.storage import Storage

_ROWS_AT_ONCE = 1 << 12


def table_digest(table: pa.Table) -> str:
    """sha256 of the columns of a table, some rows at a time.

    Of each column: its name as JSON; then of each `_ROWS_AT_ONCE` rows what `_add` says.

    Raises:
        InputError: a column is of a type that no store holds.
    """
    digest = hashlib.sha256(json.dumps(table.column_names).encode())
    for start in range(0, len(table), _ROWS_AT_ONCE):
        part = table.slice(start, _ROWS_AT_ONCE).combine_chunks()
        for name, column in zip(part.column_names, part.columns, strict=True):
            try:
                if column.num_chunks > 1:  # which nothing but more than 2 GiB of texts makes
                    raise TypeError(column.type)
                _add(digest, column.chunk(0))
            except (TypeError, pa.ArrowNotImplementedError):
                raise InputError(
                    f"column {name!r} of the examples is {column.type}: a store holds texts, "
                    "numbers, truth values, and lists and records of them, and of texts less than "
                    f"2 GiB in {_ROWS_AT_ONCE:,} rows"
                ) from None
    return digest.hexdigest()


def _add(digest: hashlib._Hash, array: pa.Array) -> None:
    """The kind of an array, its length, which values are there, then the values.

    Of a list the lengths of its rows and all items as one array; of a record each field; of a text
    the lengths in bytes and all bytes; numbers little-endian. What is not there counts as empty.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    name = "list" if _is_list(kind) else "struct" if pa.types.is_struct(kind) else str(kind)
    there = np.packbits(array.is_valid().to_numpy(zero_copy_only=False))
    digest.update(f"{name} {len(array)} {array.null_count} ".encode())
    digest.update(there.tobytes() if array.null_count else b"")
    if pa.types.is_null(kind):
        return
    if _is_list(kind):
        _add_numbers(digest, pc.list_value_length(array).fill_null(0))
        _add(digest, array.flatten())
    elif pa.types.is_struct(kind):
        for field, values in zip(kind, array.flatten(), strict=True):
            digest.update(json.dumps(field.name).encode())
            _add(digest, values)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = pc.fill_null(array, "")
        _add_numbers(digest, pc.binary_length(texts))
        if not len(texts):
            return
        offsets = np.frombuffer(
            texts.buffers()[1],
            np.int64 if pa.types.is_large_string(kind) else np.int32,
            len(texts) + 1,
            texts.offset * (8 if pa.types.is_large_string(kind) else 4),
        )
        if (data := texts.buffers()[2]) is not None:
            digest.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        _add_numbers(digest, pc.fill_null(array, pa.scalar(0).cast(kind)))
    else:
        raise TypeError(kind)


def _add_numbers(digest: hashlib._Hash, numbers: pa.Array) -> None:
    values = numbers.to_numpy(zero_copy_only=False)
    digest.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


FOLDER = "examples"
_MOST_BYTES = 1 << 31
_LARGEST_RATIO = 500  # of a table to its file: the same context comes with each of its questions
_UNSUSPICIOUS_BYTES = 3 << 25
_EXAMPLES_ROWS_AT_ONCE = 64
_BATCHES_OF_A_CHUNK = 1 << 10


def examples_digest(table: pa.Table, store_format: str) -> str:
    """The digest of a table's content, as splits of a format record it.

    Args:
        table: the text side of a split.
        store_format: Store format of the split's record. In 1.0 it is that of every row as
            canonical JSON, which takes a minute for a million rows; since then that of the columns
            (see `table_digest`).
    """
    if store_format != "1.0":
        return table_digest(table)
    digest = hashlib.sha256(json.dumps(table.column_names).encode())
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True).encode())
    return digest.hexdigest()


def write_examples(storage: Storage, split: str, table: pa.Table) -> None:
    """Write the table durably, or check that the one that is there is the same.

    The caller holds the store's lock.

    Args:
        storage: Storage of the store.
        split: its name.
        table: Table to write.

    Raises:
        ProvenanceError: the store holds this split with other examples.
        CorruptStoreError: the table that is there is damaged.
        InputError: the table packs so well that a reader would take it for a bomb.
    """
    key = _key(split)
    if storage.size(key) is None:
        _write(storage, split, table)
        return
    try:
        there = _read(storage, key)
    except CorruptStoreError as error:
        raise CorruptStoreError(
            f"{error}; `bertvision store repair` on a split of that name writes it again"
        ) from None
    if table_digest(there) != table_digest(table):
        raise ProvenanceError(
            f"{storage}/{key} holds other examples than the data given for split {split!r}: "
            "a split has the same examples in every snapshot; use another store"
        )


def mend_examples(
    storage: Storage, split: str, table: pa.Table, recorded: str, store_format: str
) -> None:
    """Write the table again where the one that is there is not the one that was recorded.

    The caller holds the store's lock.

    Args:
        storage: Storage of the store.
        split: its name.
        table: Table that should be there.
        recorded: its digest in the split's record.
        store_format: Store format of the split's record.

    Raises:
        ProvenanceError: the given table is not the one that was recorded either.
    """
    with suppress(CorruptStoreError):
        read_examples(storage, split, recorded, store_format)
        check_bytes(storage, split)
        return
    if examples_digest(table, store_format) != recorded:
        raise ProvenanceError(
            f"the examples of split {split!r} come out different from what {storage} recorded: the "
            "data or how they are read are not the same; extract into another store"
        )
    _write(storage, split, table)


def _write(storage: Storage, split: str, table: pa.Table) -> None:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    data = buffer.getvalue()
    # a reader counts some bytes more, of each of its small batches
    if len(data) > _MOST_BYTES or table.nbytes * 9 // 8 > _most_unpacked(len(data)):
        raise InputError(
            f"the examples have {table.nbytes:,} bytes, {len(data):,} of them in a file: a table "
            f"of {_most_unpacked(len(data)):,} in a file of {_MOST_BYTES:,} is the most that is "
            "read again; store the split in parts"
        )
    # first: a table without it would be one of an earlier version, which had none
    digest = hashlib.sha256(data).hexdigest()
    storage.write(_digest_key(split), f"{digest}  {split}.parquet\n".encode())
    storage.write(_key(split), data)


def check_bytes(storage: Storage, split: str) -> None:
    """Compare the table's file with its digest, where an earlier version did not leave it out.

    Raises:
        CorruptStoreError: one of them changed, or the file is missing.
    """
    key = _digest_key(split)
    try:
        recorded = storage.read(key)
    except FileNotFoundError:
        return
    try:
        data = storage.read(_key(split), _MOST_BYTES)
    except FileNotFoundError:
        raise CorruptStoreError(f"{storage}/{_key(split)} is missing") from None
    if recorded != f"{hashlib.sha256(data).hexdigest()}  {split}.parquet\n".encode():
        raise CorruptStoreError(f"{storage}/{_key(split)} is not as it was written ({key})")


def remove_examples(storage: Storage, split: str) -> None:
    """Remove the table; the caller holds the store's lock and knows that no split needs it."""
    storage.remove(_key(split))
    storage.remove(_digest_key(split))


def has_examples(storage: Storage, split: str) -> bool:
    """Whether there is a table of a split, which `read_examples` alone can tell to be whole."""
    return storage.size(_key(split)) is not None


def read_examples(storage: Storage, split: str, digest: str, store_format: str) -> pa.Table:
    """The table, checked against the digest in the split's record.

    Args:
        storage: Storage of the store.
        split: its name.
        digest: Digest in the split's record.
        store_format: Store format of the split's record.

    Raises:
        CorruptStoreError: it is missing, damaged, or not the one that was recorded.
    """
    key = _key(split)
    table = _read(storage, key)
    if examples_digest(table, store_format) != digest:
        raise CorruptStoreError(f"{storage}/{key} is not the table that the ledger recorded")
    return table


def _key(split: str) -> str:
    return f"{FOLDER}/{split}.parquet"


def _digest_key(split: str) -> str:
    return f"{_key(split)}.sha256"


def _read(storage: Storage, key: str) -> pa.Table:
    try:
        data = storage.read(key, _MOST_BYTES)
        return _unpack(data)
    except FileNotFoundError:
        raise CorruptStoreError(f"{storage}/{key} is missing") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptStoreError(f"{storage}/{key} is damaged: {error}") from None


def _most_unpacked(packed: int) -> int:
    """Bytes of the largest table that a file of so many bytes may unpack to.

    Contexts of thousands of characters come with thousands of questions each, so a small file may
    well hold a hundred megabytes; that much memory is not what a bomb is made for.
    """
    return max(_LARGEST_RATIO * packed + (1 << 24), _UNSUSPICIOUS_BYTES)


def _unpack(data: bytes) -> pa.Table:
    """Read a Parquet file in small steps, so that a little one cannot unpack to a huge table."""
    file = pq.ParquetFile(pa.BufferReader(data))
    groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
    most = _most_unpacked(len(data))
    if sum(group.total_byte_size for group in groups) > most:
        raise ValueError(f"its {len(data)} bytes claim to hold more than {most}")
    parts: list[pa.Table] = []
    batches: list[pa.RecordBatch] = []
    size = 0
    for batch in file.iter_batches(_EXAMPLES_ROWS_AT_ONCE):
        batches.append(batch)
        size += batch.nbytes
        if size > most:
            raise ValueError(f"its {len(data)} bytes hold more than {most}")
        if len(batches) == _BATCHES_OF_A_CHUNK:
            # a part at a time, so that the table is in memory once and not twice
            parts.append(pa.Table.from_batches(batches).combine_chunks())
            batches = []
    parts.append(pa.Table.from_batches(batches, file.schema_arrow).combine_chunks())
    return pa.concat_tables(parts)
