"""Numbers of tokens that a page draws, a column for each layer, and how they are packed."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]

_STEPS = 0xFFFE
"""Steps between the smallest and the largest number; the code after them is of no number."""
_BLOCK = 512  # tokens whose cosines with all others are held at a time
NEIGHBOURS = 5


class Measure(NamedTuple):
    """A number for each token and column."""

    name: str
    """As people read it."""
    meaning: str
    """A sentence."""
    columns: Sequence[str]
    """Names of the columns: layers, outputs of a head, or latents."""
    values: Floats
    """(tokens, columns); NaN where there is no number."""
    over: str = "layer"
    """Noun for a column."""
    signed: bool = False
    """Whether zero is in the middle of its colours."""
    ends: tuple[float, float] | None = None
    """Ends of its colours; None takes percentiles of the values."""

    def to_json(self) -> dict[str, Any]:
        """The measure as the page reads it."""
        return {
            "name": self.name,
            "meaning": self.meaning,
            "columns": list(self.columns),
            "over": self.over,
            "signed": self.signed,
            "ends": self.ends,
            **packed(self.values),
        }


def packed(values: Floats) -> dict[str, Any]:
    """Numbers as 16-bit codes in equal steps from the smallest to the largest.

    Args:
        values: Finite numbers and NaN, of any shape.

    Returns:
        ``codes``, base64 of little-endian uint16 in C order, where number = ``low`` + ``step`` ·
        code, and 65535 is NaN; and ``digits``, the decimals that the steps leave standing.
    """
    known = values[np.isfinite(values)].astype(np.float64)
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    step = (high - low) / _STEPS
    codes = np.full(values.shape, 0xFFFF, "<u2")
    finite = np.isfinite(values)
    scaled = (values[finite].astype(np.float64) - low) / step if step else 0.0
    codes[finite] = np.rint(scaled)
    digits = min(6, max(0, math.floor(-math.log10(step)))) if step else 6
    return {"low": low, "step": step, "digits": digits, "codes": encoded(codes)}


def encoded(codes: npt.NDArray[Any]) -> str:
    """Base64 of an array's bytes."""
    return base64.b64encode(np.ascontiguousarray(codes).tobytes()).decode("ascii")


def state_measures(states: Floats, layers: Sequence[str]) -> list[Measure]:
    """Norms of states, and their cosines with the layer below and with the last.

    Args:
        states: (tokens, layers, hidden)
        layers: Names of the layers.
    """
    norm = np.linalg.norm(states, axis=2)
    below = np.full_like(norm, np.nan)
    below[:, 1:] = _cosines(states[:, 1:], states[:, :-1])
    last = _cosines(states, states[:, -1:])
    return [
        Measure("norm", "Length of the state (Euclidean norm).", layers, norm),
        Measure(
            "cosine to the layer below",
            "Cosine of the state and that of the layer a column before.",
            layers,
            below,
        ),
        Measure(
            "cosine to the last layer",
            f"Cosine of the state and that of layer {layers[-1]}.",
            layers,
            last,
        ),
    ]


def _cosines(x: Floats, y: Floats) -> Floats:
    """Cosines along the last axis; NaN where a vector is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        dots = (x * y).sum(axis=-1)
        cosines: Floats = dots / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1))
        return np.clip(cosines, -1, 1)


def neighbours(states: Floats, most: int = NEIGHBOURS) -> tuple[npt.NDArray[np.int64], Floats]:
    """The nearest other tokens of each, by cosine; of equal ones those that come first.

    Args:
        states: (tokens, hidden) of one layer.
        most: Neighbours of a token; fewer where there are no more tokens.

    Returns:
        Rows of the neighbours, (tokens, n), the nearest first, and their cosines. A zero vector has
        the cosine 0 with all.
    """
    lengths = np.linalg.norm(states, axis=1, keepdims=True)
    unit = states / np.where(lengths == 0, 1, lengths)
    n = min(most, len(states) - 1)
    rows = np.empty((len(states), n), np.int64)
    cosines = np.empty((len(states), n), np.float32)
    for begin in range(0, len(states), _BLOCK):
        block = unit[begin : begin + _BLOCK] @ unit.T
        own = np.arange(len(block))
        block[own, begin + own] = -np.inf
        nearest = np.argsort(-block, axis=1, kind="stable")[:, :n]
        rows[begin : begin + _BLOCK] = nearest
        cosines[begin : begin + _BLOCK] = np.take_along_axis(block, nearest, axis=1)
    return rows, np.clip(cosines, -1, 1)
