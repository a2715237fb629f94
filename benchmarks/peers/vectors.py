"""Ways to keep vectors of single tokens and to give them in shuffled batches."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from common.data import Synthetic
from torch import Tensor

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
        """Name of its folder; sides of one home read the same files."""
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
        """The folder of `Bertvision`."""
        return OURS


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
