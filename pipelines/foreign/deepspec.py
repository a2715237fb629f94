"""The target cache of DeepSpec: shards of raw bytes, an index of samples, a manifest.

``samples.idx`` has a record of 56 bytes for each sample: its number, its shard, its tokens and
where in the shard its arrays begin. ``manifest.json`` says what they are (version 2).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from bertvision.errors import InputError, counted
from bertvision.pipelines.files import read_json
from bertvision.pipelines.foreign.sample import Sample, Source

MANIFEST, INDEX = "manifest.json", "samples.idx"
_RECORD = np.dtype(
    [
        *(("sample", "<u8"), ("shard", "<u4"), ("tokens", "<u4")),
        *(("input_ids", "<u8"), ("attention_mask", "<u8"), ("loss_mask", "<u8")),
        *(("layers", "<u8"), ("last", "<u8")),
    ]
)
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class _Shard(BaseModel):
    shard_id: int
    # a name and no path: what it names lies in the folder
    file_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    version: int
    num_samples: int = Field(ge=0)
    hidden_size: int = Field(ge=1, le=1 << 20)
    target_layer_ids: list[int] = Field(min_length=1, max_length=9999)
    hidden_dtype: str
    shards: list[_Shard] = Field(max_length=1 << 20)
    target_model_name_or_path: str | None = None


class DeepSpecCache(Source):
    """A folder that DeepSpec's ``prepare_target_cache`` wrote.

    Its layers are those of the manifest, by the index of their hidden state (layer i gives hidden
    state i + 1), and the last hidden state behind the last norm.

    Args:
        folder: Folder with manifest, index and shards.

    Raises:
        InputError: the manifest or the index is damaged, or of another version.
    """

    kind = "DeepSpec"

    def __init__(self, folder: Path) -> None:
        self._folder, place = folder, folder / MANIFEST
        try:
            self._manifest = _Manifest.model_validate(read_json(place, 1 << 26))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise InputError(f"{place} is damaged: {field}: {first['msg']}") from None
        if self._manifest.version != 2:
            raise InputError(f"{place} has version {self._manifest.version}: 2 is read")
        if self._manifest.hidden_dtype not in _DTYPES:
            raise InputError(
                f"{place}: hidden_dtype {self._manifest.hidden_dtype!r} is none of "
                f"{', '.join(_DTYPES)}"
            )
        index = folder / INDEX
        size = _size(index)
        if size != self._manifest.num_samples * _RECORD.itemsize or not size:
            raise InputError(
                f"{index} has {size:,} bytes: {counted(self._manifest.num_samples, 'sample')} of "
                f"{_RECORD.itemsize} bytes are due"
            )
        self._records = np.fromfile(index, _RECORD)
        if (self._records["sample"] != np.arange(len(self._records))).any():
            raise InputError(f"{index} does not name its samples in order: it is damaged")
        self._shards = {shard.shard_id: shard.file_name for shard in self._manifest.shards}
        self.keys = [str(i) for i in range(len(self._records))]
        self.longest = int(self._records["tokens"].max())
        sizes = [_size(folder / name) for name in self._shards.values()]
        if self.longest * self._manifest.hidden_size > max(sizes, default=0):
            raise InputError(
                f"{index} names a sample of {counted(self.longest, 'token')}, which no shard has "
                "room for: it is damaged"
            )
        states = [f"hidden state {i + 1}" for i in self._manifest.target_layer_ids]
        self.layer_names = [*states, "last, normed"]
        self.model = self._manifest.target_model_name_or_path
        self._open = lru_cache(maxsize=4)(self._mapped)

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        record = self._records[position]
        tokens, hidden = int(record["tokens"]), self._manifest.hidden_size
        depth = len(self._manifest.target_layer_ids)
        layers = self._states(record, "layers", (tokens, depth, hidden))
        last = self._states(record, "last", (tokens, 1, hidden))
        return Sample(
            torch.cat([layers, last], dim=1),
            self._bytes(record, "input_ids", 4 * tokens).view("<i4").astype(np.int32),
            fields={"loss_mask": self._bytes(record, "loss_mask", tokens)},
        )

    def _states(self, record: Any, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = _DTYPES[self._manifest.hidden_dtype]
        values = self._bytes(record, name, prod(shape) * dtype.itemsize)
        states = torch.from_numpy(values).view(dtype).view(shape)
        return states if dtype == torch.bfloat16 else states.float()

    def _bytes(self, record: Any, name: str, count: int) -> npt.NDArray[np.uint8]:
        """A part of a shard, in memory of its own."""
        shard, begin = self._open(int(record["shard"])), int(record[name])
        if not count or begin + count > len(shard):
            raise InputError(
                f"sample {record['sample']} of {self._folder}: its {name} end behind the end of "
                f"shard {record['shard']}, or are none: the cache is damaged"
            )
        return np.array(shard[begin : begin + count])

    def _mapped(self, shard: int) -> npt.NDArray[np.uint8]:
        path = self._folder / self._shards.get(shard, "")
        if not _size(path):
            raise InputError(f"{self._folder} lacks shard {shard}, which its index names")
        return np.memmap(path, np.uint8, "r")


def _size(path: Path) -> int:
    """Bytes of a regular file; 0 of what is none."""
    return path.stat().st_size if path.is_file() else 0
