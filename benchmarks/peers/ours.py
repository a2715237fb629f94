"""bertvision's own store and loader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from common.data import Synthetic

from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from peers.base import BATCH, Batch, Reader


class Bertvision(Reader):
    """The store with its default encoding, and its loader with its default settings."""

    name = "bertvision"
    stored = "ragged int8 codes, scales and checksums, sharded"
    shuffled = "shuffled within a buffer of shards, a new order per epoch"
    _loader: ActivationLoader | None = None

    def prepare(self, folder: Path, synthetic: Synthetic) -> None:
        """Write a split, or use the one that is there if the store says that it is the same."""
        self.folder, self.n_tokens = folder / self.slug, synthetic.n_tokens
        self.write(synthetic)

    def write(self, synthetic: Synthetic) -> None:
        """Write what is missing of the split."""
        synthetic.write(self.folder)

    def open(self) -> None:
        """Open the split."""
        split = ActivationSplit(self.folder, "1e", "train")
        self._loader = ActivationLoader(split, batch_size=BATCH)

    def close(self) -> None:
        """Let go of it."""
        self._loader = None

    def batches(self, seed: int) -> Iterator[Batch]:
        """Packed int8."""
        assert self._loader is not None
        for batch in self._loader:
            yield Batch(batch.codes, len(batch), partial(batch.decode, torch.bfloat16))
