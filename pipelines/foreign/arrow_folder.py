"""An Arrow data set in a folder, as `datasets` saves one: SAELens' cached activations are such.

It is read by Arrow itself, mapped into memory: a row of SAELens has ``token_ids`` and, under the
name of its hook, a sequence of vectors.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, Field, ValidationError

from bertvision.errors import InputError, counted
from bertvision.pipelines.files import read_json
from bertvision.pipelines.foreign.sample import (
    LABELS,
    Sample,
    Source,
    as_layers,
    as_tensor,
    check_ids,
)

STATE = "state.json"
ID = "id"
_IDS = ("token_ids", "input_ids")


class _DataFile(BaseModel):
    # a name and no path: what it names lies in the folder
    filename: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")


class _State(BaseModel):
    data_files: list[_DataFile] = Field(alias="_data_files", min_length=1)
    indices: list[Any] | None = Field(alias="_indices_data_files", default=None)


class ArrowFolder(Source):
    """A data set that was saved with ``save_to_disk``.

    Args:
        folder: with ``state.json`` and ``data-*.arrow``.
        column: of the hidden states; by default the only one of nested lists of floats.

    Raises:
        InputError: a file is missing or damaged, or it is not clear which column is meant.
    """

    kind = "Arrow"

    def __init__(self, folder: Path, column: str | None = None) -> None:
        self._folder = folder
        try:
            state = _State.model_validate(read_json(folder / STATE))
        except ValidationError as error:
            raise InputError(f"{folder / STATE} is damaged: {error.errors()[0]['msg']}") from None
        if state.indices:
            raise InputError(
                f"{folder} keeps an order beside its rows: save it with `flatten_indices()` first"
            )
        tables = [_mapped(folder / file.filename) for file in state.data_files]
        try:
            table = pa.concat_tables(tables)
        except pa.ArrowInvalid as error:
            raise InputError(f"the files of {folder} have other columns: {error}") from None
        self._column = column or _states_column(folder, table.schema)
        if self._column not in table.column_names:
            raise InputError(
                f"{folder} has no column {column!r}: it has {', '.join(table.column_names)}"
            )
        self._columns = {name: table.column(name).chunks for name in table.column_names}
        self._starts = np.cumsum([0, *(len(c) for c in self._columns[self._column])]).tolist()
        rows = len(table)
        named = ID in self._columns and _storage(table.schema.field(ID).type) == pa.string()
        self.keys = table.column(ID).to_pylist() if named else [str(i) for i in range(rows)]
        if not rows or len(set(self.keys)) < rows:
            raise InputError(f"{folder} has {counted(rows, 'row')}, some of the same {ID}, or none")
        lists = map(_plain, self._columns[self._column])
        self.longest = max(int(c.value_lengths().to_numpy(False).max()) for c in lists if len(c))
        if self._column not in ("hidden_states", ID):
            self.layer_names = [self._column]  # SAELens names the hook

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        chunk = bisect_right(self._starts, position) - 1
        row = position - self._starts[chunk]
        where = f"row {position} of {self._folder}"
        values = {name: _value(where, c[chunk], row) for name, c in self._columns.items()}
        states = as_layers(where, as_tensor(_given(where, values.pop(self._column))))
        ids = next((values[name] for name in _IDS if values.get(name) is not None), None)
        check_ids(where, len(states), ids)
        labels, fields = {}, {}
        for name, value in values.items():
            if value is None or name in (ID, *_IDS):
                continue
            if name.startswith(LABELS):
                labels[name.removeprefix(LABELS)] = value
            elif value.ndim and len(value) == len(states):
                fields[name] = value
        return Sample(states, ids, labels, fields)


def _mapped(path: Path) -> pa.Table:
    """The table in a file; nothing of it is read yet."""
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path} is damaged, cut off or missing: {error}") from None


def _storage(of: pa.DataType) -> pa.DataType:
    return of.storage_type if isinstance(of, pa.ExtensionType) else of


def _is_list(of: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(kind(of) for kind in kinds)


def _states_column(folder: Path, schema: pa.Schema) -> str:
    """The column of vectors, where there is one alone."""
    found: list[str] = []
    for field in schema:
        of = _storage(field.type)
        depth = 0
        while _is_list(of):
            of, depth = of.value_type, depth + 1
        if depth > 1 and pa.types.is_floating(of) and not field.name.startswith(LABELS):
            found.append(field.name)
    if "hidden_states" in found:
        return "hidden_states"
    if len(found) != 1:
        raise InputError(
            f"{folder} has the columns {', '.join(schema.names)}, and "
            f"{' and '.join(found) or 'none'} of them hold sequences of vectors: name one with "
            "--column"
        )
    return found[0]


def _plain(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _given(where: str, value: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if value is None:
        raise InputError(f"{where} has no hidden states")
    return value


def _value(where: str, chunk: pa.Array, row: int) -> npt.NDArray[Any] | None:
    """A number or an array out of a column; None of a text or of nothing.

    Raises:
        InputError: its lists are of different lengths.
    """
    scalar = _plain(chunk)[row]
    if not scalar.is_valid:
        return None
    if not _is_list(scalar.type):
        value = scalar.as_py()
        return np.asarray(value) if isinstance(value, bool | int | float) else None
    values, shape = scalar.values, [len(scalar.values)]
    while _is_list(values.type):
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        if not len(lengths) or values.null_count or (lengths != lengths[0]).any():
            raise InputError(f"{where}: its lists are of different lengths: they are no array")
        shape.append(int(lengths[0]))
        values = values.flatten()
    if values.null_count or not _is_number(values.type):
        return None
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)


def _is_number(of: pa.DataType) -> bool:
    kinds = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)
    return any(kind(of) for kind in kinds)
