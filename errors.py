"""The errors bertvision raises, in one tree that every room of the package shares.

```
BertvisionError                     catch this to catch everything below
├── InputError (ValueError)         a file, option or name the user gave is wrong
│   └── UnknownNameError (KeyError) a name that is not in a registry, workspace or store
├── WorkspaceError                  the workspace lacks what is needed, or holds something else
├── HubError (ConnectionError)      the Hugging Face hub refuses, or cannot be reached
└── StoreError                      something about an activation store
    ├── StoreNotFoundError (FileNotFoundError)
    ├── FormatVersionError          written by a newer bertvision
    ├── ProvenanceError             what is stored was made from something else than what was asked
    ├── IncompleteSplitError        shards of the plan are not committed yet
    ├── CorruptStoreError           committed data is missing, changed or does not decode
    ├── NonFiniteError              NaN or infinity in hidden states or in a loss
    ├── DiskSpaceError (OSError)    the disk cannot hold what would be written
    └── LockedError                 another process is writing the same split, snapshots or heads
```

Each also inherits from the matching built-in, so `except FileNotFoundError` works as one expects.
Messages say what was given, what is allowed and what to do next; the command line prints them
without a traceback and exits with status 2.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import SupportsIndex


class BertvisionError(Exception):
    """Base of every error that bertvision raises on purpose."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message.
        return str(self.args[0]) if self.args else ""


class BertvisionWarning(UserWarning):
    """Base of every warning of bertvision; the tests turn it into an error."""


class InputError(BertvisionError, ValueError):
    """A file, option or name the user gave is wrong."""


class UnknownNameError(InputError, KeyError):
    """A name that a registry, workspace or store does not hold."""


class WorkspaceError(BertvisionError):
    """The workspace lacks what a command needs, or holds something else than was asked for."""


class HubError(BertvisionError, ConnectionError):
    """The Hugging Face hub refuses what was asked, or cannot be reached."""


class StoreError(BertvisionError):
    """Something about an activation store."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no store, snapshot or split at the place given."""


class FormatVersionError(StoreError):
    """The store was written in a format this version does not know."""


class ProvenanceError(StoreError):
    """Stored data were made from something else than what was asked for."""


class IncompleteSplitError(StoreError):
    """Shards of the plan are not committed yet."""


class CorruptStoreError(StoreError):
    """Committed data is missing, changed or does not decode."""


class NonFiniteError(StoreError):
    """NaN or infinity in hidden states or in a loss."""


class DiskSpaceError(StoreError, OSError):
    """The disk cannot hold what would be written."""


class LockedError(StoreError):
    """Another process is writing the same split, snapshots or heads."""


def counted(n: int, what: str) -> str:
    """A number of things: ``1 shard``, ``1,200 shards``.

    Args:
        n: Their number.
        what: one of them; an s makes it several.
    """
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def whole_number(name: str, value: SupportsIndex, least: int) -> int:
    """A number that somebody gave, as Python's own.

    Args:
        name: Its name where it was given.
        value: Value of any type of whole numbers, such as NumPy's.
        least: the smallest that is allowed.

    Raises:
        InputError: it is no whole number, or smaller.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}: give a whole number, {least} or more") from None
    if number < least:
        raise InputError(f"{name} is {number}: it must be {least} or more")
    return number


def truth_value(name: str, value: object) -> bool:
    """A yes or no that somebody gave, as Python's own.

    Args:
        name: Name of the argument.
        value: Value that was given; NumPy's truth values are taken too.

    Raises:
        InputError: it is none: a text such as "no" would count as a yes.
    """
    if type(value).__name__ not in ("bool", "bool_"):
        raise InputError(f"{name} is {value!r}: give True or False")
    return bool(value)


def did_you_mean(name: str, names: Collection[str], *, most: int = 1) -> str:
    """A hint for a message: ``did you mean train? ``; empty where no name is close, or it is one.

    Args:
        name: Name as it was written.
        names: Names that exist.
        most: names in the hint, closest first.
    """
    import difflib

    close = [] if name in names else difflib.get_close_matches(name, names, n=most)
    return f"did you mean {' or '.join(close)}? " if close else ""
