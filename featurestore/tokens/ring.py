"""ShardRing: some layers of the shards that are mixed, in memory that is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.readahead import Threads, prefetched
from bertvision.featurestore.reader import Empty, SplitReader
from bertvision.featurestore.tokens.order import TokenOrder
from bertvision.featurestore.tokens.selection import KeptTokens

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
        homes: the slot of each shard that has tokens to stream, where there is room for all of
            them: what was read once stays.
        whole: shards that were read into their home.
    """

    codes: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None
    example: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
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
    ) -> ShardMemory:
        """Take memory for so many shards.

        Args:
            split: whose shards they are.
            layers: how many of them.
            slots: shards.
            empty: makes an uninitialised array of a shape and type.
            homes: see the attributes.
        """
        rows = slots * split.record.shard_tokens
        codes, scale = split.buffers(rows, layers, empty)
        places = np.empty((2, rows), np.int64)
        return cls(codes, scale, places[0], places[1], homes or {})

    @cached_property
    def layers(self) -> tuple[Tensor, ...]:
        """The bytes of ``codes``, layer by layer."""
        return _layers(self.codes)


def _layers(codes: npt.NDArray[Any]) -> tuple[Tensor, ...]:
    return torch.from_numpy(codes.view(np.uint8)).unbind()


class ShardRing:
    """Holds the shards of consecutive pieces, each read once and whole, a few of them ahead.

    Single tokens cannot be read from a disk at any speed, nor be checked there: a checksum is that
    of an example in a layer.

    Args:
        split: to read.
        positions: on the stored layer axis.
        kept: the tokens that are streamed.
        pieces: in the order they are needed.
        memory: of a slot for each piece that is held, or of one for each shard.
        most: pieces that are held: those that are needed at a time, and those that are read
            meanwhile.
        early: shards that are opened before there is room for them.
        threads: that open and read; 0 do it in the caller's.
    """

    def __init__(
        self,
        split: SplitReader,
        positions: Sequence[int],
        kept: KeptTokens,
        pieces: Iterator[Piece],
        memory: ShardMemory,
        most: int,
        early: int,
        threads: int,
    ) -> None:
        self._split, self._positions, self._kept = split, positions, kept
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
    ) -> None:
        """Copy rows into memory that is already there.

        Args:
            rows: (n,) of the pieces that `first` gave.
            codes: (layers, n, width).
            scale: (n, layers, …), for quantised encodings.
            tokens: (2, n) int64: the example of each token, and its place in that.
        """
        memory = self._memory
        index = torch.from_numpy(rows)
        for mine, out in zip(memory.layers, _layers(codes), strict=True):
            torch.index_select(mine, 0, index, out=out)  # numpy's take uses one core
        if scale is not None and memory.scale is not None:
            np.take(memory.scale, rows, axis=0, out=scale, mode="clip")
        # "clip", because "raise" would go by way of another array
        np.take(memory.example, rows, out=tokens[0], mode="clip")
        np.take(memory.position, rows, out=tokens[1], mode="clip")

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
        kept = self._kept.of_shard(piece.shard)
        return base + kept[piece.order.permutation(piece.number, len(kept))]

    def _read(self, shard: int, base: int, reader: ShardReader) -> None:
        memory, plan = self._memory, self._split.plan
        rows = slice(base, base + plan.tokens_of(shard))
        try:
            runs = len(plan.examples_of(shard))
            scale = None if memory.scale is None else memory.scale[rows]
            reader.read(0, runs, self._positions, memory.codes[:, rows], scale)
        finally:
            reader.close()
        memory.example[rows], memory.position[rows] = self._split.token_places(shard)
        if memory.homes:
            memory.whole.add(shard)
