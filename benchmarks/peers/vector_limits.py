"""How fast vectors can be at most: the same bytes, read by system calls and checked by nobody."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.plan import SHARD_TOKENS
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.format.shardfile import read_spans
from bertvision.featurestore.split import ActivationSplit
from peers.vectors import BATCH, BUFFER, Bertvision, Side


class Pair(NamedTuple):
    """A batch of int8: (n, 1, hidden) and (n, 1)."""

    codes: Tensor
    scale: Tensor


class Preadv(Side):
    """The limit: the int8 bytes of one layer in one file, read in its order and decoded."""

    name = "limit: preadv of int8 in file order, 1 thread"

    def write(self) -> None:
        """Write scales and codes of each batch, one after another."""
        codes, scale, _ = encode(self.synthetic.pool, get_encoding("int8"), self.synthetic.stats)
        assert scale is not None
        with (self.folder / "codes").open("wb") as file:
            for rows in self.rows.split(BATCH):
                file.write(scale[rows, -1].numpy().tobytes())
                file.write(codes[rows, -1].contiguous().numpy().tobytes())

    @cached_property
    def _memory(self) -> tuple[Any, Any, Tensor]:
        """For scale, codes and vectors of a batch, used for every one."""
        shape = BATCH, 1, self.synthetic.hidden
        return np.empty(shape[:2], np.float32), np.empty(shape, np.int8), torch.empty(shape)

    def vectors(self, seed: int) -> Iterator[Tensor]:
        """In file order."""
        out = self._memory[2]
        stats = type(self.synthetic.stats)(*(x[-1:] for x in self.synthetic.stats))
        for codes, scale in self.stored(seed):
            yield decode(codes, scale, stats, out=out[: len(codes)])[:, 0]

    def stored(self, seed: int) -> Iterator[Pair]:
        """Codes and scale in file order."""
        scale, codes, _ = self._memory
        offset = 0
        with (self.folder / "codes").open("rb", buffering=0) as file:
            for begin in range(0, len(self.rows), BATCH):
                n = min(BATCH, len(self.rows) - begin)
                parts = [scale[:n].reshape(-1), codes[:n].reshape(-1)]
                offset += os.preadv(file.fileno(), parts, offset)
                yield Pair(torch.from_numpy(codes[:n]), torch.from_numpy(scale[:n]))


class Chunks(Bertvision):
    """The limit on the same bytes: two threads read the chunks of the store, and check nothing."""

    name = "limit: preadv of the store's chunks, 2 threads"

    @cached_property
    def _places(self) -> list[tuple[Path, Path, int, int]]:
        """Files of codes and scales of each shard, where the layer begins, and its tokens."""
        split = ActivationSplit(self.folder, "1e", "train")
        found = []
        for shard in range(split.plan.n_shards):
            codes, scale = (
                self.folder / shard_key(split.record, name, shard)
                for name in ("hidden_states", "scale")
            )
            file = split.storage.open(shard_key(split.record, "hidden_states", shard))
            offset = read_spans(file, len(split.record.layers))[-1].offset
            file.close()
            found.append((codes, scale, offset, split.plan.tokens_of(shard)))
        return found

    def vectors(self, seed: int) -> Iterator[Tensor]:
        """Shard after shard."""
        stats = type(self.synthetic.stats)(*(x[-1:] for x in self.synthetic.stats))
        out = torch.empty(SHARD_TOKENS, 1, self.synthetic.hidden)
        for codes, scale in self.stored(seed):
            yield decode(codes, scale, stats, out=out[: len(codes)])[:, 0]

    def stored(self, seed: int) -> Iterator[Pair]:
        """Codes and scale of each shard."""
        layers, hidden = self.synthetic.pool.shape[1:]
        memory = [
            (
                np.empty((SHARD_TOKENS, layers), np.float32),
                np.empty((SHARD_TOKENS, hidden), np.int8),
            )
            for _ in range(4)
        ]

        def read(place: tuple[Path, Path, int, int], scale: Any, codes: Any) -> Pair:
            files, offset, n = place[:2], place[2], place[3]
            for path, out, begin in zip(files, (codes, scale), (offset, 0), strict=True):
                with path.open("rb", buffering=0) as file:
                    if os.preadv(file.fileno(), [out], begin) != out.nbytes:
                        raise OSError(f"{path} ends within the chunk")
            return Pair(torch.from_numpy(codes[:n, None]), torch.from_numpy(scale[:n, -1:]))

        with ThreadPoolExecutor(2) as threads:
            waiting: deque[Future[Pair]] = deque()
            for number, place in enumerate(self._places):
                if len(waiting) == 3:  # the memory of the fourth is in use outside
                    yield waiting.popleft().result()
                waiting.append(threads.submit(read, place, *memory[number % 4]))
            for pair in waiting:
                yield pair.result()


class MixedChunks(Chunks):
    """The limit with a shuffle: the same reads into memory for 16 shards, and rows out of it.

    Two such buffers take turns: one is filled by the two threads while rows of the other are drawn
    in a permutation of them all. Nothing is checked.
    """

    name = "limit: preadv of the chunks, rows of 16 shards at random"

    @property
    def home(self) -> str:
        """The folder of the chunks."""
        return Chunks.name

    @cached_property
    def _memory(self) -> tuple[list[Any], Any, Any]:
        """Two buffers of codes and scale, and such of a batch."""
        hidden = self.synthetic.hidden

        def room(tokens: int) -> tuple[Any, Any]:
            return np.empty((tokens, hidden), np.int8), np.empty((tokens, 1), np.float32)

        return [room(BUFFER * SHARD_TOKENS) for _ in range(2)], *room(BATCH)

    def stored(self, seed: int) -> Iterator[Pair]:
        """Codes and scale of batches."""
        buffers, codes, scale = self._memory
        rng = np.random.default_rng(seed)

        def read(place: tuple[Path, Path, int, int], into: int, slot: int) -> Any:
            begin = slot * SHARD_TOKENS
            rows = slice(begin, begin + SHARD_TOKENS)
            of_all = np.empty((SHARD_TOKENS, self.synthetic.layers), np.float32)
            outs = buffers[into][0][rows], of_all
            for path, out, offset in zip(place[:2], outs, (place[2], 0), strict=True):
                with path.open("rb", buffering=0) as file:
                    if os.preadv(file.fileno(), [out], offset) != out.nbytes:
                        raise OSError(f"{path} ends within the chunk")
            buffers[into][1][rows] = of_all[:, -1:]
            return np.arange(begin, begin + place[3])

        groups = [self._places[i : i + BUFFER] for i in range(0, len(self._places), BUFFER)]
        with ThreadPoolExecutor(2) as threads:

            def begin(group: int) -> list[Future[Any]]:
                places = groups[group] if group < len(groups) else []
                return [threads.submit(read, place, group % 2, i) for i, place in enumerate(places)]

            waiting = begin(0)
            for group in range(len(groups)):
                rows = rng.permutation(np.concatenate([part.result() for part in waiting]))
                waiting = begin(group + 1)
                held, held_scale = map(torch.from_numpy, buffers[group % 2])
                for index in torch.from_numpy(rows).split(BATCH):
                    n = len(index)
                    out = torch.from_numpy(codes[:n])
                    torch.index_select(held, 0, index, out=out)
                    scales = torch.from_numpy(scale[:n])
                    torch.index_select(held_scale, 0, index, out=scales)
                    yield Pair(out[:, None], scales)
