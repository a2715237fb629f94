"""One vector for a window: its first or last token, or the mean or maximum over all of them.

Special tokens take part in mean and maximum, as in the mean pooling of sentence encoders (Reimers
and Gurevych 2019, arXiv:1908.10084): a window of BERT always has two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.pipelines.tasks.registry import POOLINGS, TokenPooling
from bertvision.pipelines.tasks.special_tokens import special_ends


def pool(states: Tensor, lengths: npt.NDArray[np.integer], pooling: TokenPooling) -> Tensor:
    """A vector for each window, from the hidden states of its tokens.

    A mean is summed in float64 and rounded once, so that neither the device nor the order of the
    sum shows.

    Args:
        states: (tokens, …) of windows one after another, without padding.
        lengths: (windows,) tokens of each, at least 1.
        pooling: cls, sep, mean or max.

    Returns:
        (windows, …) in the type of ``states``.
    """
    last = np.cumsum(lengths, dtype=np.int64) - 1
    if pooling in ("cls", "sep"):
        rows = last if pooling == "sep" else last - lengths + 1
        return states[torch.from_numpy(rows).to(states.device)]
    counts = torch.from_numpy(np.asarray(lengths, np.int64)).to(states.device)
    if pooling == "max":
        return torch.segment_reduce(states, "max", lengths=counts)
    return torch.segment_reduce(states.double(), "mean", lengths=counts).to(states.dtype)


def pool_numpy(
    states: npt.NDArray[np.floating], lengths: npt.NDArray[np.integer], pooling: TokenPooling
) -> npt.NDArray[np.floating]:
    """`pool` in NumPy, for Dask.

    Args:
        states: (tokens, …) of windows one after another, without padding.
        lengths: (windows,) tokens of each, at least 1.
        pooling: cls, sep, mean or max.

    Returns:
        (windows, …) in the type of ``states``.
    """
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    if pooling in ("cls", "sep"):
        taken: npt.NDArray[np.floating] = states[first + (lengths - 1) * (pooling == "sep")]
        return taken
    if not len(lengths):
        return states[:0]
    if pooling == "max":
        largest: npt.NDArray[np.floating] = np.maximum.reduceat(states, first, axis=0)
        return largest
    sums = np.add.reduceat(states, first, axis=0, dtype=np.float64)
    counts = np.asarray(lengths).reshape(-1, *[1] * (states.ndim - 1))
    means: npt.NDArray[np.floating] = (sums / counts).astype(states.dtype)
    return means


def check_poolings(poolings: Sequence[TokenPooling], tokenizer: Any) -> None:
    """Refuse poolings for which an encoder's windows have no token.

    Args:
        poolings: that are asked for.
        tokenizer: of the encoder.

    Raises:
        InputError: cls or sep, and windows do not begin, or end, with a special token.
    """
    begins, ends = special_ends(tokenizer)
    allowed = [p for p in POOLINGS if (p != "cls" or begins) and (p != "sep" or ends)]
    for pooling in poolings:
        if pooling not in (*allowed, "all"):
            where = "begin" if pooling == "cls" else "end"
            raise InputError(
                f"pooling {pooling!r}: windows of {tokenizer.name_or_path!r} do not {where} with a "
                f"special token; its encoder's poolings are {', '.join(allowed)}"
            )
