"""sha256 of a table's content: the same for every way in which Arrow and Parquet may lay it out."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bertvision.errors import InputError

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
