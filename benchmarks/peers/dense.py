"""Readers of padded examples: one array over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.data import MAX_LENGTH, Synthetic
from torch.utils.data import DataLoader, Dataset

from peers.base import BATCH, Batch, Reader, dense

LIMIT = 80
"""Padded examples take up to 39.5 MB each, and reading is as fast from fewer of them."""


class _Examples(Dataset[Any]):
    """Reads example by example; the file is opened in the process that reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: Any = None

    def __getitem__(self, index: int) -> Any:
        if self._data is None:
            import h5py

            self._data = h5py.File(self._path, "r")["hidden_states"]
        return self._data[index]


class H5Py(Reader):
    """The original's way: float32, padded, one HDF5 chunk an example, read by a DataLoader."""

    stored = "dense float32 (386, hidden, layers) an example, HDF5, a chunk each"
    needs = "h5py"
    limit = LIMIT

    def __init__(self, layers: int, hidden: int, workers: int) -> None:
        super().__init__(layers, hidden)
        self.name = f"h5py dense float32, DataLoader workers {workers}"
        self._workers = workers
        self._order: list[int] = []
        self._loader: DataLoader[Any] | None = None

    @property
    def slug(self) -> str:
        """Both worker counts read one file."""
        return "h5py"

    def write(self, synthetic: Synthetic) -> None:
        """Write one dataset of all examples."""
        import h5py

        shape = (MAX_LENGTH, self.hidden, self.layers)
        with h5py.File(self.folder / "hidden_states.h5", "w") as file:
            data = file.create_dataset(
                "hidden_states", (self.examples, *shape), "float32", chunks=(1, *shape)
            )
            for i, example in enumerate(dense(synthetic, MAX_LENGTH, self.examples)):
                data[i] = example.transpose(1, 2).numpy()

    def open(self) -> None:
        """Start the workers, which stay for all epochs."""
        self._loader = DataLoader(
            _Examples(self.folder / "hidden_states.h5"),
            batch_size=BATCH,
            sampler=self._order,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            # forking a process whose libraries run threads may hang
            multiprocessing_context="spawn" if self._workers else None,
        )

    def close(self) -> None:
        """Stop the workers."""
        self._loader = None

    def batches(self, seed: int) -> Iterator[Batch]:
        """(batch, seq, hidden, layers) float32."""
        assert self._loader is not None
        self._order[:] = self.permutation(seed).tolist()
        for values in self._loader:
            yield Batch(values, len(values))


class MemMap(Reader):
    """A memory-mapped array; NumPy's own indexing, or copies into a buffer that is used again."""

    stored = "dense float16 (386, layers, hidden) an example, one file"
    mapped = True
    limit = LIMIT

    def __init__(self, layers: int, hidden: int, reuse: bool) -> None:
        super().__init__(layers, hidden)
        self.name = f"np.memmap dense float16, {'reused buffer' if reuse else 'fancy indexing'}"
        self._reuse = reuse
        self._buffer = np.zeros(0, np.float16)
        self._data: Any = None

    @property
    def slug(self) -> str:
        """Both read one file."""
        return "memmap"

    def write(self, synthetic: Synthetic) -> None:
        """Write one array of all examples."""
        with (self.folder / "hidden_states.f16").open("wb") as file:
            for example in dense(synthetic, MAX_LENGTH, self.examples):
                file.write(example.half().numpy().tobytes())

    def open(self) -> None:
        """Map the file."""
        shape = (self.examples, MAX_LENGTH, self.layers, self.hidden)
        self._data = np.memmap(self.folder / "hidden_states.f16", np.float16, "r", shape=shape)
        if self._reuse:
            self._buffer = np.zeros((BATCH, *shape[1:]), np.float16)

    def close(self) -> None:
        """Let go of the mapping."""
        self._data = None

    def batches(self, seed: int) -> Iterator[Batch]:
        """(batch, seq, layers, hidden) float16."""
        for group in self.groups(seed):
            if self._reuse:
                values = self._buffer[: len(group)]
                for target, i in zip(values, group, strict=True):
                    target[...] = self._data[i]
            else:
                values = self._data[group]
            yield Batch(torch.from_numpy(np.asarray(values)), len(group))


class TensorDictMemMap(Reader):
    """A TensorDict of memory-mapped tensors, indexed with the examples of a batch."""

    name = "tensordict memory-mapped, dense float16"
    stored = "dense float16 (386, layers, hidden) an example, one memory-mapped tensor"
    needs = "tensordict"
    mapped = True
    limit = LIMIT
    _data: Any = None

    def write(self, synthetic: Synthetic) -> None:
        """Write one memory-mapped tensor of all examples."""
        from tensordict import TensorDict

        n = self.examples
        empty = torch.empty((), dtype=torch.float16).expand(n, MAX_LENGTH, self.layers, self.hidden)
        data = TensorDict({"hidden_states": empty}, batch_size=[n]).memmap_like(self.folder)
        for i, example in enumerate(dense(synthetic, MAX_LENGTH, self.examples)):
            data["hidden_states"][i] = example.half()

    def open(self) -> None:
        """Map the tensors."""
        from tensordict import TensorDict

        self._data = TensorDict.load_memmap(self.folder)

    def close(self) -> None:
        """Let go of the mapping."""
        self._data = None

    def batches(self, seed: int) -> Iterator[Batch]:
        """(batch, seq, layers, hidden) float16."""
        for group in self.groups(seed):
            values = self._data[torch.from_numpy(group)]["hidden_states"]
            yield Batch(values, len(group))


class ZarrPerExample(Reader):
    """A Zarr array with zarr-python's defaults, read one example after another."""

    name = "zarr-python per example, dense float16"
    stored = "dense float16 (386, layers, hidden) an example, a chunk each, zarr's default codecs"
    limit = LIMIT

    def write(self, synthetic: Synthetic) -> None:
        """Write one array of all examples."""
        import zarr

        shape = (MAX_LENGTH, self.layers, self.hidden)
        data = zarr.create_array(
            self.folder / "hidden_states.zarr",
            shape=(self.examples, *shape),
            chunks=(1, *shape),
            dtype="float16",
            overwrite=True,
        )
        for i, example in enumerate(dense(synthetic, MAX_LENGTH, self.examples)):
            data[i] = example.half().numpy()

    def batches(self, seed: int) -> Iterator[Batch]:
        """(batch, seq, layers, hidden) float16."""
        import zarr

        data = zarr.open_array(self.folder / "hidden_states.zarr", mode="r")
        for group in self.groups(seed):
            values = np.stack([np.asarray(data[int(i)]) for i in group])
            yield Batch(torch.from_numpy(values), len(group))
