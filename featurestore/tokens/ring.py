"""ShardRing: some layers of the shards that are mixed, in memory that is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.featurestore.readahead import Threads
from bertvision.featurestore.reader import Empty, SplitReader
from bertvision.featurestore.tokens.order import TokenOrder
from bertvision.featurestore.tokens.selection import KeptTokens


class Piece(NamedTuple):
    """A piece of an order, which is what the ring is filled with."""

    order: TokenOrder
    number: int


class ShardRing:
    """Holds the shards of consecutive pieces, each read once and whole, a few of them ahead.

    Rows are tokens; a shard takes ``shard_tokens`` of them. Single tokens cannot be read from a
    disk at any speed, nor be checked there: a checksum is that of an example in a layer.

    Args:
        split: to read.
        positions: on the stored layer axis.
        kept: the tokens that are streamed.
        pieces: in the order they are needed.
        slots: pieces that it holds: those that are needed at a time, and those that are read
            meanwhile.
        threads: that read; 0 reads in the caller's.
        empty: makes an uninitialised array of a shape and type.
    """

    def __init__(
        self,
        split: SplitReader,
        positions: Sequence[int],
        kept: KeptTokens,
        pieces: Iterator[Piece],
        slots: int,
        threads: int,
        empty: Empty,
    ) -> None:
        self._split, self._positions, self._kept = split, positions, kept
        self._pieces = pieces
        self._slots = slots
        rows = self._slots * split.record.shard_tokens
        self._codes, self._scale = split.buffers(rows, len(positions), empty)
        self._example, self._position = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self._threads = Threads(threads, "bertvision-tokens")
        self._held: deque[Future[npt.NDArray[np.int64]]] = deque()
        self._begun = 0

    def first(self, pieces: int) -> list[npt.NDArray[np.int64]]:
        """The rows of the next pieces that are not released, (tokens,) each, as they are dealt out.

        Raises:
            IncompleteSplitError: a shard is not committed.
            CorruptStoreError: what is stored is damaged.
        """
        while len(self._held) < self._slots and (piece := next(self._pieces, None)) is not None:
            slot = self._begun % self._slots
            self._begun += 1
            self._held.append(self._threads.submit(self._load, piece, slot))
        return [self._held[i].result() for i in range(pieces)]

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
        # "clip", because "raise" would go by way of another array
        for mine, out in zip(self._codes, codes, strict=True):
            np.take(mine, rows, axis=0, out=out, mode="clip")
        if scale is not None and self._scale is not None:
            np.take(self._scale, rows, axis=0, out=scale, mode="clip")
        np.take(self._example, rows, out=tokens[0], mode="clip")
        np.take(self._position, rows, out=tokens[1], mode="clip")

    def close(self) -> None:
        """Wait for what is being read."""
        self._threads.shutdown()

    def _load(self, piece: Piece, slot: int) -> npt.NDArray[np.int64]:
        order, number = piece
        shard, plan = int(order.shards[number]), self._split.plan
        base = slot * plan.shard_tokens
        rows = slice(base, base + plan.tokens_of(shard))
        reader = self._split.open_shard(shard, any_order=True)
        try:
            reader.prefetch(self._positions)
            runs = len(plan.examples_of(shard))
            scale = None if self._scale is None else self._scale[rows]
            reader.read(0, runs, self._positions, self._codes[:, rows], scale)
        finally:
            reader.close()
        self._example[rows], self._position[rows] = self._split.token_places(shard)
        kept = self._kept.of_shard(shard)
        return base + kept[order.permutation(number, len(kept))]
