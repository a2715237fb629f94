"""Arrays as JSON takes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_json(values: NDArray[np.floating[Any]]) -> Any:
    """Nested lists of numbers, None for what JSON has no word for (NaN, infinities)."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(v) for v in value]
        return value if math.isfinite(value) else None

    return convert(values.tolist())
