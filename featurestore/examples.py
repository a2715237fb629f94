"""The text side of a split, once for all snapshots: ``examples/<split>.parquet``."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bertvision.errors import CorruptStoreError, ProvenanceError
from bertvision.featurestore.durable import write_durably


def examples_digest(table: pa.Table) -> str:
    """sha256 of a table's rows as canonical JSON, so that it outlives Parquet's own versions."""
    digest = hashlib.sha256(json.dumps(table.column_names).encode())
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True).encode())
    return digest.hexdigest()


def write_examples(store: Path, split: str, table: pa.Table) -> str:
    """Write the table durably, or check that the one that is there is the same.

    The caller holds the store's lock.

    Returns:
        Its digest.

    Raises:
        ProvenanceError: the store holds this split with other examples.
    """
    path, digest = _path(store, split), examples_digest(table)
    if path.is_file():
        if examples_digest(_read(path)) != digest:
            raise ProvenanceError(
                f"{path} holds other examples than the data given for split {split!r}: "
                "a split has the same examples in every snapshot; use another store"
            )
        return digest
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_durably(path, buffer.getvalue())
    return digest


def read_examples(store: Path, split: str, digest: str) -> pa.Table:
    """The table, checked against the digest in the split's record.

    Raises:
        CorruptStoreError: it is missing, damaged, or not the one that was recorded.
    """
    table = _read(_path(store, split))
    if examples_digest(table) != digest:
        raise CorruptStoreError(f"{_path(store, split)} is not the table that the ledger recorded")
    return table


def _path(store: Path, split: str) -> Path:
    return store / "examples" / f"{split}.parquet"


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except FileNotFoundError:
        raise CorruptStoreError(f"{path} is missing") from None
    except (pa.ArrowException, OSError) as error:
        raise CorruptStoreError(f"{path} is damaged: {error}") from None
