"""Aligned text tables for a terminal, and numbers as JSON takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, right-aligned, two spaces apart; lines by newlines."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def to_json(values: NDArray[np.floating[Any]]) -> Any:
    """Nested lists of numbers, None for what JSON has no word for (NaN, infinities)."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(v) for v in value]
        return value if math.isfinite(value) else None

    return convert(values.tolist())
