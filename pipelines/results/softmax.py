"""Several models' softmaxes combined to one: their element-wise maximum or mean.

Over values that compete with each other (the tokens of a window, two classes) every model's logits
become probabilities, of which the maximum or mean is taken. The maximum does not sum to 1, which
decoding does not need.

A softmax forgets how high a window's logits are, by which the windows of one question are compared.
So the mean of the models' log partition functions (the logarithm of the softmax's denominator) is
added to the logarithm again. It is one number per window and changes nothing within it; with it, a
model combined with itself is the model, also for contexts of several windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Combine = Literal["max", "mean"]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def combine_softmaxes(
    members: Sequence[Float32Array], lengths: npt.NDArray[np.integer], combine: Combine
) -> Float64Array:
    """Logarithm of the combined softmaxes: log of the maximum or mean of probabilities.

    It is computed from log probabilities, so that nothing underflows: the result is finite and at
    most 0. The order of the members does not matter, to the last bit.

    Args:
        members: logits of each member, (values,): groups of consecutive values that compete.
        lengths: (groups,) how many values each group has, all at least 1.
        combine: maximum or mean.

    Returns:
        (values,) float64.
    """
    logits = np.stack(members).astype(np.float64)
    # Sorted, because sums of floating-point numbers depend on their order
    logs = np.sort(logits - np.repeat(log_partition(logits, lengths), lengths, axis=1), axis=0)
    if combine == "max":
        return np.asarray(logs[-1])
    total = np.logaddexp.reduce(logs, axis=0)
    return np.asarray(np.minimum(total - np.log(len(members)), 0.0))


def combine_logits(
    members: Sequence[Float32Array], lengths: npt.NDArray[np.integer], combine: Combine
) -> Float32Array:
    """`combine_softmaxes` with the members' mean log partition added: what is decoded.

    A model with itself gives its own logits. Arguments as there.

    Returns:
        (values,) float32.
    """
    partition = log_partition(np.stack(members).astype(np.float64), lengths)
    level = np.sort(partition, axis=0).mean(axis=0)
    logs = combine_softmaxes(members, lengths, combine)
    return np.asarray(logs + np.repeat(level, lengths), np.float32)


def log_partition(logits: Float64Array, lengths: npt.NDArray[np.integer]) -> Float64Array:
    """Logarithm of the softmax's denominator of each group.

    Args:
        logits: (members, values).
        lengths: (groups,) values of each group.

    Returns:
        (members, groups).
    """
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    highest = np.maximum.reduceat(logits, first, axis=1)
    weights = np.exp(logits - np.repeat(highest, lengths, axis=1))
    return np.asarray(highest + np.log(np.add.reduceat(weights, first, axis=1)))
