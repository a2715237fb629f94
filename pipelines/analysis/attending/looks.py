"""What each attention head looks at: entropy, and shares of tokens that stand in a fixed place.

Clark et al. (2019), *What Does BERT Look At? An Analysis of BERT's Attention* (arXiv:1906.04341),
sections 3.1 to 3.3: many heads look at a neighbour, at [SEP], or broadly at all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.maps import WindowMaps
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.drawing.layers import value_maps
from bertvision.pipelines.drawing.svg import Canvas
from bertvision.pipelines.text import fill, format_table

MEASURES = ("entropy", "cls", "sep", "previous", "next", "same")
"""What is measured of each head, in this order."""
TITLES = {
    "entropy": "entropy",
    "cls": "to the first token",
    "sep": "to [SEP]",
    "previous": "to the previous token",
    "next": "to the next token",
    "same": "to itself",
}
"""How people read them."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionResult(AnalysisResult):
    """What each attention head looks at, in the mean over windows.

    Attributes:
        values: (measures, layers, heads) means over windows of the mean over their tokens: the
            entropy in parts of that of looking at all tokens alike (1: broad, 0: at one token
            alone), and shares of attention from 0 to 1.
        errors: (measures, layers, heads) their standard errors over windows.
        alike: (measures,) the same of looking at all tokens alike: what says nothing.
        measures: names, see `MEASURES`.
        layers: numbers of the transformer layers, from 1.
        heads: numbers of the attention heads, from 1.
        name: what was measured, for titles.
        n_windows: windows that entered.
        n_available: windows of the split.
        n_tokens: tokens of these windows.
        seed: of the sample of windows.
    """

    seen = (
        "Heat maps of layer × attention head: the deeper the colour, the more of its attention a "
        "head gives there; entropy 1 is attention to all tokens alike."
    )

    values: Array
    errors: Array
    alike: Array
    measures: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    name: str
    n_windows: int
    n_available: int
    n_tokens: int
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        windows = f"{self.n_windows:,} of {self.n_available:,} windows"
        return f"Attention heads, {self.name}, {windows}, {self.n_tokens:,} tokens"

    def table(self) -> str:
        """Text for a terminal: a row per layer, with its strongest heads."""
        header = ["layer", "entropy", "(lowest, head)"]
        header += [f"most {TITLES[name]} (head)" for name in self.measures[1:]]
        rows = []
        for i, layer in enumerate(self.layers):
            least = int(self.values[0, i].argmin())
            row = [str(layer), f"{self.values[0, i].mean():.3f}"]
            row.append(f"{self.values[0, i, least]:.3f} ({self.heads[least]})")
            for of in self.values[1:, i]:
                row.append(f"{of.max():.3f} ({self.heads[int(of.argmax())]})")
            rows.append(row)
        rows.append(
            ["(all alike)", f"{self.alike[0]:.3f}", "", *(f"{v:.3f}" for v in self.alike[1:])]
        )
        legend = (
            "Entropy: mean over the layer's heads, in parts of that of looking at all tokens "
            "alike. Others: the largest share of attention that a head of the layer gives there, "
            "and which head; the last row is what attention to all tokens alike would give. Of "
            "many heads one is always largest: --csv has them all, with standard errors."
        )
        return f"{self.title()}\n\n{format_table(header, rows)}\n\n{fill(legend)}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head: measures and their standard errors."""
        return [
            {
                "name": self.name,
                "layer": layer,
                "head": head,
                **{
                    key: value
                    for k, measure in enumerate(self.measures)
                    for key, value in (
                        (measure, float(self.values[k, i, j])),
                        (f"{measure}_se", float(self.errors[k, i, j])),
                    )
                },
            }
            for i, layer in enumerate(self.layers)
            for j, head in enumerate(self.heads)
        ]

    def drawing(self) -> Canvas:
        """A heat map of layer × head for each measure."""
        maps = {TITLES[name]: of for name, of in zip(self.measures, self.values, strict=True)}
        return value_maps(
            "share of attention; entropy in parts of the broadest",
            maps,
            ("layer", self.layers),
            ("attention head", self.heads),
            per_line=3,
        )


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
