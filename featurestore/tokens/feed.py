"""TokenFeed: the batches of a stream from a position on, gathered row by row out of a ring.

TokenBatch: vectors of single tokens in a few layers, still encoded, and where they are from.
ShardRing: some layers of the shards that are mixed, in memory that is used again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import counted
from bertvision.featurestore.format.compiled import KERNELS
from bertvision.featurestore.format.encoding import ChannelStats, decode
from bertvision.featurestore.format.logits import TopLogits
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.readahead import (
    BufferPool,
    DecodedMemory,
    Threads,
    early_shards,
    prefetched,
)
from bertvision.featurestore.reader import Empty, SplitReader
from bertvision.featurestore.tokens.order import KeptTokens, TokenCuts, TokenOrder
from bertvision.featurestore.tokens.transform import TokenTransform


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenBatch:
    """Vectors of single tokens, in the order they were drawn.

    Attributes:
        codes: (n, layers, `Encoding.codes_size`) in the encoding's dtype. In memory each layer is
            contiguous.
        scale: (n, layers, *`Encoding.scale_shape`), or None for float encodings.
        stats: channel statistics, times the scale factors, or None for float encodings.
        factors: (layers,) float32 that decoded vectors are multiplied by, or None.
        examples: (n,) int64 the example of the split that each token is of.
        positions: (n,) int64 its place in that example.
        side_by_side: whether vectors have an axis of layers.
        transform: Transform of decoded vectors before they are scaled, or None.
        logits: Log-probabilities of the next tokens, (n, …) each, where they were asked for.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> batch = next(iter(split.tokens([0, -1], batch_size=256)))
        >>> batch
        <TokenBatch: 256 tokens, 2 layers × 32, float32 on cpu>
        >>> batch.vectors.shape
        torch.Size([256, 2, 32])
        >>> example, position = int(batch.examples[0]), int(batch.positions[0])
        >>> bool((split[example][position, :, -1] == batch.vectors[0, -1]).all())
        True
        >>> split.text(example)[position]  # what the token stands for
        '1902'
    """

    codes: Tensor
    scale: Tensor | None
    stats: ChannelStats | None
    factors: Tensor | None
    examples: Tensor
    positions: Tensor
    side_by_side: bool
    transform: TokenTransform | None = None
    logits: TopLogits | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        tokens, layers, hidden = self.shape
        dtype = str(self.codes.dtype).removeprefix("torch.")
        return (
            f"<TokenBatch: {counted(tokens, 'token')}, {counted(layers, 'layer')} × {hidden}, "
            f"{dtype} on {self.codes.device}>"
        )

    @property
    def vectors(self) -> Tensor:
        """(n, hidden), or (n, layers, hidden) side by side; float32, decoded at each access."""
        return self.decode()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, layers and channels."""
        tokens, layers, width = self.codes.shape
        return tokens, layers, width if self.stats is None else self.stats.mean.shape[-1]

    def decode(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """The vectors, (n, hidden) or (n, layers, hidden), where the codes are.

        Args:
            dtype: Type of the vectors.
            out: contiguous memory for them, of the batch's `shape`; new memory by default.
        """
        if self.transform is None:
            states = decode(self.codes, self.scale, self.stats, dtype, out)
        else:  # in float32: a mean may be a thousand times what is left of a state
            states = decode(self.codes, self.scale, self.stats, torch.float32)
            states = self.transform(states).to(dtype)
        if self.factors is not None:
            states = torch.mul(states, self.factors.to(dtype)[:, None], out=out)
        return states if self.side_by_side else states[:, 0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """The batch on a device: codes travel, decoding happens there."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        return replace(
            self,
            codes=move(self.codes),
            scale=None if self.scale is None else move(self.scale),
            stats=None if self.stats is None else ChannelStats(*map(move, self.stats)),
            factors=None if self.factors is None else move(self.factors),
            examples=move(self.examples),
            positions=move(self.positions),
            transform=self.transform and self.transform.to(device, non_blocking),
            logits=self.logits and self.logits.map(move),
        )


Rows: TypeAlias = Future[npt.NDArray[np.int64]]
Opening: TypeAlias = Future[ShardReader] | None
"""A shard that is open or about to be; None where it is in memory already, or about to be."""


class Piece(NamedTuple):
    """A piece of an order, which is what the ring is filled with."""

    order: TokenOrder
    number: int

    @property
    def shard(self) -> int:
        """The shard that it is of."""
        return int(self.order.shards[self.number])


@dataclass(eq=False)
class ShardMemory:
    """Room for some layers of a number of shards; a row is a token.

    Attributes:
        codes: (layers, slots · shard_tokens, width).
        scale: (slots · shard_tokens, layers, …), or None for float encodings.
        example: (slots · shard_tokens,) int64 the example of each token.
        position: (slots · shard_tokens,) int64 its place in that.
        logits: Log-probabilities of each token, arrays of NumPy, where they were asked for.
        homes: the slot of each shard that has tokens to stream, where there is room for all of
            them: what was read once stays.
        whole: shards that were read into their home.
    """

    codes: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None
    example: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    logits: TopLogits | None
    homes: dict[int, int]
    whole: set[int] = field(default_factory=set)

    @classmethod
    def make(
        cls,
        split: SplitReader,
        layers: int,
        slots: int,
        empty: Empty,
        homes: dict[int, int] | None = None,
        *,
        logits: bool = False,
    ) -> ShardMemory:
        """Take memory for so many shards.

        Args:
            split: Split whose shards they are.
            layers: Their number.
            slots: shards.
            empty: makes an uninitialised array of a shape and type.
            homes: see the attributes.
            logits: Whether there is room for log-probabilities.
        """
        rows = slots * split.record.shard_tokens
        codes, scale = split.buffers(rows, layers, empty)
        places = np.empty((2, rows), np.int64)
        top = split.require_logits().empty(rows) if logits else None
        return cls(codes, scale, places[0], places[1], top, homes or {})


def _bytes_of(rows: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(rows.view(np.uint8))


def _addresses(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> tuple[int, int, int, int]:
    """A row of the table that `native.gather_rows` takes, of an array and its target."""
    begin, to = (array.__array_interface__["data"][0] for array in (source, target))
    return begin, source.strides[0], to, int(source.strides[0] >= _LONG_ROW)


_LONG_ROW = 128  # bytes


class ShardRing:
    """Holds the shards of consecutive pieces, each read once and whole, a few of them ahead.

    Single tokens cannot be read from a disk at any speed, nor be checked there: a checksum is that
    of an example in a layer.

    Args:
        split: Split to read.
        positions: Places on the stored layer axis.
        kept: the tokens that are streamed.
        pieces: Pieces in the order they are needed.
        memory: Memory of a slot for each piece that is held, or of one for each shard.
        most: pieces that are held: those that are needed at a time, and those that are read
            meanwhile.
        early: shards that are opened before there is room for them.
        threads: Threads that open and read; 0 do it in the caller's.
    """

    def __init__(
        self,
        split: SplitReader,
        positions: Sequence[int],
        selection: KeptTokens,
        pieces: Iterator[Piece],
        memory: ShardMemory,
        most: int,
        early: int,
        threads: int,
    ) -> None:
        self._split, self._positions, self._kept = split, positions, selection
        self._pieces = pieces
        self._memory, self._most, self._early = memory, most, early
        self._threads = Threads(threads, "bertvision-tokens")
        self._opened: deque[tuple[Piece, Opening]] = deque()
        self._held: deque[tuple[Rows, Opening]] = deque()
        self._begun = 0
        self._first: dict[int, Rows] = {}  # of the shards that stay, the piece that reads each
        self._asked = set(memory.whole)

    def first(self, pieces: int) -> list[npt.NDArray[np.int64]]:
        """The rows of the next pieces that are not released, (tokens,) each, as they are dealt out.

        Raises:
            IncompleteSplitError: a shard is not committed.
            CorruptStoreError: what is stored is damaged.
        """
        while len(self._held) < self._most:
            self._open(max(1, self._early))
            if not self._opened:
                break
            piece, opening = self._opened.popleft()
            self._held.append((self._begin(piece, opening), opening))
        self._open(self._early)
        return [self._held[i][0].result() for i in range(pieces)]

    def release(self, pieces: int) -> None:
        """Let the memory of the first so many pieces be used again."""
        for _ in range(pieces):
            self._held.popleft()

    def take(
        self,
        rows: npt.NDArray[np.int64],
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
        tokens: npt.NDArray[np.int64],
        logits: TopLogits | None = None,
    ) -> None:
        """Copy rows into memory that is already there.

        Args:
            rows: (n,) of the pieces that `first` gave.
            codes: (layers, n, width).
            scale: (n, layers, …), for quantised encodings.
            tokens: (2, n) int64: the example of each token, and its place in that.
            logits: Memory for log-probabilities, (n, …) each.
        """
        memory = self._memory
        pairs = [*zip(memory.codes, codes, strict=True), (memory.example, tokens[0])]
        pairs.append((memory.position, tokens[1]))
        if scale is not None and memory.scale is not None:
            pairs.append((memory.scale, scale))
        if logits is not None and memory.logits is not None:
            pairs += zip(memory.logits, logits, strict=True)
        if (kernel := KERNELS.get("gather_rows", codes.nbytes)) is not None:
            kernel(rows, np.array([_addresses(*pair) for pair in pairs]))
            return
        index = torch.from_numpy(rows)
        for mine, out in pairs[: len(codes)]:  # numpy's take uses one core
            torch.index_select(_bytes_of(mine), 0, index, out=_bytes_of(out))
        for mine, out in pairs[len(codes) :]:
            # "clip", because "raise" would go by way of another array
            np.take(mine, rows, axis=0, out=out, mode="clip")

    def close(self) -> None:
        """Wait for what is being read, and let go of what is open and of the memory."""
        self._threads.shutdown()
        for _, opening in (*self._opened, *self._held):
            # in a forked process, where the threads are not, some are never done
            done = opening is not None and opening.done() and not opening.cancelled()
            if opening is not None and done and opening.exception() is None:
                opening.result().close()
        self._opened.clear()
        self._held.clear()
        self._first.clear()

    def _open(self, most: int) -> None:
        """Open what comes next, so that the system or a server can bring it near."""
        while len(self._opened) < most and (piece := next(self._pieces, None)) is not None:
            opening = None
            if piece.shard not in self._asked:
                opening = self._threads.submit(
                    prefetched, self._split, piece.shard, self._positions, any_order=True
                )
                if self._memory.homes:
                    self._asked.add(piece.shard)
            self._opened.append((piece, opening))

    def _begin(self, piece: Piece, opening: Opening) -> Rows:
        """Have a piece dealt out, once its shard is read."""
        homes = self._memory.homes
        slot = homes[piece.shard] if homes else self._begun % self._most
        self._begun += 1
        if piece.shard in self._memory.whole:
            self._first.pop(piece.shard, None)
        first = None if opening is not None else self._first.get(piece.shard)
        rows = self._threads.submit(self._load, piece, slot, opening, first)
        if homes and opening is not None:
            self._first[piece.shard] = rows
        return rows

    def _load(
        self, piece: Piece, slot: int, opening: Opening, first: Rows | None
    ) -> npt.NDArray[np.int64]:
        base = slot * self._split.plan.shard_tokens
        if opening is not None:
            self._read(piece.shard, base, opening.result())
        elif first is not None:
            first.result()
        rows = self._kept.of_shard(piece.shard)
        return base + rows[piece.order.permutation(piece.number, len(rows))]

    def _read(self, shard: int, base: int, reader: ShardReader) -> None:
        memory, plan = self._memory, self._split.plan
        rows = slice(base, base + plan.tokens_of(shard))
        try:
            runs = len(plan.examples_of(shard))
            scale = None if memory.scale is None else memory.scale[rows]
            reader.read(0, runs, self._positions, memory.codes[:, rows], scale)
            if memory.logits is not None:
                reader.read_logits(0, runs, memory.logits.map(itemgetter(rows)))
        finally:
            reader.close()
        memory.example[rows], memory.position[rows] = self._split.token_places(shard)
        if memory.homes:
            memory.whole.add(shard)


_KEPT = 3
"""Buffers of each use that are used again: one is filled while the one before is in use, and the
trainer may still refer to the one before that."""


class TokenFeed:
    """Gathers batches; one iteration at a time.

    Args:
        split: Split to read.
        positions: Places on the stored layer axis.
        side_by_side: Whether vectors have an axis of layers.
        kept: the tokens that are streamed.
        order_of: the order of an epoch.
        cuts: Cuts of an epoch into batches.
        factors: (layers,) float32 that vectors are multiplied by, or None.
        transform: Transform of the vectors before, or None.
        readers: threads that read.
        logits: Whether batches have log-probabilities.

    Attributes:
        vectors_memory: Memory for decoded vectors.
    """

    def __init__(
        self,
        split: SplitReader,
        positions: Sequence[int],
        side_by_side: bool,
        kept: KeptTokens,
        order_of: Callable[[int], TokenOrder],
        cuts: TokenCuts,
        factors: torch.Tensor | None,
        transform: TokenTransform | None,
        readers: int,
        logits: bool = False,
    ) -> None:
        self._split, self._positions, self._side_by_side = split, positions, side_by_side
        self._kept, self._cuts, self._logits = kept, cuts, logits
        self._order = lru_cache(maxsize=2)(order_of)  # the ring may be an epoch ahead
        self._readers, self._early = readers, early_shards(split, len(positions), readers)
        self._ring: ShardRing | None = None
        self._stats, self._factors = split.stats_of(positions), factors
        if self._stats is not None and transform is not None and transform.matrix is None:
            self._stats = ChannelStats(self._stats.mean - transform.mean, self._stats.std)
            transform = None
        self._transform = transform
        if self._stats is not None and factors is not None and transform is None:
            self._stats = ChannelStats(*(x * factors[:, None] for x in self._stats))
            self._factors = None
        self.vectors_memory = DecodedMemory()
        # one pool for each use, because the buffers of one use are all about as large
        self._pools: defaultdict[tuple[object, ...], BufferPool] = defaultdict(
            lambda: BufferPool(_KEPT)
        )

    def ring(self, first: int) -> ShardRing:
        """The shards for the batches from ``first`` on; the ring before this one is closed."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None  # and its memory is free for the next one
        epoch, drawn = self._cuts.place(first)
        order = self._order(epoch)
        group = order.group_of(drawn)
        # no more than there are, or an endless stream would read the same shards again
        pieces = min(order.buffer, self._cuts.most_pieces(self._kept.counts)) + self._readers
        if not self._cuts.endless:
            pieces = min(pieces, len(order.shards) - group)
        resident = order.buffer >= len(self._shards)
        self._ring = ShardRing(
            self._split,
            self._positions,
            self._kept,
            self._pieces(epoch, group),
            self._resident if resident else self._memory(pieces),
            pieces,
            self._early,
            self._early if self._split.storage.distant else self._readers,
        )
        return self._ring

    @cached_property
    def _shards(self) -> list[int]:
        """The shards that have tokens to stream."""
        shards: list[int] = np.flatnonzero(self._kept.counts).tolist()
        return shards

    @cached_property
    def _resident(self) -> ShardMemory:
        """Room for all shards, where the buffer is that large: each is read once then."""
        homes = {shard: slot for slot, shard in enumerate(self._shards)}
        return self._memory(len(homes), homes)

    def _memory(self, slots: int, homes: dict[int, int] | None = None) -> ShardMemory:
        split, layers = self._split, len(self._positions)
        return ShardMemory.make(split, layers, slots, self._ring_memory, homes, logits=self._logits)

    def batches(self, ring: ShardRing, first: int) -> Iterator[TokenBatch]:
        """The batches from ``first`` on: without end, or to the end of its epoch."""
        rows = self._rows(ring, *self._cuts.place(first))
        left = np.empty(0, np.int64)
        for size in self._cuts.sizes(first):
            codes, scale = self._split.buffers(size, len(self._positions), self._take)
            tokens = np.empty((2, size), np.int64)
            logits = self._split.require_logits().empty(size) if self._logits else None
            filled = 0
            while filled < size:
                if not len(left):
                    left = next(rows)
                n = min(size - filled, len(left))
                part = slice(filled, filled + n)
                scales = None if scale is None else scale[part]
                of_part = logits and logits.map(itemgetter(part))
                ring.take(left[:n], codes[:, part], scales, tokens[:, part], of_part)
                filled, left = filled + n, left[n:]
            yield self._batch(codes, scale, tokens, logits)
            del codes, scale  # or their memory could not be used for the next batch but one

    def _rows(self, ring: ShardRing, epoch: int, drawn: int) -> Iterator[npt.NDArray[np.int64]]:
        """Rows of the ring in the order they are drawn, group after group."""
        while True:
            order = self._order(epoch)
            first = order.group_of(drawn)
            for group in range(first, order.groups):
                pieces = order.pieces_of(group)
                dealt = ring.first(len(pieces))
                parts = [
                    rows[order.part(group, piece)]
                    for piece, rows in zip(pieces, dealt, strict=True)
                ]
                done = drawn - int(order.starts[group]) if group == first else 0
                yield np.concatenate(parts)[order.mixed(group)][done:]
                ring.release(len(pieces) if group == order.groups - 1 else 1)
            if not self._cuts.endless:
                return
            epoch, drawn = epoch + 1, 0

    def _pieces(self, epoch: int, group: int) -> Iterator[Piece]:
        """Pieces that fill the ring, from a group of an epoch on."""
        while True:
            order = self._order(epoch)
            for number in range(order.pieces_of(group).start, len(order.shards)):
                yield Piece(order, number)
            if not self._cuts.endless:
                return
            epoch, group = epoch + 1, 0

    def _batch(
        self,
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
        tokens: npt.NDArray[np.int64],
        logits: TopLogits | None,
    ) -> TokenBatch:
        tensor = torch.from_numpy(codes).transpose(0, 1)
        return TokenBatch(
            codes=tensor.view(torch.bfloat16) if codes.dtype == np.uint16 else tensor,
            scale=None if scale is None else torch.from_numpy(scale),
            stats=self._stats,
            factors=self._factors,
            examples=torch.from_numpy(tokens[0]),
            positions=torch.from_numpy(tokens[1]),
            side_by_side=self._side_by_side,
            transform=self._transform,
            logits=logits and logits.map(torch.from_numpy),
        )

    def _take(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self._pools["batch", dtype, shape[-1]].take(shape, dtype)

    def _ring_memory(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self._pools["ring", dtype, shape[-1]].take(shape, dtype)
