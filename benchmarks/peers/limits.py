"""The limits of the machine: the same int8 bytes without any format around them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common.data import Synthetic

from bertvision.featurestore.format.encoding import ChannelStats
from peers.base import Batch, Packer, Reader, payloads


class _Raw(Reader):
    """One file of int8 payloads, one after another."""

    stored = "ragged int8 codes and scales, one file, nothing else"
    _handle = -1
    _stats: ChannelStats | None = None

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__(layers, hidden)
        self._packer = Packer(layers, hidden, "int8")

    @property
    def slug(self) -> str:
        """All limits read one file."""
        return "raw"

    @property
    def _file(self) -> Path:
        return self.folder / "payloads.int8"

    def prepare(self, folder: Path, synthetic: Synthetic) -> None:
        """Write the file; a payload's place follows from the lengths."""
        super().prepare(folder, synthetic)
        size = self.n_tokens * self.layers * (self.hidden + 4)
        self._offset = np.cumsum(size) - size
        self._stats = synthetic.stats

    def write(self, synthetic: Synthetic) -> None:
        """Write all payloads."""
        with self._file.open("wb") as file:
            file.writelines(payloads(synthetic, "int8", self.examples))

    def open(self) -> None:
        """Open the file."""
        self._handle = os.open(self._file, os.O_RDONLY)

    def close(self) -> None:
        """Close it."""
        os.close(self._handle)

    def _places(self, group: npt.NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
        """Where each example begins in the file, and its tokens in the batch."""
        ends = np.cumsum(self.n_tokens[group])
        for i, end in zip(group, ends, strict=True):
            yield int(self._offset[i]), slice(int(end - self.n_tokens[i]), int(end))


class RawRead(_Raw):
    """`preadv` of each example, straight to its place in the reused buffers of the batch."""

    def __init__(self, layers: int, hidden: int, threads: int) -> None:
        super().__init__(layers, hidden)
        self.name = f"limit: preadv of int8, {threads} thread{'s' * (threads > 1)}"
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def batches(self, seed: int) -> Iterator[Batch]:
        """Packed int8."""
        for group in self.groups(seed):
            tokens = int(self.n_tokens[group].sum())
            codes, scale = self._packer.room(tokens)

            def read(place: tuple[int, slice], codes: Any = codes, scale: Any = scale) -> None:
                offset, target = place
                buffers = [codes[target].reshape(-1), scale[target].reshape(-1)]
                wanted = sum(buffer.nbytes for buffer in buffers)
                if os.preadv(self._handle, buffers, offset) != wanted:
                    raise OSError(f"{self._file} is shorter than its payloads")

            places = self._places(group)
            for _ in self._pool.map(read, places) if self._pool else map(read, places):
                pass
            yield self._packer.batch(tokens, len(group), self._stats)


class Memcpy(_Raw):
    """Copies from memory to memory: what no reader of the disk can beat."""

    name = "limit: memcpy of int8, 1 thread"
    disk = False
    _data: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def open(self) -> None:
        """Read everything."""
        super().open()
        self._data = np.fromfile(self._file, np.uint8)

    def close(self) -> None:
        """Let go of it."""
        super().close()
        self._data = np.empty(0, np.uint8)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Packed int8."""
        for group in self.groups(seed):
            tokens = int(self.n_tokens[group].sum())
            codes, scale = self._packer.room(tokens)
            for offset, target in self._places(group):
                for array in (codes[target], scale[target]):
                    array.reshape(-1).view(np.uint8)[:] = self._data[offset : offset + array.nbytes]
                    offset += array.nbytes
            yield self._packer.batch(tokens, len(group), self._stats)


class SequentialRead(_Raw):
    """Reads the file from its beginning to its end, as batches without order."""

    name = "limit: int8 read in file order, 1 thread"
    shuffled = "not at all"

    def permutation(self, seed: int) -> npt.NDArray[np.int64]:
        """The order of the file."""
        return np.arange(self.examples)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Packed int8."""
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for group in self.groups(seed):
            tokens = int(self.n_tokens[group].sum())
            codes, scale = self._packer.room(tokens)
            for offset, target in self._places(group):
                os.preadv(
                    self._handle, [codes[target].reshape(-1), scale[target].reshape(-1)], offset
                )
            yield self._packer.batch(tokens, len(group), self._stats)
