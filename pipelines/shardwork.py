"""Shards of a split, one after another: computed on the device while the last ones are written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import NonFiniteError
from bertvision.featurestore.encoding import ChannelStats, Encoded, encode
from bertvision.featurestore.schema import ShardRecord
from bertvision.featurestore.writer import SplitWriter
from bertvision.pipelines.encoder import Encoder
from bertvision.pipelines.tasks.windows import Windows

NonFinite = Literal["error", "record"]
"""What to do about NaN and infinity in hidden states (see `encode`)."""
_WRITERS = {"cpu": 1, "cuda": 4}
"""Threads that write shards: on a CPU they take time from the encoder, beside a GPU they do not."""


class ShardWork:
    """Computes and writes shards; each is a function of (snapshot, shard) alone.

    Args:
        writer: of the split.
        windows: of the split, in the order of the data.
        encoder: of the snapshot.
        nonfinite: what to do about NaN and infinity (see `encode`).

    Attributes:
        seconds: spent computing so far: forward pass and encoding.
    """

    def __init__(
        self, writer: SplitWriter, windows: Windows, encoder: Encoder, nonfinite: NonFinite
    ) -> None:
        self.seconds = 0.0
        self._writer = writer
        self._windows = windows
        self._encoder = encoder
        self._nonfinite = nonfinite
        self._stats = writer.stats and ChannelStats(*(s.to(encoder.device) for s in writer.stats))

    def write(self, shards: Sequence[int]) -> Iterator[ShardRecord]:
        """Write shards; gives the record of each once it is committed.

        Raises:
            NonFiniteError: names shard and window.
            DiskSpaceError: the disk is full.
        """
        writers = _WRITERS[self._encoder.device.type]
        writing: deque[tuple[_ShardMemory, Future[ShardRecord]]] = deque()
        with ThreadPoolExecutor(writers, "shard-writer") as threads:
            for shard in shards:
                if len(writing) <= writers:
                    memory = _ShardMemory(self._writer, self._encoder.device)
                else:
                    memory, written = writing.popleft()
                    yield written.result()
                started = time.perf_counter()
                nonfinite = self._compute(shard, memory)
                self.seconds += time.perf_counter() - started
                memory.leave_device()
                written = threads.submit(memory.write, self._writer, shard, nonfinite)
                writing.append((memory, written))
            for _, written in writing:
                yield written.result()

    def _compute(self, shard: int, memory: _ShardMemory) -> int:
        """Fill the memory with a shard's codes and scale; counts the values that were replaced."""
        plan = self._writer.plan
        members = plan.examples_of(shard)
        rows = plan.example_id[members.start : members.stop]
        lengths = self._windows.n_tokens[rows]
        first, nonfinite = 0, 0
        for batch in self._encoder.batches(lengths):
            hidden_states = self._encoder(self._windows, rows[batch])
            try:
                encoded = self._encode(hidden_states)
            except NonFiniteError:
                kept = self._encoder.kept(lengths[batch])
                self._name_window(shard, hidden_states, rows[batch], kept)
                raise
            memory.put(first, encoded)
            first += len(hidden_states)
            nonfinite += encoded.nonfinite
        return nonfinite

    def _encode(self, hidden_states: Tensor) -> Encoded:
        encoding = self._writer.split.encoding
        return encode(hidden_states, encoding, self._stats, nonfinite=self._nonfinite)

    def _name_window(
        self,
        shard: int,
        hidden_states: Tensor,
        rows: npt.NDArray[np.int64],
        kept_tokens: npt.NDArray[np.integer],
    ) -> None:
        """Raise the error of the first window that cannot be encoded, with its name."""
        layers = self._writer.split.record.layers
        kept = "" if layers[-1] < len(layers) else f" (the kept layers are {layers})"
        parts = hidden_states.split(kept_tokens.tolist())
        for row, part in zip(rows, parts, strict=True):
            try:
                self._encode(part)
            except NonFiniteError as error:
                where = f"{self._writer.split.name}, shard {shard}, window {row} of the data"
                raise NonFiniteError(f"{where}{kept}: {error}") from None


class _ShardMemory:
    """Memory of a shard on its way to the disk, used for one after another.

    On a GPU the codes gather on the device and leave it in one copy into page-locked memory, on a
    stream of its own, while the next shard is computed.
    """

    def __init__(self, writer: SplitWriter, device: torch.device) -> None:
        record, encoding = writer.split.record, writer.split.encoding
        layers, tokens = len(record.layers), record.shard_tokens
        shapes: list[tuple[tuple[int, ...], torch.dtype]]
        shapes = [((layers, tokens, encoding.codes_size(record.hidden_size)), encoding.torch_dtype)]
        if encoding.quantised:
            groups = encoding.scale_shape(record.hidden_size)
            shapes.append(((tokens, layers, *groups), encoding.scale_torch_dtype))
        self._here = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        self._host = self._here
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._host = [torch.empty_like(x, device="cpu", pin_memory=True) for x in self._here]
            self._stream = torch.cuda.Stream(device)

    def put(self, first: int, encoded: Encoded) -> None:
        """Keep what was encoded as the tokens from ``first`` on."""
        tokens = slice(first, first + len(encoded.codes))
        self._here[0][:, tokens].copy_(encoded.codes.transpose(0, 1))
        if encoded.scale is not None:
            self._here[1][tokens] = encoded.scale

    def leave_device(self) -> None:
        """Begin the copy to the host; `write` waits for it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                for host, here in zip(self._host, self._here, strict=True):
                    host.copy_(here, non_blocking=True)

    def write(self, writer: SplitWriter, shard: int, nonfinite: int) -> ShardRecord:
        """Write the shard."""
        if self._stream is not None:
            self._stream.synchronize()
        tokens = writer.plan.tokens_of(shard)
        codes = self._host[0][:, :tokens].transpose(0, 1)
        scale = self._host[1][:tokens] if len(self._host) > 1 else None
        return writer.write_shard(shard, codes, scale, nonfinite)
