"""Full shards are committed in a thread, one at a time, while the next one fills."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from bertvision.featurestore.writing.buffer import ShardBuffer


class Background:
    """Commits buffers; a buffer that cannot be committed stays until it can, or is dropped.

    Args:
        commit: writes and commits what a buffer holds.

    Attributes:
        buffer: that is being committed, or could not be.
    """

    def __init__(self, commit: Callable[[ShardBuffer], None]) -> None:
        self.buffer: ShardBuffer | None = None
        self._commit = commit
        self._future: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "bertvision-writer")

    @property
    def keys(self) -> list[str]:
        """Keys of the examples that are not known to be committed."""
        return [] if self.buffer is None else list(self.buffer.keys)

    def begin(self, buffer: ShardBuffer) -> None:
        """Begin to commit a buffer, once the one before it is; raises as that does."""
        self.settle()
        self.buffer = buffer
        self._future = self._thread.submit(self._commit, buffer)

    def settle(self) -> None:
        """Wait until the buffer is committed; where that failed before, try it again.

        Raises:
            BertvisionError: it cannot be; the next call tries again.
        """
        if self.buffer is None:
            return
        if self._future is None:
            self._future = self._thread.submit(self._commit, self.buffer)
        wait([self._future])  # an interrupt leaves it, or the buffer would be committed twice
        if error := self._future.exception():
            self._future = None
            raise error
        self.drop()

    def drop(self) -> None:
        """Let go of the buffer, which is empty then."""
        if self.buffer is not None:
            self.buffer.clear()
        self.buffer = self._future = None

    def end(self) -> None:
        """Wait for the thread's end; what it was committing is committed, or is not."""
        self._thread.shutdown()
