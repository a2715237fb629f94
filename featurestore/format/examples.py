"""The text side of a split, once for all snapshots: ``examples/<split>.parquet``."""

from __future__ import annotations

import hashlib
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from bertvision.errors import CorruptStoreError, ProvenanceError
from bertvision.featurestore.storage.storage import Storage

FOLDER = "examples"
_MOST_BYTES = 1 << 31
_LARGEST_RATIO = 500  # of a table to its file: the same context comes with each of its questions
_ROWS_AT_ONCE = 64


def examples_digest(table: pa.Table) -> str:
    """sha256 of a table's rows as canonical JSON, so that it outlives Parquet's own versions."""
    digest = hashlib.sha256(json.dumps(table.column_names).encode())
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True).encode())
    return digest.hexdigest()


def write_examples(
    storage: Storage, split: str, table: pa.Table, recorded: str | None = None
) -> str:
    """Write the table durably, or check that the one that is there is the same.

    The caller holds the store's lock.

    Args:
        storage: of the store.
        split: its name.
        table: to write.
        recorded: the digest of the table that the ledger records: where the given one has it, a
            damaged one is replaced.

    Returns:
        Its digest.

    Raises:
        ProvenanceError: the store holds this split with other examples.
        CorruptStoreError: the table that is there is damaged.
    """
    key, digest = _key(split), examples_digest(table)
    storage.sweep(FOLDER)
    if storage.size(key) is not None:
        try:
            same = examples_digest(_read(storage, key)) == digest
        except CorruptStoreError:
            if recorded != digest:
                raise
            same = False
        if same:
            return digest
        if recorded != digest:
            raise ProvenanceError(
                f"{storage}/{key} holds other examples than the data given for split {split!r}: "
                "a split has the same examples in every snapshot; use another store"
            )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    storage.write(key, buffer.getvalue())
    return digest


def remove_examples(storage: Storage, split: str) -> None:
    """Remove the table; the caller holds the store's lock and knows that no split needs it."""
    storage.remove(_key(split))


def read_examples(storage: Storage, split: str, digest: str) -> pa.Table:
    """The table, checked against the digest in the split's record.

    Raises:
        CorruptStoreError: it is missing, damaged, or not the one that was recorded.
    """
    key = _key(split)
    table = _read(storage, key)
    if examples_digest(table) != digest:
        raise CorruptStoreError(f"{storage}/{key} is not the table that the ledger recorded")
    return table


def _key(split: str) -> str:
    return f"{FOLDER}/{split}.parquet"


def _read(storage: Storage, key: str) -> pa.Table:
    try:
        data = storage.read(key, _MOST_BYTES)
        return _unpack(data)
    except FileNotFoundError:
        raise CorruptStoreError(f"{storage}/{key} is missing") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptStoreError(f"{storage}/{key} is damaged: {error}") from None


def _unpack(data: bytes) -> pa.Table:
    """Read a Parquet file in small steps, so that a little one cannot unpack to a huge table."""
    file = pq.ParquetFile(pa.BufferReader(data))
    groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
    most = _LARGEST_RATIO * len(data) + (1 << 24)
    if sum(group.total_byte_size for group in groups) > most:
        raise ValueError(f"its {len(data)} bytes claim to hold more than {most}")
    batches, size = [], 0
    for batch in file.iter_batches(_ROWS_AT_ONCE):
        batches.append(batch)
        size += batch.nbytes
        if size > most:
            raise ValueError(f"its {len(data)} bytes hold more than {most}")
    return pa.Table.from_batches(batches, file.schema_arrow).combine_chunks()
