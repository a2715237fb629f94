"""Shards of a split, one after another: computed on the device while the last ones are written."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import NonFiniteError
from bertvision.featurestore.format.encoding import ChannelStats, Encoded, encode, lossy_layer
from bertvision.featurestore.format.logits import TopLogits
from bertvision.featurestore.format.names import NonFinite
from bertvision.featurestore.format.records import ShardRecord
from bertvision.featurestore.writer import SplitWriter
from bertvision.pipelines.encoders.encoder import HiddenStateSource
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.tasks.windows import Windows

log = logging.getLogger(__name__)

_WRITERS = 4
"""Threads that write shards: on a CPU they take time from the encoder, beside a GPU they do not."""


class Written(NamedTuple):
    """A committed shard of one split."""

    tokens: TokenPooling
    """Tokens that the split keeps of a window."""
    record: ShardRecord


class ShardWork:
    """Computes and writes shards; each is a function of (snapshot, shard) alone.

    Several splits that were planned alike, one for each pooling of the same windows, are written
    from one forward pass.

    Args:
        writers: Writers by token pooling; all have the same plan.
        windows: Windows of the split, in the order of the data.
        source: Source of hidden states, the encoder most often; it gives out what the writers keep.
        nonfinite: Treatment of NaN and infinity (see `encode`).

    Attributes:
        seconds: spent computing so far: forward pass and encoding.
    """

    def __init__(
        self,
        writers: Mapping[TokenPooling, SplitWriter],
        windows: Windows,
        source: HiddenStateSource,
        nonfinite: NonFinite,
    ) -> None:
        self.seconds = 0.0
        self._writers = writers
        self._windows = windows
        self._source = source
        self._nonfinite = nonfinite
        self._checked: set[TokenPooling] = set()
        self._stats = {
            pooling: writer.stats and ChannelStats(*(s.to(source.device) for s in writer.stats))
            for pooling, writer in writers.items()
        }

    def write(self, shards: Mapping[int, Sequence[TokenPooling]]) -> Iterator[Written]:
        """Write shards; gives the record of each once it is committed.

        Args:
            shards: Splits that lack each shard, by number.

        Raises:
            NonFiniteError: names shard and window.
            DiskSpaceError: the disk is full.
        """
        threads = 1 if self._source.device.type == "cpu" else _WRITERS
        writing: deque[tuple[_Memories, list[tuple[TokenPooling, Future[ShardRecord]]]]] = deque()
        with ThreadPoolExecutor(threads, "shard-writer") as pool:
            for shard, missing in shards.items():
                if len(writing) <= threads:
                    memories: _Memories = {
                        pooling: _ShardMemory(writer, self._source.device)
                        for pooling, writer in self._writers.items()
                    }
                else:
                    memories, records = writing.popleft()
                    yield from (Written(pooling, record.result()) for pooling, record in records)
                started = time.perf_counter()
                nonfinite = self._compute(
                    shard, {pooling: memories[pooling] for pooling in missing}
                )
                self.seconds += time.perf_counter() - started
                records = []
                for pooling in missing:
                    memory, writer = memories[pooling], self._writers[pooling]
                    memory.leave_device()
                    written = pool.submit(memory.write, writer, shard, nonfinite[pooling])
                    records.append((pooling, written))
                writing.append((memories, records))
            for _, records in writing:
                yield from (Written(pooling, record.result()) for pooling, record in records)

    def _compute(self, shard: int, memories: _Memories) -> dict[TokenPooling, int]:
        """Fill the memories with a shard's codes and scales; counts the values replaced in each."""
        plan = next(iter(self._writers.values())).plan
        members = plan.examples_of(shard)
        rows = plan.example_id[members.start : members.stop]
        first, nonfinite = dict.fromkeys(memories, 0), dict.fromkeys(memories, 0)
        for batch in self._source.batches(self._windows.n_tokens[rows]):
            states = self._source(self._windows, rows[batch])
            for pooling, hidden_states in zip(self._source.tokens, states, strict=True):
                if pooling not in memories:
                    continue
                try:
                    encoded = self._encode(pooling, hidden_states)
                except NonFiniteError:
                    self._name_window(pooling, shard, hidden_states, rows[batch])
                    raise
                memories[pooling].put(first[pooling], encoded, self._source.logits)
                first[pooling] += len(hidden_states)
                nonfinite[pooling] += encoded.nonfinite
        return nonfinite

    def _encode(self, pooling: TokenPooling, hidden_states: Tensor) -> Encoded:
        encoding, stats = self._writers[pooling].split.encoding, self._stats[pooling]
        encoded = encode(hidden_states, encoding, stats, nonfinite=self._nonfinite)
        if pooling not in self._checked and not encoded.nonfinite:
            if loss := lossy_layer(hidden_states, encoded, encoding, stats):
                log.warning("%s: %s", self._writers[pooling].split.name, loss[1])
            self._checked.add(pooling)
        return encoded

    def _name_window(
        self, pooling: TokenPooling, shard: int, hidden_states: Tensor, rows: npt.NDArray[np.int64]
    ) -> None:
        """Raise the error of the first window that cannot be encoded, with its name."""
        split = self._writers[pooling].split
        lengths = self._source.kept(pooling, self._windows.n_kept[rows])
        raise_of_window(
            partial(self._encode, pooling),
            dict(zip(rows.tolist(), hidden_states.split(lengths.tolist()), strict=True)),
            f"{split.name}, shard {shard}",
            split.layer_names or split.record.layers,
        )


def raise_of_window(
    encode: Callable[[Tensor], Encoded],
    windows: Mapping[int, Tensor],
    where: str,
    layers: Sequence[int | str],
) -> None:
    """Raise the error of the first window that cannot be encoded, with its name.

    Args:
        encode: Encoder of hidden states (tokens, layers, hidden).
        windows: Hidden states of windows, by their number in the data.
        where: Name of the split, for the message.
        layers: Layers that are kept.

    Raises:
        NonFiniteError: a window cannot be encoded.
    """
    which = "" if layers == (*range(len(layers)),) else f" (the kept layers are {layers})"
    for window, hidden_states in windows.items():
        try:
            encode(hidden_states)
        except NonFiniteError as error:
            raise NonFiniteError(f"{where}, window {window} of the data{which}: {error}") from None


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
        self._logits = record.top.empty(tokens) if record.top else None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._host = [torch.empty_like(x, device="cpu", pin_memory=True) for x in self._here]
            self._stream = torch.cuda.Stream(device)

    def put(self, first: int, encoded: Encoded, logits: TopLogits | None) -> None:
        """Keep what was encoded as the tokens from ``first`` on, and their log-probabilities."""
        tokens = slice(first, first + len(encoded.codes))
        if self._logits is not None and logits is not None:
            for room, values in zip(self._logits, logits, strict=True):
                room[tokens] = values
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
        logits = self._logits and self._logits.map(itemgetter(slice(tokens)))
        return writer.write_shard(shard, codes, scale, nonfinite, logits)


_Memories: TypeAlias = dict[TokenPooling, _ShardMemory]
