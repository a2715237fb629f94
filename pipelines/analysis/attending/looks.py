"""What each attention head looks at: entropy, and shares of tokens that stand in a fixed place.

Clark et al. (2019), *What Does BERT Look At? An Analysis of BERT's Attention* (arXiv:1906.04341),
sections 3.1 to 3.3: many heads look at a neighbour, at [SEP], or broadly at all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.looks_result import MEASURES, AttentionResult
from bertvision.pipelines.analysis.attending.maps import WindowMaps
from bertvision.pipelines.analysis.sums.moments import Array


def attention(
    maps: Iterable[WindowMaps],
    *,
    sep: int | None,
    name: str = "x",
    n_available: int | None = None,
    seed: int = 0,
) -> AttentionResult:
    """What each attention head looks at.

    Args:
        maps: of `attention_maps`; one window is held at a time.
        sep: vocabulary index of [SEP]; None where there is none.
        name: what it is of, for titles.
        n_available: windows of the split; by default those given.
        seed: of the sample of windows, for the record.

    Raises:
        InputError: there is no window.
    """
    found, alike, tokens = [], [], 0
    for window in maps:
        is_sep = window.input_ids == (-1 if sep is None else sep)
        found.append(looks(window.weights, is_sep))
        alike.append(_alike(is_sep))
        tokens += len(window.input_ids)
    if not found:
        raise InputError("attention is measured on windows; there is none")
    values = np.stack(found)
    spread = values.std(axis=0, ddof=1) if len(found) > 1 else np.full(values.shape[1:], np.nan)
    return AttentionResult(
        values=values.mean(axis=0),
        errors=spread / np.sqrt(len(found)),
        alike=np.mean(alike, axis=0),
        measures=MEASURES,
        layers=tuple(range(1, values.shape[2] + 1)),
        heads=tuple(range(1, values.shape[3] + 1)),
        name=name,
        n_windows=len(found),
        n_available=len(found) if n_available is None else n_available,
        n_tokens=tokens,
        seed=seed,
    )


def looks(weights: Tensor, is_sep: npt.NDArray[np.bool_]) -> Array:
    """The measures of one window, (measures, layers, heads) float64.

    Args:
        weights: (layers, heads, tokens, tokens), rows that sum to 1.
        is_sep: (tokens,) which tokens are [SEP].
    """
    n = weights.shape[-1]
    w = weights.double()
    entropy = -(w * w.clamp_min(1e-300).log()).sum(dim=-1).mean(dim=-1)
    along = w.diagonal(dim1=-2, dim2=-1)
    before, after = (w.diagonal(offset=k, dim1=-2, dim2=-1) for k in (-1, 1))
    measures = [
        entropy / np.log(n) if n > 1 else entropy,
        w[..., 0].mean(dim=-1),
        w[..., is_sep].sum(dim=-1).mean(dim=-1),
        before.sum(dim=-1) / max(n - 1, 1),
        after.sum(dim=-1) / max(n - 1, 1),
        along.mean(dim=-1),
    ]
    return np.stack([of.cpu().numpy() for of in measures])


def _alike(is_sep: npt.NDArray[np.bool_]) -> list[float]:
    """The measures of attention to all tokens alike."""
    n = len(is_sep)
    share = 1 / n
    return [1.0, share, float(is_sep.mean()), share, share, share]
