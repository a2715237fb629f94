"""Where a store lies: files under keys such as ``ledger/0.3e/train/00042.json``.

Everything a store does to its files goes through a `Storage`: they appear whole or not at all, and
are on the disk when a write returns. `opening.open_storage` finds the one of a path or URL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from bertvision.errors import InputError, LockedError
from bertvision.featurestore.storage.durable import Buffers

if TYPE_CHECKING:
    import numpy.typing as npt

SMALL_BYTES = 1 << 26
"""Records and metadata are smaller."""
_PIECE_BYTES = 1 << 24
ABSENT = ""
"""The version of a file that is not there."""


class ChangedError(LockedError):
    """A file is not the one that was to be replaced: another process wrote it meanwhile."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} was written by another process meanwhile, and only one may write it at a "
            "time; what was committed is whole: run the same command again, it goes on from there"
        )

    def __reduce__(self) -> tuple[type[LockedError], tuple[str]]:
        return LockedError, (str(self),)  # what the caller of another process needs to know


class OpenFile(Protocol):
    """A file that is open for reads at any offset, by several threads.

    Attributes:
        size: its length in bytes when it was opened.
    """

    size: int

    def prefetch(self, offset: int, length: int) -> None:
        """Begin to bring a stretch near, where it stays until the file is closed."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to bring near what is read next, as (offset, length); until the next call."""

    def read_into(self, out: npt.NDArray[Any], offset: int) -> None:
        """Fill a C-contiguous array with the bytes from ``offset`` on.

        Raises:
            EOFError: the file ends before the array is full.
        """

    def close(self) -> None:
        """Let go of the file."""


def _pieces(file: OpenFile) -> Iterator[bytes]:
    """The bytes of an open file, some at a time."""
    import numpy as np

    for offset in range(0, file.size, _PIECE_BYTES):
        piece = np.empty(min(_PIECE_BYTES, file.size - offset), np.uint8)
        file.read_into(piece, offset)
        yield piece.tobytes()


class Storage(ABC):
    """A folder of files; ``str(storage)`` finds it again and holds no credentials.

    Attributes:
        distant: whether each read costs a round trip, so that it pays to say what comes.
        read_only: why files can only be read, and what to do instead; None where they can be
            written.
    """

    distant: bool = False
    read_only: str | None = None

    def require_writable(self) -> None:
        """Make sure that files can be written.

        Raises:
            InputError: they can only be read.
        """
        if self.read_only is not None:
            raise InputError(f"{self} {self.read_only}")

    @abstractmethod
    def read(self, key: str, most: int = SMALL_BYTES) -> bytes:
        """The bytes of a file.

        Args:
            key: Key of the file.
            most: Largest number of them; a store that somebody made to hurt has larger ones.

        Raises:
            FileNotFoundError: there is none.
            CorruptStoreError: it is larger, or the key leads out of the storage.
        """

    @abstractmethod
    def write(self, key: str, content: Buffers, only_if: str | None = None) -> str:
        """Write a file durably: it is there whole, or as it was before.

        Args:
            key: Key of the file.
            content: its bytes, or pieces of them, each valid until the next is asked for.
            only_if: the version it must have. A holder of a lock that the operating system keeps
                needs no such condition, and a local folder does not look at it.

        Returns:
            The version it has now.

        Raises:
            ChangedError: it has another version; or it is this very content, and the answer of
                the server was lost.
        """

    @abstractmethod
    def version(self, key: str) -> str:
        """Tell the version of a file, which changes when it is written; `ABSENT` where none is."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Length of a file in bytes; None where there is none."""

    @abstractmethod
    def names(self, key: str) -> list[str]:
        """Names of the files and folders in a folder; none where it does not exist."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a file, or a folder with all it holds, if it is there."""

    def move(self, key: str, to: str) -> None:
        """Let a file take the place of another one in the same folder, or a free one.

        Here by way of this machine, for storages that know no renaming: whoever is killed between
        the two steps does both again.
        """
        file = self.open(key)
        try:
            self.write(to, _pieces(file))
        finally:
            file.close()
        self.remove(key)

    @abstractmethod
    def sweep(self, key: str) -> None:
        """Settle what killed writers left in a folder.

        Files that were never made whole are removed; the others will survive a power loss.
        """

    @abstractmethod
    def open(self, key: str) -> OpenFile:
        """Open a file.

        Raises:
            FileNotFoundError: there is none.
            CorruptStoreError: the key leads out of the storage.
        """

    @abstractmethod
    def lock(self, key: str, what: str, wait: bool = False) -> AbstractContextManager[None]:
        """Hold a lock that ends with its holder.

        Args:
            key: Key of the lock's file.
            what: Action of the holder, for the message.
            wait: until it is free, instead of raising.

        Raises:
            LockedError: another process holds it.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes that can still be written, where that is known."""
