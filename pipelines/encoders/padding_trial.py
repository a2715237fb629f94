"""The trial of an encoder: a window computed alone against the same window in a batch.

A model is meant to look at no padding and at no other window. Some do all the same: FNet mixes
every position with every other, ConvBERT's convolutions reach behind the last token, some models
count lengths of whole batches. So before anything is stored, a few windows are computed both ways,
and windows stand together in a batch only as far as that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.pipelines.precision import Precision
from bertvision.pipelines.tasks.windows import Windows

Batching = Literal["like", "equal", "single"]
"""Windows that are computed together: of like length, padded; of equal length; none."""
BATCHINGS: tuple[Batching, ...] = ("like", "equal", "single")

SIMILAR = 0.85
"""Length of the shortest window of a group, in parts of the longest: padding is at most 15 %."""
PADDED, PACKED = (17, 20, 20), (3, 5)
"""Tokens of the windows of a trial: of two lengths that are padded together, and two of one; and
where no window is padded."""
_TOLERANCE: dict[Precision, float] = {"32": 1e-3, "bf16": 0.25}
"""How far a token's state may be from that of its window alone, in parts of its mean magnitude.
Rounding gives 1e-5 in float32 and 0.05 in bfloat16, padding that is looked at 0.02 and more."""

Compute = Callable[[Windows, npt.NDArray[np.int64]], Sequence[Tensor]]
"""Gives what is kept of some windows, one window after another: (vectors, layers, hidden) each."""


def first_batching(config: Any) -> Batching:
    """The batching that a trial begins with: that of a model whose arithmetic depends on lengths.

    BigBird attends to blocks of long batches alone, and rotations may be scaled by the length of a
    batch: a short window would be computed as the longest beside it.

    Args:
        config: Configuration of the model.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    rope = rope if isinstance(rope, dict) else {}
    kinds = {
        settings.get("rope_type")
        for settings in (rope, *rope.values())
        if isinstance(settings, dict)
    }
    sparse = getattr(config, "attention_type", None) == "block_sparse"
    return "equal" if sparse or kinds & {"dynamic", "longrope"} else "like"


def trial_windows(lengths: Sequence[int], words: int, longest: int) -> Windows:
    """Windows for a trial without data.

    Args:
        lengths: (windows,) Tokens of each, `PADDED` or `PACKED`.
        words: Rows of the model's embedding matrix.
        longest: Tokens that the model takes.
    """
    counts = np.array([min(n, longest) for n in lengths], np.int32)
    # from behind the special tokens on, which stand first in most vocabularies
    ids = np.resize(np.linspace(words // 3, words - 1, 29), int(counts.sum())).astype(np.int32)
    return Windows(
        input_ids=ids,
        token_type_ids=np.zeros(len(ids), np.uint8),
        offset_mapping=np.zeros((len(ids), 2), np.int32),
        n_tokens=counts,
        item_index=np.arange(len(counts), dtype=np.int32),
        labels={},
    )


def trial_rows(lengths: npt.NDArray[np.integer], most: int) -> npt.NDArray[np.int64]:
    """The windows of a split that a trial is made with.

    Args:
        lengths: (windows,) tokens of each.
        most: Tokens of a padded group.

    Returns:
        The longest window that is ever computed beside another one, one more of its length, and the
        next shorter one that may be padded to it; none where no two windows stand together.
    """
    fits = np.flatnonzero(2 * lengths.astype(np.int64) <= most)
    order = fits[np.argsort(-lengths[fits].astype(np.int64), kind="stable")]
    if len(order) < 2:
        return order[:0]
    longest = lengths[order[0]]
    shorter = order[(lengths[order] < longest) & (lengths[order] >= SIMILAR * longest)][:1]
    return np.concatenate([order[lengths[order] == longest][:2], shorter])


def choose_batching(
    compute: Callable[[Batching], Compute],
    windows: Windows,
    rows: npt.NDArray[np.int64],
    *,
    allowed: Sequence[Batching],
    precision: Precision,
    model: str,
) -> Batching:
    """The first batching in which windows have the states that each has alone.

    Args:
        compute: Gives the forward pass with a batching.
        windows: Windows of a split, or of a trial without data.
        rows: (trial,) Indices of the windows that are computed.
        allowed: Batchings to try, the fastest first.
        precision: Precision of the forward pass.
        model: Name of the model in messages.

    Raises:
        InputError: In every batching states differ, or the model cannot compute the windows.
    """
    alone = [
        [part.clone() for part in compute("single")(windows, rows[i : i + 1])]
        for i in range(len(rows))
    ]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    apart = []
    for batching in allowed:
        try:
            given = compute(batching)(windows, rows)
        except InputError:
            if batching == allowed[-1]:
                raise
            continue  # a model that takes no padding may take windows alone
        apart.append(max(map(distance, given, expected)))
        if apart[-1] <= _TOLERANCE[precision]:
            return batching
    lengths = ", ".join(map(str, windows.n_tokens[rows].tolist()))
    raise InputError(
        f"{model} computes other hidden states of the same window each time: of windows of "
        f"{lengths} tokens they differ by {apart[-1]:.2g} of their magnitude from those of each "
        "window alone, so that no stored states would be right; take another model"
    )


def distance(given: Tensor, expected: Tensor) -> float:
    """Largest difference of two states of a token, in parts of their mean magnitude.

    Args:
        given: (vectors, layers, hidden) States.
        expected: (vectors, layers, hidden) States that they should be. Those that hold NaN or
            infinity say nothing, and are refused where they are stored.

    Returns:
        Infinity where a state is not finite that should be.
    """
    known = expected.isfinite().all(dim=-1)
    one, two = given.double()[known], expected.double()[known]
    if not one.numel():
        return 0.0
    magnitude = two.abs().mean(dim=-1)
    # a token whose states are 0, such as that of padding, is measured by the others
    floor = 1e-6 * magnitude.mean() + torch.finfo(torch.float32).tiny
    apart = (one - two).abs().mean(dim=-1) / magnitude.clamp(min=float(floor))
    return float(apart.nan_to_num(nan=torch.inf).max())
