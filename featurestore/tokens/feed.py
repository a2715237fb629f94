"""TokenFeed: the batches of a stream from a position on, gathered row by row out of a ring."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.readahead import BufferPool, early_shards
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.tokens.batch import TokenBatch
from bertvision.featurestore.tokens.order import TokenCuts, TokenOrder
from bertvision.featurestore.tokens.ring import Piece, ShardMemory, ShardRing
from bertvision.featurestore.tokens.selection import KeptTokens

_KEPT = 3
"""Buffers of each use that are used again: one is filled while the one before is in use, and the
trainer may still refer to the one before that."""


class TokenFeed:
    """Gathers batches; one iteration at a time.

    Args:
        split: to read.
        positions: on the stored layer axis.
        side_by_side: whether vectors have an axis of layers.
        kept: the tokens that are streamed.
        order_of: the order of an epoch.
        cuts: how an epoch is cut into batches.
        factors: (layers,) float32 that vectors are multiplied by, or None.
        readers: threads that read.
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
        readers: int,
    ) -> None:
        self._split, self._positions, self._side_by_side = split, positions, side_by_side
        self._kept, self._cuts = kept, cuts
        self._order = lru_cache(maxsize=2)(order_of)  # the ring may be an epoch ahead
        self._readers, self._early = readers, early_shards(split, len(positions), readers)
        self._ring: ShardRing | None = None
        self._stats, self._factors = split.stats_of(positions), factors
        if self._stats is not None and factors is not None:
            self._stats = ChannelStats(*(x * factors[:, None] for x in self._stats))
            self._factors = None
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
        """Those that have tokens to stream."""
        shards: list[int] = np.flatnonzero(self._kept.counts).tolist()
        return shards

    @cached_property
    def _resident(self) -> ShardMemory:
        """Room for all shards, where the buffer is that large: each is read once then."""
        homes = {shard: slot for slot, shard in enumerate(self._shards)}
        return self._memory(len(homes), homes)

    def _memory(self, slots: int, homes: dict[int, int] | None = None) -> ShardMemory:
        return ShardMemory.make(self._split, len(self._positions), slots, self._ring_memory, homes)

    def batches(self, ring: ShardRing, first: int) -> Iterator[TokenBatch]:
        """The batches from ``first`` on: without end, or to the end of its epoch."""
        rows = self._rows(ring, *self._cuts.place(first))
        left = np.empty(0, np.int64)
        for size in self._cuts.sizes(first):
            codes, scale = self._split.buffers(size, len(self._positions), self._take)
            tokens = np.empty((2, size), np.int64)
            filled = 0
            while filled < size:
                if not len(left):
                    left = next(rows)
                n = min(size - filled, len(left))
                part = slice(filled, filled + n)
                scales = None if scale is None else scale[part]
                ring.take(left[:n], codes[:, part], scales, tokens[:, part])
                filled, left = filled + n, left[n:]
            yield self._batch(codes, scale, tokens)
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
        """What the ring is filled with, from a group of an epoch on."""
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
        )

    def _take(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self._pools["batch", dtype, shape[-1]].take(shape, dtype)

    def _ring_memory(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return self._pools["ring", dtype, shape[-1]].take(shape, dtype)

    def vectors_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for decoded vectors, used again when nobody refers to them any more."""
        taken = self._pools["vectors", dtype].take((math.prod(shape), dtype.itemsize), np.uint8)
        return torch.from_numpy(taken).view(dtype).view(shape)
