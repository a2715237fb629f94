"""Ways to keep vectors of single tokens and to give them in shuffled batches."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from common.data import Synthetic
from torch import Tensor

from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.plan import SHARD_TOKENS
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.format.shardfile import read_spans
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.tokens.stream import TokenStream

BATCH, BUFFER, CONTEXT = 4096, 16, 128
OURS = "bertvision"
RESIDENT = "bertvision, all shards in the buffer"


class Side(ABC):
    """One way to keep vectors and to give them in batches.

    Attributes:
        name: what it is called in reports.
        whole: whether an epoch gives every token, so that it can be compared with the truth.
        disk: whether it reads a disk, so that it can be cold.
    """

    name: str
    whole = True
    disk = True

    def __init__(self, folder: Path, synthetic: Synthetic) -> None:
        self.folder = folder / "".join(c if c.isalnum() else "-" for c in self.home)
        self.rows = torch.cat([synthetic.rows(i) for i in range(len(synthetic))])
        self.layer = synthetic.pool[:, -1]  # (pool, hidden)
        self.synthetic = synthetic
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self.write()

    @property
    def home(self) -> str:
        """What its folder is called after; sides of one home read the same files."""
        return self.name

    @abstractmethod
    def write(self) -> None:
        """Write the vectors, once."""

    @abstractmethod
    def vectors(self, seed: int) -> Iterator[Tensor]:
        """An epoch of batches, (n, hidden) float32."""

    def stored(self, seed: int) -> Iterator[Sized] | None:
        """An epoch of batches as they are stored, where that is something else."""
        return None


class Bertvision(Side):
    """The token stream, shuffled within 16 shards (65,536 tokens), over one layer of several."""

    name = OURS
    buffer: int | None = BUFFER

    def write(self) -> None:
        """Write an int8 split of all layers."""
        self.synthetic.write(self.folder)

    @cached_property
    def _stream(self) -> TokenStream:
        split = ActivationSplit(self.folder, "1e", "train")
        shards = split.record.shards
        # a buffer for all of them would be cold once
        buffer = shards if self.buffer is None else min(self.buffer, shards - 1)
        return split.tokens(-1, batch_size=BATCH, buffer=buffer)

    def vectors(self, seed: int) -> Iterator[Tensor]:
        """The next epoch of one stream."""
        return self._stream.vectors()

    def stored(self, seed: int) -> Iterator[Sized]:
        """The next epoch of one stream."""
        return iter(self._stream)


class Resident(Bertvision):
    """The same with room for all shards: read and checked once, they stay in memory as int8."""

    name = RESIDENT
    buffer = None
    disk = False

    @property
    def home(self) -> str:
        """Bertvision's."""
        return OURS


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
        """That of the chunks."""
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


class MemMap(Side):
    """A memory map of float16 rows, each batch by fancy indexing in a permutation of all."""

    name = "np.memmap float16, random rows"

    def write(self) -> None:
        """Write all rows."""
        shape = (len(self.rows), self.synthetic.hidden)
        file = np.lib.format.open_memmap(self.folder / "rows.npy", "w+", np.float16, shape)
        for begin in range(0, len(self.rows), BATCH):
            file[begin : begin + BATCH] = self.layer[self.rows[begin : begin + BATCH]].numpy()
        file.flush()

    def vectors(self, seed: int) -> Iterator[Tensor]:
        """The vectors in the order of a permutation."""
        return (batch.float() for batch in self.stored(seed))

    def stored(self, seed: int) -> Iterator[Tensor]:
        """The same in float16."""
        file = np.load(self.folder / "rows.npy", mmap_mode="r")
        order = np.random.default_rng(seed).permutation(len(file))
        for begin in range(0, len(order), BATCH):
            yield torch.from_numpy(file[order[begin : begin + BATCH]])


class InMemory(Side):
    """All rows in memory in float32."""

    name = "in memory float32, random rows"
    disk = False

    def write(self) -> None:
        """Nothing is written."""

    def vectors(self, seed: int) -> Iterator[Tensor]:
        """The vectors in the order of a permutation."""
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self._held)))
        return (self._held[rows] for rows in order.split(BATCH))

    @cached_property
    def _held(self) -> Tensor:
        """(tokens, hidden), made by the check before anything is measured."""
        return self.layer[self.rows]


class SAELensCache(Side):
    """SAELens' own cache: an Arrow data set of contexts, and its mixing buffer of 65,536 tokens."""

    name = "SAELens cached activations, float32"
    whole = False  # it drops what does not fill a context or a batch

    def write(self) -> None:
        """Write contexts as its runner does, a column named as the hook."""
        from datasets import Array2D, Dataset, Features, Sequence, Value

        shape = (CONTEXT, self.synthetic.hidden)
        features = Features(
            {
                "hook": Array2D(shape=shape, dtype="float32"),
                "token_ids": Sequence(Value("int32"), length=CONTEXT),
            }
        )

        def contexts() -> Iterator[dict[str, object]]:
            for rows in self.rows[: len(self.rows) // CONTEXT * CONTEXT].split(CONTEXT):
                yield {"hook": self.layer[rows].numpy(), "token_ids": list(range(CONTEXT))}

        made = Dataset.from_generator(
            contexts, features=features, cache_dir=str(self.folder / "made"), keep_in_memory=False
        )
        made.save_to_disk(self.folder / "saved")

    def vectors(self, seed: int) -> Iterator[Tensor]:
        """As many batches as there are tokens for, of one store that is opened once."""
        torch.manual_seed(seed)
        return itertools.islice(self._store, len(self.rows) // BATCH)

    @cached_property
    def _store(self) -> Iterator[Tensor]:
        """Batches without end."""
        from sae_lens.training.activations_store import ActivationsStore

        store = ActivationsStore(
            model=SimpleNamespace(),  # of a cache it is not asked anything
            dataset=None,
            streaming=False,
            hook_name="hook",
            hook_head_index=None,
            context_size=CONTEXT,
            d_in=self.synthetic.hidden,
            n_batches_in_buffer=BUFFER * BATCH // CONTEXT,
            total_training_tokens=len(self.rows),
            store_batch_size_prompts=16,
            train_batch_size_tokens=BATCH,
            prepend_bos=False,
            normalize_activations="none",
            device=torch.device("cpu"),
            dtype="float32",
            cached_activations_path=str(self.folder / "saved"),
        )
        return iter(store)
