"""Forms in which sequences of hidden states are kept, written by code that may be killed."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertvision import ActivationLoader, ActivationSplit, ActivationStore

OURS = "bertvision, int8"
Examples = Iterable[tuple[int, Tensor]]
_SHARD = 128  # examples of an Arrow file


class Form(ABC):
    """One way to keep examples, each (seq, layers, hidden) float16.

    Attributes:
        name: what it is called in reports.
    """

    name: str

    @abstractmethod
    def write(self, folder: Path, examples: Examples) -> None:
        """Write examples into a folder, or go on as the form's users do."""

    def flush(self, folder: Path) -> None:
        """Take what was written to the disk."""
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def has(self, folder: Path, key: int) -> bool:
        """Whether an example need not be given again."""
        return False

    @abstractmethod
    def read(self, folder: Path, key: int) -> Tensor:
        """One example."""

    def sequences(self, folder: Path, order: Sequence[int]) -> Iterator[int]:
        """Read examples in an order; the tokens of each."""
        return (len(self.read(folder, key)) for key in order)

    @abstractmethod
    def payload(self, folder: Path) -> list[tuple[Path, int, int]]:
        """Files with stored values, and where these begin and end."""


class Store(Form):
    """The activation store, by its writer."""

    def __init__(self, encoding: str) -> None:
        self.name = f"bertvision, {encoding}"
        self._encoding = encoding
        self._opened: tuple[Path, ActivationSplit] | None = None

    def write(self, folder: Path, examples: Examples) -> None:
        """Write a split; what is committed stays."""
        self._opened = None
        (key, first), *_ = head = list(itertools.islice(examples, 1))
        store = ActivationStore.create(folder / "store")
        writer = store.writer(
            "0e",
            "train",
            hidden_size=first.shape[2],
            layers=range(first.shape[1]),
            encoding=self._encoding,
        )
        with writer:
            self._keys = set(writer)
            for key, states in itertools.chain(head, examples):
                if key not in writer:
                    writer.add(key, states)
            writer.finish()

    def flush(self, folder: Path) -> None:
        """Nothing: each shard was flushed before it was committed."""

    def has(self, folder: Path, key: int) -> bool:
        """Whether the writer had it when it was opened."""
        return str(key) in self._keys

    def _split(self, folder: Path) -> ActivationSplit:
        if self._opened is None or self._opened[0] != folder:
            self._opened = folder, ActivationStore.open(folder / "store")["0e/train"]
        return self._opened[1]

    def read(self, folder: Path, key: int) -> Tensor:
        """An example by its place among the keys."""
        split = self._split(folder)
        keys = split.table()["id"].to_pylist()
        at = int(np.flatnonzero(split.plan.example_id == keys.index(str(key)))[0])
        return split[at].transpose(1, 2)

    def sequences(self, folder: Path, order: Sequence[int]) -> Iterator[int]:
        """All examples in an order of the loader's own, 16 at a time."""
        split = ActivationStore.open(folder / "store")["0e/train"]
        loader = ActivationLoader(split, batch_size=16, seed=order[0])
        return (len(batch.codes) for batch in loader)

    def payload(self, folder: Path) -> list[tuple[Path, int, int]]:
        """Real tokens of the first layer of each shard."""
        split = self._split(folder)
        row = split.encoding.codes_size(split.record.hidden_size)
        row *= np.dtype(split.encoding.zarr_dtype).itemsize
        files = sorted((folder / "store").glob("arrays.zarr/0e/train/hidden_states/c/*/0/0"))
        return [(path, 0, row * split.plan.tokens_of(int(path.parents[1].name))) for path in files]


class Files(Form):
    """A file for each example; one that exists is left as it is."""

    def __init__(self, name: str, suffix: str) -> None:
        self.name, self._suffix = name, suffix

    def _path(self, folder: Path, key: int) -> Path:
        return folder / f"hs_{key}.{self._suffix}"

    def write(self, folder: Path, examples: Examples) -> None:
        """Write those that are not there."""
        for key, states in examples:
            path = self._path(folder, key)
            if path.exists():
                continue
            if self._suffix == "pt":
                # a view would be saved with all the memory that it is of
                torch.save({"hidden_states": states.clone()}, path)
            else:
                save_file({"hidden_states": states.contiguous()}, path)

    def has(self, folder: Path, key: int) -> bool:
        """Whether there is a file."""
        return self._path(folder, key).exists()

    def read(self, folder: Path, key: int) -> Tensor:
        """The file's tensor."""
        path = self._path(folder, key)
        if self._suffix == "pt":
            loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
            return loaded["hidden_states"]
        return load_file(path)["hidden_states"]

    def payload(self, folder: Path) -> list[tuple[Path, int, int]]:
        """The values of each file."""
        paths = sorted(folder.glob(f"hs_*.{self._suffix}"))
        return [_place(path, self.read(folder, int(path.stem[3:]))) for path in paths]


class MemMap(Form):
    """One float16 array for all tokens, with the lengths beside it: a run begins it anew."""

    name = "memory map, float16"

    def write(self, folder: Path, examples: Examples) -> None:
        """Write all of them."""
        taken = list(examples)
        sizes = np.array([len(states) for _, states in taken])
        np.save(folder / "lengths.npy", sizes)
        shape = (int(sizes.sum()), *taken[0][1].shape[1:])
        file = np.lib.format.open_memmap(folder / "states.npy", "w+", np.float16, shape)
        for end, size, (_, states) in zip(np.cumsum(sizes), sizes, taken, strict=True):
            file[end - size : end] = states.numpy()
        file.flush()

    def read(self, folder: Path, key: int) -> Tensor:
        """Its rows, copied out of the map."""
        ends = np.cumsum(np.load(folder / "lengths.npy"))
        begin = ends[key - 1] if key else 0
        rows = np.load(folder / "states.npy", mmap_mode="r")[begin : ends[key]]
        return torch.from_numpy(rows.copy())

    def payload(self, folder: Path) -> list[tuple[Path, int, int]]:
        """The file behind its header."""
        path = folder / "states.npy"
        size = path.stat().st_size
        return [(path, size - np.load(path, mmap_mode="r").nbytes, size)]


class Arrow(Form):
    """A data set of Hugging Face's, bytes in a column, as a run saves it: begun anew."""

    name = "data set (Arrow), float16"

    def write(self, folder: Path, examples: Examples) -> None:
        """Write files of some examples each, with their shapes."""
        import pyarrow as pa

        for path in folder.glob("*.arrow"):
            path.unlink()
        schema = pa.schema([("key", pa.int64()), ("seq", pa.int64()), ("states", pa.binary())])
        taken = iter(examples)
        for number in itertools.count():
            if not (part := list(itertools.islice(taken, _SHARD))):
                return
            sink = pa.OSFile(str(folder / f"{number:05}.arrow"), "wb")
            with sink, pa.ipc.new_file(sink, schema) as file:
                for key, states in part:
                    row = [[key], [len(states)], [states.numpy().tobytes()]]
                    file.write(pa.record_batch(row, schema=schema))
            self._shape = part[0][1].shape[1:]

    def read(self, folder: Path, key: int) -> Tensor:
        """The row of the file that has it."""
        import pyarrow as pa

        number, row = divmod(key, _SHARD)
        with pa.memory_map(str(folder / f"{number:05}.arrow")) as source:
            batch = pa.ipc.open_file(source).get_batch(row)
            data = np.frombuffer(batch["states"][0].as_py(), np.float16)
        return torch.from_numpy(data.reshape(batch["seq"][0].as_py(), *self._shape).copy())

    def payload(self, folder: Path) -> list[tuple[Path, int, int]]:
        """The values of the first example of each file."""
        paths = sorted(folder.glob("*.arrow"))
        return [_place(path, self.read(folder, int(path.stem) * _SHARD)) for path in paths]


def _place(path: Path, states: Tensor) -> tuple[Path, int, int]:
    """Where a file has the bytes of an example."""
    values = states.numpy().tobytes()
    begin = path.read_bytes().index(values)
    return path, begin, begin + len(values)


FORMS: list[Form] = [
    Store("int8"),
    Store("float16"),
    Files("safetensors, a file each", "safetensors"),
    Files("torch.save, a file each", "pt"),
    MemMap(),
    Arrow(),
]
