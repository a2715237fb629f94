"""An Arrow data set in a folder, as `datasets` saves one: SAELens' cached activations are such.

It is read by Arrow itself, mapped into memory: a row of SAELens has ``token_ids`` and, under the
name of its hook, a sequence of vectors.

Export to Arrow: a data set in a folder, which `datasets.load_from_disk` opens.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pydantic import BaseModel, Field, ValidationError

from bertvision.errors import InputError
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.files import check_regular, read_json
from bertvision.pipelines.foreign.content import Content, Example, Target
from bertvision.pipelines.foreign.sample import (
    LABELS,
    Sample,
    Source,
    as_layers,
    as_tensor,
    check_ids,
    whole_numbers,
)

STATE = "state.json"
ID = "id"
_IDS = ("token_ids", "input_ids")
_ONE_LAYER = 2  # lists in one another: tokens, and the numbers of each


class _DataFile(BaseModel):
    # a name and no path: what it names lies in the folder
    filename: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")


class _State(BaseModel):
    data_files: list[_DataFile] = Field(alias="_data_files", min_length=1)
    indices: list[Any] | None = Field(alias="_indices_data_files", default=None)


class ArrowFolder(Source):
    """A data set that was saved with ``save_to_disk``.

    Args:
        folder: Folder with ``state.json`` and ``data-*.arrow``.
        column: Column of the hidden states; by default the only one of nested lists of floats.

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
        self._layers = _layer_columns(folder, table.schema, column)
        self._column = self._layers[0]
        self._columns = {name: table.column(name).chunks for name in table.column_names}
        self._starts = np.cumsum([0, *(len(c) for c in self._columns[self._column])]).tolist()
        rows = len(table)
        named = ID in self._columns and _storage(table.schema.field(ID).type) == pa.string()
        self.keys = table.column(ID).to_pylist() if named else [str(i) for i in range(rows)]
        _check_keys(folder, self.keys)
        self.longest = max(map(_longest, map(_plain, self._columns[self._column])))
        depth = _depth(table.schema.field(self._column).type)
        if self._column != "hidden_states" and depth == _ONE_LAYER:
            self.layer_names = self._layers  # SAELens names the hook

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        chunk = bisect_right(self._starts, position) - 1
        row = position - self._starts[chunk]
        where = f"row {position} of {self._folder}"
        values = {name: _value(where, c[chunk], row) for name, c in self._columns.items()}
        parts = [as_tensor(_given(where, values.pop(name))) for name in self._layers]
        if len({part.shape for part in parts}) > 1:
            raise InputError(f"{where}: {' and '.join(self._layers)} have different shapes")
        states = as_layers(where, parts[0] if len(parts) == 1 else torch.stack(parts, dim=1))
        tokens = next((values[name] for name in _IDS if values.get(name) is not None), None)
        ids = None if tokens is None else whole_numbers(where, tokens)
        check_ids(where, states.shape, ids)
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
    """The table in a file, of whose numbers nothing is read yet.

    Arrow takes offsets and lengths as they are written: they are checked against the file's bytes
    before anything is read by them.
    """
    check_regular(path)
    try:
        if any(map(_is_compressed, pa.ipc.MessageReader.open_stream(pa.memory_map(str(path))))):
            raise InputError(
                f"{path} is compressed, so that it takes more memory than its file has bytes: save "
                "it as `datasets` does, without"
            )
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        table.validate(full=True)
    except InputError:
        raise
    except (OSError, pa.ArrowException, MemoryError, ValueError, struct.error) as error:
        raise InputError(f"{path} is damaged, cut off or missing: {error}") from None
    if table.num_rows > path.stat().st_size:  # lists of length 0 take no bytes
        raise InputError(f"{path} is damaged: it has {table.num_rows:,} rows, more than bytes")
    return table


def _is_compressed(message: pa.Message) -> bool:
    """Whether the buffers of a batch are compressed, as its header says (Message.fbs of Arrow)."""
    header = message.metadata.to_pybytes()

    def table_of(table: int, field: int) -> int:
        """Position of what a field of a table of FlatBuffers points to; 0 where it is not set."""
        table_of_offsets = table - struct.unpack_from("<i", header, table)[0]
        if struct.unpack_from("<H", header, table_of_offsets)[0] < 4 + 2 * field + 2:
            return 0
        (offset,) = struct.unpack_from("<H", header, table_of_offsets + 4 + 2 * field)
        at: int = table + offset
        return at + struct.unpack_from("<I", header, at)[0] if offset else 0

    batch = table_of(struct.unpack_from("<I", header)[0], 2)
    if message.type == "dictionary":
        batch = table_of(batch, 1)
    return message.type in ("record batch", "dictionary") and bool(table_of(batch, 3))


def _check_keys(folder: Path, keys: Sequence[str | None]) -> None:
    """Refuse rows that have no key, or one key."""
    if not keys:
        raise InputError(f"{folder} has no rows")
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        if key is None:
            raise InputError(f"{folder}: row {row} has no {ID}: give each row one of its own")
        if first.setdefault(key, row) != row:
            raise InputError(
                f"{folder}: rows {first[key]} and {row} both have the {ID} {key!r}: give each row "
                f"one of its own, or leave the column {ID} out"
            )


def _longest(chunk: pa.Array) -> int:
    """Tokens of the longest row; 0 of none."""
    return pc.max(pc.list_value_length(chunk)).as_py() or 0


def _depth(kind: pa.DataType) -> int:
    """How many lists there are in one another: 2 of a sequence of vectors."""
    kind, depth = _storage(kind), 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.ExtensionType) else kind


def _is_list(arrow_type: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(kind(arrow_type) for kind in kinds)


def _layer_columns(folder: Path, schema: pa.Schema, column: str | None) -> list[str]:
    """The columns that hold the layers: one of all, or one of vectors for each layer.

    Args:
        folder: Folder of the data set.
        schema: Schema of its rows.
        column: Name of a column, or a pattern of several; None looks for the only one.

    Raises:
        InputError: There is no such column, or not one for each layer.
    """
    if column is None:
        return [_states_column(folder, schema)]
    if column in schema.names:
        return [column]
    depths = {field.name: _depth(field.type) for field in schema}
    chosen = [name for name in schema.names if fnmatchcase(name, column)]
    if not chosen:
        raise InputError(f"{folder} has no column {column!r}: it has {', '.join(schema.names)}")
    if wrong := [name for name in chosen if depths[name] != _ONE_LAYER and len(chosen) > 1]:
        raise InputError(
            f"--column {column}: {wrong[0]} does not hold sequences of vectors; name columns "
            "(tokens, hidden), one for each layer"
        )
    return chosen


def _states_column(folder: Path, schema: pa.Schema) -> str:
    """The column of vectors, where there is one alone."""
    columns: list[str] = []
    for field in schema:
        kind, depth = _storage(field.type), _depth(field.type)
        while _is_list(kind):
            kind = kind.value_type
        if depth >= _ONE_LAYER and pa.types.is_floating(kind) and not field.name.startswith(LABELS):
            columns.append(field.name)
    if "hidden_states" in columns:
        return "hidden_states"
    if not columns:
        raise InputError(
            f"{folder} has the columns {', '.join(schema.names)}, and none of them holds sequences "
            "of vectors: give a row for each text, with a list (tokens, hidden) or (tokens, "
            "layers, hidden) of floats"
        )
    if len(columns) > 1:
        raise InputError(
            f"{folder} has the columns {', '.join(schema.names)}, and {' and '.join(columns)} of "
            "them hold sequences of vectors: name one with --column, or one for each layer by a "
            "pattern such as 'blocks.*'"
        )
    return columns[0]


def _plain(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _given(where: str, value: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if value is None:
        raise InputError(f"{where} has no hidden states: leave it out with --skip-bad")
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
        if not _is_number(scalar.type):
            return None
        return np.asarray(scalar.as_py(), scalar.type.to_pandas_dtype())
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


def _is_number(arrow_type: pa.DataType) -> bool:
    kinds = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)
    return any(kind(arrow_type) for kind in kinds)


_INFO = "dataset_info.json"
_MOST = 2**31 - 1  # values of a row, which offsets of 32 bits count
_BATCH = 1 << 24  # values of rows that are written together


class ArrowTarget(Target):
    """A file of rows for each shard, in stored order: ``id``, ``hidden_states``, and the rest.

    Args:
        folder: Folder to write to.
        content: Content that is exported.

    Raises:
        InputError: an example has more values than a row of Arrow holds.
    """

    def __init__(self, folder: Path, content: Content) -> None:
        from datasets import Array3D, Features

        self._folder, self._content = folder, content
        shards = content.split.plan.n_shards
        self._files = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
        layers, hidden = len(content.layers), content.split.record.hidden_size
        if int(content.lengths.max()) * layers * hidden > _MOST - _BATCH:
            raise InputError(
                f"an example of {content.split.name} has more than {_MOST:,} values, which a row "
                "of Arrow does not hold: export fewer --layers, or to safetensors"
            )
        dtype = str(content.dtype).removeprefix("torch.")
        fields = [pa.field(ID, pa.string())]
        for name, array in content.fields.items():
            fields.append(pa.field(name, _type(array[:0], array.ndim)))
        for name, array in content.labels.items():
            fields.append(pa.field(LABELS + name, _type(array[:0], array.ndim - 1)))
        features = Features.from_arrow_schema(pa.schema(fields))
        features["hidden_states"] = Array3D(shape=(None, layers, hidden), dtype=dtype)
        self._features, self._schema = features, features.arrow_schema

    def pending(self) -> list[int]:
        """See `Target.pending`."""
        return [i for i, name in enumerate(self._files) if not (self._folder / name).exists()]

    def write(self, shard: int) -> int:
        """See `Target.write`."""
        written = 0

        def save(path: Path) -> None:
            nonlocal written
            with path.open("wb") as file, pa.ipc.new_stream(file, self._schema) as stream:
                rows: list[dict[str, pa.Array]] = []
                values = 0
                for example in self._content.examples(shard):
                    rows.append(self._row(example))
                    values += example.states.numel()
                    written += 1
                    if values > _BATCH:
                        stream.write_batch(self._batch(rows))
                        rows, values = [], 0
                if rows:
                    stream.write_batch(self._batch(rows))

        write_durably(self._folder / self._files[shard], save)
        return written

    def _row(self, example: Example) -> dict[str, pa.Array]:
        """Arrays of one value each, by column."""
        values = {ID: pa.array([self._content.keys[example.position]])}
        values["hidden_states"] = _lists(example.states.numpy())
        values |= {name: _lists(array) for name, array in example.fields.items()}
        return values | {LABELS + name: _lists(array) for name, array in example.labels.items()}

    def _batch(self, rows: list[dict[str, pa.Array]]) -> pa.RecordBatch:
        columns = []
        for field in self._schema:
            column = pa.concat_arrays([row[field.name] for row in rows])
            if isinstance(field.type, pa.ExtensionType):
                column = pa.ExtensionArray.from_storage(field.type, column)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def finish(self) -> None:
        """See `Target.finish`."""
        info = {"features": self._features.to_dict(), "citation": "", "description": ""}
        info |= {"homepage": "", "license": ""}
        write_durably(self._folder / _INFO, json.dumps(info).encode())
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._files],
            "_fingerprint": self._content.split.record.identity[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        write_durably(self._folder / STATE, json.dumps(state).encode())


def _type(empty: npt.NDArray[Any], depth: int) -> pa.DataType:
    """Lists in lists of the numbers of an array."""
    kind = pa.from_numpy_dtype(empty.dtype)
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def _lists(array: npt.NDArray[Any]) -> pa.Array:
    """One row: an array of any number of axes as lists in lists."""
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    count = array.size
    for size in reversed(array.shape):
        count //= size
        values = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, values)
    return values
