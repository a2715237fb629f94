"""The duties of a reader, and how ragged examples become a packed batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from common.data import Synthetic
from torch import Tensor

from bertvision.featurestore.format.encoding import ChannelStats, decode, encode
from bertvision.featurestore.format.layout import get_encoding

BATCH = 16
Content = Literal["float16", "int8"]


class Batch(NamedTuple):
    """A mini-batch in memory, as it is stored.

    Attributes:
        values: packed (tokens, layers, hidden) or padded (batch, seq, …), as the reader gives it.
        examples: how many it holds.
        decode: how the values become bfloat16, into memory that is used again; where it is None,
            they are cast.
    """

    values: Tensor
    examples: int
    decode: Callable[[], Tensor] | None = None

    def bfloat16(self) -> Tensor:
        """The same values as the model takes them."""
        return self.decode() if self.decode else self.values.to(torch.bfloat16)


class Reader(ABC):
    """One way to store examples and to read them again in shuffled mini-batches.

    Attributes:
        name: what it is called in reports.
        stored: what is on the disk.
        shuffled: how its order is drawn.
        needs: a package that has to be installed, or an empty string.
        limit: it holds no more examples than this, where more would take too long or too much room.
        disk: whether it reads a disk at all, so that it can be cold.
        mapped: whether it maps files, which must be let go before they can be made cold.
    """

    name: str
    stored: str
    shuffled = "random access, a permutation per epoch"
    needs = ""
    limit: int | None = None
    disk = True
    mapped = False

    def __init__(self, layers: int, hidden: int) -> None:
        self.layers, self.hidden = layers, hidden
        self.folder = Path()
        self.n_tokens: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def prepare(self, folder: Path, synthetic: Synthetic) -> None:
        """Write the examples, or use what an earlier run has written from the same ones."""
        self.folder, self.n_tokens = folder / self.slug, synthetic.n_tokens[: self.limit]
        mark = self.folder / ".complete"
        if not mark.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write(synthetic)
            mark.touch()

    @property
    def examples(self) -> int:
        """How many examples it holds."""
        return len(self.n_tokens)

    @property
    def slug(self) -> str:
        """Its folder; readers of the same files share one."""
        return "".join(c if c.isalnum() else "-" for c in self.name)

    @property
    def files(self) -> list[Path]:
        """The files that are read, for the page cache."""
        return [self.folder]

    @abstractmethod
    def write(self, synthetic: Synthetic) -> None:
        """Write the first `examples` examples under `folder`."""

    def open(self) -> None:  # noqa: B027  (readers without state need none)
        """Get ready to read; not timed."""

    def close(self) -> None:  # noqa: B027
        """Let go of files."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """The mini-batches of one epoch, each in memory when it is given out."""

    def permutation(self, seed: int) -> npt.NDArray[np.int64]:
        """The examples of an epoch in random order."""
        return np.random.default_rng(seed).permutation(len(self.n_tokens))

    def groups(self, seed: int) -> Iterator[npt.NDArray[np.int64]]:
        """The examples of each mini-batch of an epoch."""
        order = self.permutation(seed)
        return (order[i : i + BATCH] for i in range(0, len(order), BATCH))


class Packer:
    """Copies ragged examples one after another into a buffer that is used again.

    Filling fresh memory costs several times more than filling memory that was touched before, so
    every reader of ragged examples is given this, though its users would have to write it.
    """

    def __init__(self, layers: int, hidden: int, content: Content) -> None:
        self._shape = layers, hidden
        self._content = content
        self._codes = np.empty((0, layers, hidden), content)
        self._scale = np.empty((0, layers), np.float32)
        self._decoded = torch.empty((0, layers, hidden), dtype=torch.bfloat16)

    def room(self, tokens: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Buffers of so many tokens for codes and scale."""
        if len(self._codes) < tokens:
            self._codes = np.zeros((tokens, *self._shape), self._content)
            self._scale = np.zeros((tokens, self._shape[0]), np.float32)
            self._decoded = torch.zeros((tokens, *self._shape), dtype=torch.bfloat16)
        return self._codes[:tokens], self._scale[:tokens]

    def batch(self, tokens: int, examples: int, stats: ChannelStats | None) -> Batch:
        """The contents of the buffers, as a batch."""
        codes, scale = (torch.from_numpy(array) for array in self.room(tokens))
        out = self._decoded[:tokens]
        if stats is None:
            return Batch(codes, examples, lambda: out.copy_(codes))
        return Batch(codes, examples, lambda: decode(codes, scale, stats, torch.bfloat16, out))

    def pack(self, parts: Sequence[Any], stats: ChannelStats | None = None) -> Batch:
        """Pack payloads (see `payloads`), each any object with the buffer interface."""
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        layers, hidden = self._shape
        width = layers * (hidden + 4 if self._content == "int8" else 2 * hidden)
        ends = np.cumsum([array.size // width for array in arrays])
        codes, scale = self.room(int(ends[-1]))
        begin = 0
        for array, end in zip(arrays, ends, strict=True):
            target = codes[begin:end]
            target.reshape(-1).view(np.uint8)[:] = array[: target.nbytes]
            if self._content == "int8":
                scale[begin:end].reshape(-1).view(np.uint8)[:] = array[target.nbytes :]
            begin = end
        return self.batch(int(ends[-1]), len(parts), stats)


def payloads(synthetic: Synthetic, content: Content, examples: int) -> Iterator[bytes]:
    """The first examples as bytes: float16 (seq, layers, hidden), or int8 codes and scales."""
    codes, scale = _encoded(synthetic, content)
    for i in range(examples):
        rows = synthetic.rows(i)
        part = codes[rows].numpy().tobytes()
        yield part if scale is None else part + scale[rows].numpy().tobytes()


def dense(synthetic: Synthetic, length: int, examples: int) -> Iterator[Tensor]:
    """The first examples padded with zeros, float32 (length, layers, hidden)."""
    for i in range(examples):
        example = synthetic.example(i)
        yield torch.nn.functional.pad(example, (0, 0, 0, 0, 0, length - len(example)))


def magnitude(batches: Iterable[Batch]) -> tuple[int, float]:
    """Examples of an epoch and the sum of all magnitudes: what was read is data, and all of it."""
    examples, total = 0, 0.0
    for batch in batches:
        total += float(batch.bfloat16().float().abs_().sum(dtype=torch.float64))
        examples += batch.examples
    return examples, total


@lru_cache(maxsize=1)
def _encoded(synthetic: Synthetic, content: Content) -> tuple[Tensor, Tensor | None]:
    codes, scale, *_ = encode(synthetic.pool, get_encoding(content), synthetic.stats)
    return codes, scale
