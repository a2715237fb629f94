"""Export to NumPy: one array of all tokens, in the order of the data, and what lies beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.featurestore.storage.durable import fsync, write_durably
from bertvision.pipelines.files import read_json, write_json
from bertvision.pipelines.foreign.content import Content, Target
from bertvision.pipelines.foreign.numpy_arrays import IDS, KEYS, LENGTHS, STATES, load_array
from bertvision.pipelines.foreign.sample import LABELS


class NumpyTarget(Target):
    """``hidden_states.npy`` (tokens, layers, hidden) with ``lengths.npy`` and others beside it.

    The large array is filled under another name, shard after shard: how many are durable stands in
    a file beside it. It gets its own name when it is whole.

    Args:
        folder: to write to.
        content: what is exported.

    Raises:
        InputError: what an interrupted export left is damaged.
    """

    def __init__(self, folder: Path, content: Content) -> None:
        self._folder, self._content = folder, content
        self._partial, self._progress = folder / f".{STATES}", folder / ".progress.json"
        lengths, order = content.lengths, content.order
        self._first = np.empty(len(content), np.int64)
        self._first[order] = np.cumsum(lengths[order]) - lengths[order]
        self._shape = (int(lengths.sum()), len(content.layers), content.split.record.hidden_size)
        self._dtype = np.dtype(str(content.dtype).removeprefix("torch."))
        self._whole = (folder / STATES).exists()
        self._done = 0
        if self._whole:
            self._check(load_array(folder / STATES), folder / STATES)
        elif self._progress.exists():
            self._done = self._durable()
        else:
            made = np.lib.format.open_memmap(self._partial, "w+", self._dtype, self._shape)
            made.flush()

    def _check(self, array: npt.NDArray[Any], path: Path) -> None:
        if (array.shape, array.dtype) != (self._shape, self._dtype):
            raise InputError(f"{path} is not of this export: remove it")

    def _durable(self) -> int:
        """Shards that an interrupted export had written."""
        done = read_json(self._progress)
        if not isinstance(done, int) or not 0 <= done <= self._content.split.plan.n_shards:
            raise InputError(f"{self._progress} is damaged: remove {self._folder} and export again")
        self._check(load_array(self._partial), self._partial)
        return done

    def pending(self) -> list[int]:
        """See `Target.pending`."""
        shards = self._content.split.plan.n_shards
        return [] if self._whole else list(range(self._done, shards))

    def write(self, shard: int) -> int:
        """See `Target.write`."""
        array = np.lib.format.open_memmap(self._partial, "r+")
        written = 0
        for example in self._content.examples(shard):
            first = int(self._first[example.position])
            array[first : first + len(example.states)] = example.states.numpy()
            written += 1
        array.flush()
        fsync(self._partial)
        write_json(self._progress, shard + 1)
        return written

    def finish(self) -> None:
        """See `Target.finish`."""
        content, order = self._content, self._content.order
        self._save(LENGTHS, content.lengths[order])
        keys = json.dumps([content.keys[position] for position in order], ensure_ascii=False)
        write_durably(self._folder / KEYS, keys.encode())
        spans = zip(content.split.plan.first_token[order], content.lengths[order], strict=True)
        tokens = np.concatenate([np.arange(first, first + n) for first, n in spans])
        for name, array in content.fields.items():
            self._save(IDS if name == "input_ids" else f"{name}.npy", array[tokens])
        for name, array in content.labels.items():
            self._save(f"{LABELS}{name}.npy", array[order])
        if not self._whole:
            fsync(self._partial)
            os.replace(self._partial, self._folder / STATES)
            fsync(self._folder)
        self._progress.unlink(missing_ok=True)

    def _save(self, name: str, array: npt.NDArray[Any]) -> None:
        def save(path: Path) -> None:
            with path.open("wb") as file:
                np.save(file, array, allow_pickle=False)

        write_durably(self._folder / name, save)
