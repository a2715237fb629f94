"""Batches on their way to a GPU: through page-locked memory, beside the work on the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.stream import ActivationLoader


class PinnedBuffers:
    """Page-locked memory and a stream of its own: the next batch crosses the bus during a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def moved(self, batches: ActivationLoader) -> Iterator[ActivationBatch]:
        """Batches on the device, copied one ahead."""
        if self._stream is None:
            yield from batches
            return
        ahead: tuple[ActivationBatch, torch.cuda.Event] | None = None
        for batch in batches:
            following = self._begin(batch)
            if ahead is not None:
                yield self._ready(*ahead)
            ahead = following
        if ahead is not None:
            yield self._ready(*ahead)

    def _begin(self, batch: ActivationBatch) -> tuple[ActivationBatch, torch.cuda.Event]:
        codes = batch.codes.transpose(0, 1)  # layer after layer, as they lie in memory
        if len(self._free) < 3:
            pinned = torch.empty(codes.nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            pinned, used = self._free.popleft()
            used.synchronize()
            if pinned.nbytes < codes.nbytes:
                pinned = torch.empty(codes.nbytes, dtype=torch.uint8, pin_memory=True)
        staged = pinned[: codes.nbytes].view(codes.dtype).view(codes.shape)
        staged.copy_(codes)
        with torch.cuda.stream(self._stream):
            there = staged.to(self._device, non_blocking=True).transpose(0, 1)
            rest = ActivationBatch(
                batch.codes[:0],
                batch.scale,
                batch.stats,
                batch.lengths,
                batch.examples,
                batch.labels,
            )
            rest = rest.pin_memory().to(self._device, non_blocking=True)
            moved = ActivationBatch(
                there, rest.scale, rest.stats, rest.lengths, rest.examples, rest.labels
            )
            event = torch.cuda.Event()
            event.record(self._stream)
        self._free.append((pinned, event))
        return moved, event

    def _ready(self, batch: ActivationBatch, event: torch.cuda.Event) -> ActivationBatch:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in (batch.codes, batch.scale, batch.lengths, *(batch.stats or ())):
            if tensor is not None:  # its memory may be used again only after this stream's work
                tensor.record_stream(current)
        for tensor in batch.labels.values():
            tensor.record_stream(current)
        return batch
