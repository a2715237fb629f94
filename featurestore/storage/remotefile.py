"""RemoteFile: a file behind a network, read in few large requests.

Each request costs a round trip, however small it is. So what will be read is announced: ranges
that lie close together are joined, long ones are cut, and all are fetched at once by a few
threads. A read takes what was fetched, or waits for it; only what nobody announced is asked for
alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import StoreError

PART_BYTES = 8 << 20
"""Longest range that is asked for at once."""
REQUESTS = 8
"""Requests at a time, of all files together; each holds at most `PART_BYTES` beside the file."""
_GAP_BYTES = 1 << 18  # fetched and thrown away rather than asked for apart: about a round trip

Fetch = Callable[[int, int], bytes]
"""The bytes of a file from one offset to another."""


class _Part(NamedTuple):
    begin: int
    end: int
    data: Future[bytes]


class RemoteFile:
    """A file that is open for reads at any offset (see `storage.OpenFile`).

    Args:
        name: of the file, for messages.
        size: in bytes.
        fetch: gets a range of it; called in threads.
    """

    def __init__(self, name: str, size: int, fetch: Fetch) -> None:
        self.size = size
        self._name = name
        self._fetch = fetch
        self._kept: list[_Part] = []
        self._passing: list[_Part] = []

    def prefetch(self, offset: int, length: int) -> None:
        """Begin to fetch a stretch; it is kept until the file is closed."""
        self._kept += self._begin([(offset, length)])

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to fetch what is read next, as (offset, length); it is kept until the next call."""
        needed = [
            part
            for part in self._passing
            if any(part.begin < offset + length and offset < part.end for offset, length in ranges)
        ]
        self._passing = needed + self._begin(ranges)

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:
        """Fill a C-contiguous array with the bytes from ``offset`` on.

        Raises:
            EOFError: the file ends before the array is full.
            StoreError: it could not be read.
        """
        flat = out.reshape(-1).view(np.uint8)
        end = offset + flat.size
        if end > self.size:
            raise EOFError(f"the file ends at {self.size}")
        at = offset
        while at < end:
            part = self._holding(at)
            data = self._get(at, end) if part is None else part.data.result()
            begin = at if part is None else part.begin
            stop = min(end, begin + len(data))
            flat[at - offset : stop - offset] = np.frombuffer(data, np.uint8)[
                at - begin : stop - begin
            ]
            at = stop

    def close(self) -> None:
        """Let go of what was fetched, and of what was not fetched yet."""
        for part in (*self._kept, *self._passing):
            part.data.cancel()
        self._kept, self._passing = [], []

    def _begin(self, ranges: Sequence[tuple[int, int]]) -> list[_Part]:
        """Ask for the parts of ranges that nobody asked for yet."""
        missing = [part for part in _parts(ranges) if not self._has(*part)]
        threads = _threads()
        return [_Part(*part, threads.submit(self._get, *part)) for part in missing]

    def _has(self, begin: int, end: int) -> bool:
        while begin < end:
            if (part := self._holding(begin)) is None:
                return False
            begin = part.end
        return True

    def _holding(self, offset: int) -> _Part | None:
        for part in (*self._passing, *self._kept):
            if part.begin <= offset < part.end:
                return part
        return None

    def _get(self, begin: int, end: int) -> bytes:
        data = self._fetch(begin, end)
        if len(data) != end - begin:
            raise StoreError(
                f"{self._name}: the server gave {len(data)} bytes where {end - begin} were asked "
                "for: it does not serve ranges, or the file was replaced; a store needs a server "
                "that answers range requests"
            )
        return data


def _parts(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(begin, end) of parts: ranges close together are joined, long ones cut into equal parts."""
    joined: list[list[int]] = []
    for offset, length in sorted(ranges):
        if joined and offset - joined[-1][1] <= _GAP_BYTES:
            joined[-1][1] = max(offset + length, joined[-1][1])
        elif length:
            joined.append([offset, offset + length])
    for begin, end in joined:
        count = -(-(end - begin) // PART_BYTES)
        cuts = [begin + (end - begin) * i // count for i in range(count + 1)]
        yield from zip(cuts[:-1], cuts[1:], strict=True)


_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _threads() -> ThreadPoolExecutor:
    """The threads of this process; a forked one does not inherit any."""
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = ThreadPoolExecutor(REQUESTS, "bertvision-fetch")
        return _pools[os.getpid()]
