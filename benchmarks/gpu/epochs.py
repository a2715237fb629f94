"""Epochs of training from everywhere that hidden states can come from, and the bus between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from common.harness import drop_cache, warm_cache
from common.heads import BATCH, Heads

from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.stream import ActivationLoader
from gpu.clock import seconds_of
from gpu.extraction import Extraction
from gpu.pinned import PinnedBuffers


class Epochs:
    """All ways to the codes of a split, and to the hidden states they stand for.

    Args:
        source: that extracted the split, and can run the encoder again.

    Attributes:
        bytes_per_example: of codes and scales.
    """

    def __init__(self, source: Extraction) -> None:
        self._folder, self._split = source.folder, source.split
        self._windows, self._encoder = source.windows, source.encoder
        self._device, self._cuda = source.device, source.device.type == "cuda"
        self._loader = ActivationLoader(self._split, batch_size=BATCH)
        self._resident: list[ActivationBatch] | None = None
        self._buffers = PinnedBuffers(self._device)
        record = self._split.record
        per_token = len(record.layers) * (record.hidden_size + 4)
        self.bytes_per_example = per_token * record.tokens / record.examples

    # -- the bus

    def plain_copy(self) -> float:
        """GB/s of one page-locked copy to the device, of a batch's size."""
        nbytes, times = int(self.bytes_per_example * BATCH), 16
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

        def run() -> None:
            for _ in range(times):
                there.copy_(host, non_blocking=True)

        return nbytes * times / self._seconds(run) / 1e9

    def streamed(self) -> float:
        """Codes from the page cache to the device."""
        warm_cache([self._folder])
        return len(self._split) / self._seconds(lambda: deque(self.from_cache(), maxlen=0))

    def stream_decoded(self) -> float:
        """The same, decoded there."""
        warm_cache([self._folder])

        def run() -> None:
            for batch in self.from_cache():
                batch.decode(torch.bfloat16)

        return len(self._split) / self._seconds(run)

    # -- where an epoch's batches come from

    def from_cache(self) -> Iterator[ActivationBatch]:
        """Batches of an epoch on the device, each copied while the one before is worked on."""
        return self._buffers.moved(self._loader)

    def from_disk(self) -> Iterator[ActivationBatch]:
        """The same with nothing in the page cache."""
        return self.from_cache()

    def resident(self) -> Iterator[ActivationBatch]:
        """Batches whose codes stay in device memory."""
        if self._resident is None:
            self._resident = [batch.to(self._device) for batch in self._loader]
        return iter(self._resident)

    def recomputed(self) -> Iterator[tuple[torch.Tensor, ActivationBatch]]:
        """Batches of 16 windows, of which only labels are stored; with their hidden states."""
        order, plan = self._loader.order(0), self._split.plan
        for i in range(len(order)):
            examples = order.batch(i)
            rows = plan.example_id[examples]
            parts = [
                self._encoder(self._windows, rows[part])[0].to(torch.bfloat16, copy=True)
                for part in self._encoder.batches(self._windows.n_tokens[rows])
            ]
            labels = {k: torch.from_numpy(v[examples]) for k, v in self._split.labels.items()}
            n_tokens = torch.from_numpy(plan.n_tokens[examples].astype(np.int64))
            empty = torch.empty(0)
            only = ActivationBatch(empty, None, None, n_tokens, torch.from_numpy(examples), labels)
            yield torch.cat(parts), only.to(self._device)

    def epoch(self, training: Heads, source: Callable[[], Iterator]) -> float:
        """Examples/s of an epoch of training."""
        if source == self.from_disk:
            drop_cache([self._folder / "arrays.zarr"])
        elif source == self.from_cache:
            warm_cache([self._folder])
        elif source == self.resident:
            source()  # what comes to the device once is not part of an epoch

        def run() -> None:
            for batch in source():
                if isinstance(batch, ActivationBatch):
                    batch = batch.decode(torch.bfloat16), batch
                training.step(batch[0], batch[1].lengths, batch[1].labels)

        return len(self._split) / self._seconds(run)

    def steps(self, training: Heads) -> float:
        """Examples/s of training steps alone, on one batch over and over."""
        batch = next(self.resident())
        hidden_states, times = batch.decode(torch.bfloat16), 4

        def run() -> None:
            for _ in range(times):
                training.step(hidden_states, batch.lengths, batch.labels)

        return times * len(batch) / self._seconds(run)

    def _seconds(self, run: Callable[[], object]) -> float:
        return seconds_of(run, self._device)
