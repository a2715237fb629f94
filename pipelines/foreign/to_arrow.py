"""Export to Arrow: a data set in a folder, which `datasets.load_from_disk` opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertvision.errors import InputError
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.foreign.arrow_folder import ID, STATE
from bertvision.pipelines.foreign.content import Content, Example, Target
from bertvision.pipelines.foreign.sample import LABELS

_INFO = "dataset_info.json"
_MOST = 2**31 - 1  # values of a row, which offsets of 32 bits count
_BATCH = 1 << 24  # values of rows that are written together


class ArrowTarget(Target):
    """A file of rows for each shard, in stored order: ``id``, ``hidden_states``, and the rest.

    Args:
        folder: to write to.
        content: what is exported.

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
    of = pa.from_numpy_dtype(empty.dtype)
    for _ in range(depth):
        of = pa.list_(of)
    return of


def _lists(array: npt.NDArray[Any]) -> pa.Array:
    """One row: an array of any number of axes as lists in lists."""
    found = pa.array(np.ascontiguousarray(array).reshape(-1))
    count = array.size
    for size in reversed(array.shape):
        count //= size
        found = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, found)
    return found
