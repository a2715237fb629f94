"""Poolings of the tokens of a window into one vector: their names and their arithmetic.

Special tokens take part in mean and maximum, as in the mean pooling of sentence encoders (Reimers
and Gurevych 2019, arXiv:1908.10084): a window of BERT always has two of them. ``cls`` and ``sep``
are the special tokens at the ends of a window; ``first`` and ``last`` the tokens inside of them, or
at the ends where there are none, as after most decoders' prompts; ``at:FIELD`` is the token to
which a column of the data points, such as the last one of a subject. NumPy and torch are imported
by the functions that compute, because the command line lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from bertvision.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

TokenPooling = Annotated[str, "a pooling, or all tokens"]  # told from other names by `reading.READ`
"""Tokens that an extraction keeps of a window: all, or one vector, a pooling of them."""
POOLINGS: tuple[TokenPooling, ...] = ("cls", "sep", "mean", "max", "first", "last")
"""Poolings over a window's tokens that any data have, in the order in which they are listed."""
POOLING_NAMES = ", ".join([*POOLINGS, "at:FIELD"])
"""All poolings, for help and messages."""
_AT = "at:"
_FIELD = re.compile(r"[a-z0-9_]{1,40}", re.ASCII)


def check_pooling(name: str) -> TokenPooling:
    """Return the name of a pooling.

    Raises:
        UnknownNameError: there is no such pooling.
    """
    field = column_of(name)
    if name not in POOLINGS and field is None:
        raise UnknownNameError(f"--pool {name!r}: choose {POOLING_NAMES}")
    if field is not None and not _FIELD.fullmatch(field):
        raise UnknownNameError(
            f"--pool {name!r}: behind at: stands a column of the data whose name is of a-z, 0-9 "
            "and _ alone, since the stored split is named after it: rename the column"
        )
    return name


def column_of(pooling: TokenPooling) -> str | None:
    """The column that points to the tokens of a pooling ``at:FIELD``; None of the others."""
    return pooling.removeprefix(_AT) if pooling.startswith(_AT) else None


def check_of_texts(pooling: TokenPooling, head: str) -> None:
    """Refuse a head whose pooling a text alone does not have.

    Args:
        pooling: Tokens that the head reads.
        head: Name of the head, for the message.

    Raises:
        InputError: a column of the data points to them.
    """
    if (column := column_of(pooling)) is not None:
        raise InputError(
            f"{head} reads the token to which the column {column!r} of the stored data points, and "
            "a text alone has no columns: score it on stored splits with `bertvision evaluate`"
        )


def file_part(pooling: TokenPooling) -> str:
    """A pooling as a part of names of files and stored splits: ``at:subject`` → ``at_subject``."""
    return pooling.replace(":", "_")


def from_file_part(part: str) -> TokenPooling | None:
    """The pooling whose `file_part` this is, or None."""
    if part in POOLINGS:
        return part
    return f"at:{part[3:]}" if part.startswith("at_") and len(part) > 3 else None


def pooling_order(pooling: TokenPooling) -> tuple[int, str]:
    """Key that sorts poolings as they are listed."""
    known = POOLINGS.index(pooling) if pooling in POOLINGS else len(POOLINGS)
    return known, pooling


SpecialEnds = tuple[bool, bool]
"""Whether windows begin, and whether they end, with a special token."""


def pool(
    states: Tensor,
    lengths: npt.NDArray[np.integer],
    pooling: TokenPooling,
    special: SpecialEnds = (True, True),
    places: Mapping[TokenPooling, npt.NDArray[np.integer]] | None = None,
) -> Tensor:
    """A vector for each window, from the hidden states of its tokens.

    A mean is summed in float64 and rounded once, so that neither the device nor the order of the
    sum shows.

    Args:
        states: (tokens, …) of windows one after another, without padding.
        lengths: (windows,) tokens of each, at least 1.
        pooling: Name of the pooling.
        special: Special tokens at the ends of each window.
        places: Token of each window, (windows,), counted inside it, by pooling ``at:FIELD``.

    Returns:
        (windows, …) in the type of ``states``.

    Raises:
        UnknownNameError: there is no such pooling.
    """
    import numpy as np
    import torch

    if places and pooling in places:
        begins = np.cumsum(lengths, dtype=np.int64) - lengths
        return states[torch.from_numpy(begins + places[pooling]).to(states.device)]
    if (rows := _rows(lengths, pooling, special)) is not None:
        return states[torch.from_numpy(rows).to(states.device)]
    counts = torch.from_numpy(np.asarray(lengths, np.int64)).to(states.device)
    if pooling == "max":
        return torch.segment_reduce(states, "max", lengths=counts)
    if pooling == "mean":
        return torch.segment_reduce(states.double(), "mean", lengths=counts).to(states.dtype)
    raise _unknown(pooling)


def pool_numpy(
    states: npt.NDArray[np.floating],
    lengths: npt.NDArray[np.integer],
    pooling: TokenPooling,
    special: SpecialEnds = (True, True),
) -> npt.NDArray[np.floating]:
    """`pool` in NumPy, for Dask; arguments, result and errors are those of `pool`."""
    import numpy as np

    if pooling not in POOLINGS:
        raise _unknown(pooling)
    if (rows := _rows(lengths, pooling, special)) is not None:
        taken: npt.NDArray[np.floating] = states[rows]
        return taken
    if not len(lengths):
        return states[:0]
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    if pooling == "max":
        largest: npt.NDArray[np.floating] = np.maximum.reduceat(states, first, axis=0)
        return largest
    if pooling == "mean":
        sums = np.add.reduceat(states, first, axis=0, dtype=np.float64)
        counts = np.asarray(lengths).reshape(-1, *[1] * (states.ndim - 1))
        means: npt.NDArray[np.floating] = (sums / counts).astype(states.dtype)
        return means
    raise _unknown(pooling)


def _rows(
    lengths: npt.NDArray[np.integer], pooling: TokenPooling, special: SpecialEnds
) -> npt.NDArray[np.int64] | None:
    """The token that a pooling takes of each window; None where it computes with all.

    In a window of special tokens alone ``first`` and ``last`` are the one at its beginning.
    """
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    match pooling:
        case "cls":
            return begins
        case "sep":
            return ends - 1
        case "first":
            inside = begins + special[0]
            return np.where(inside < ends - special[1], inside, begins)
        case "last":
            return np.maximum(ends - 1 - special[1], begins)
    return None


def _unknown(pooling: str) -> UnknownNameError:
    return UnknownNameError(f"no pooling {pooling!r}: there are {', '.join(POOLINGS)}")
