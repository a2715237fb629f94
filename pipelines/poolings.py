"""Poolings of the tokens of a window into one vector: their names and their arithmetic.

Special tokens take part in mean and maximum, as in the mean pooling of sentence encoders (Reimers
and Gurevych 2019, arXiv:1908.10084): a window of BERT always has two of them. ``cls`` and ``sep``
are the special tokens at the ends of a window; ``first`` and ``last`` the tokens inside of them, or
at the ends where there are none, as after most decoders' prompts. NumPy and torch are imported by
the functions that compute, because the command line lists the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from bertvision.errors import UnknownNameError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

TokenPooling = Literal["all", "cls", "sep", "mean", "max", "first", "last"]
"""Tokens that an extraction keeps of a window: all, or one vector, a pooling of them."""
POOLINGS: tuple[TokenPooling, ...] = get_args(TokenPooling)[1:]
"""Poolings over a window's tokens, in the order in which they are listed."""


SpecialEnds = tuple[bool, bool]
"""Whether windows begin, and whether they end, with a special token."""


def pool(
    states: Tensor,
    lengths: npt.NDArray[np.integer],
    pooling: TokenPooling,
    special: SpecialEnds = (True, True),
) -> Tensor:
    """A vector for each window, from the hidden states of its tokens.

    A mean is summed in float64 and rounded once, so that neither the device nor the order of the
    sum shows.

    Args:
        states: (tokens, …) of windows one after another, without padding.
        lengths: (windows,) tokens of each, at least 1.
        pooling: One of `POOLINGS`.
        special: Special tokens at the ends of each window.

    Returns:
        (windows, …) in the type of ``states``.

    Raises:
        UnknownNameError: there is no such pooling.
    """
    import numpy as np
    import torch

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
