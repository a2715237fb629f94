"""Linear CKA of every layer of one split with every layer of another, streamed.

Centered kernel alignment, HSIC(X, Y) / √(HSIC(X, X) · HSIC(Y, Y)) with linear kernels, of
Kornblith et al. (2019), eq. 2; by default with the unbiased HSIC₁ of Song et al. (2012), because
biased CKA of unrelated features is far from zero unless there are many more tokens than channels.
CKA is driven by the few channels of largest variance, so it is also given without those.

Two passes over the blocks: channel means and variances, then sums over pairs of tokens. Products
are in float32, sums of them in float64: values differ by less than 1e-6 from those in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.fields import Axes, Numbers
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.centring import Centring
from bertvision.pipelines.analysis.sums.forms import cheaper_form
from bertvision.pipelines.analysis.sums.moments import Array, Block, ChannelMoments
from bertvision.pipelines.analysis.sums.reduce import sampled_blocks, tree_reduce
from bertvision.pipelines.drawing.figures import WIDE
from bertvision.pipelines.drawing.layers import layer_maps
from bertvision.pipelines.drawing.svg import Canvas
from bertvision.pipelines.files import to_json
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.scheduler import compute, use_scheduler
from bertvision.pipelines.text import fill, format_table

Matrix = Annotated[Array, Axes.of("layers_x", "layers_y")]


@dataclass(frozen=True, eq=False, repr=False)
class CkaResult(AnalysisResult):
    """Similarity of the layers of two splits.

    Attributes:
        cka: (layers_x, layers_y) CKA with all channels; NaN where a layer does not vary.
        cka_dropped: (layers_x, layers_y) the same without ``dropped_x`` and ``dropped_y``.
        dropped_x: per layer of x, the channels of largest variance, largest first.
        dropped_y: the same of y.
        x: what x is, for titles.
        y: what y is.
        layers_x: layer numbers of the rows (0 = embedding output).
        layers_y: layer numbers of the columns.
        n_tokens: tokens that entered.
        n_available: tokens that the splits hold.
        unbiased: HSIC₁ (may be slightly below zero) or the biased HSIC₀.
        seed: of the sample of tokens.
    """

    kind = "cka"
    heading = "CKA: how alike layers are"
    caption = "Linear CKA: layers of the first snapshot (rows) and of the second (columns)"
    reading = (
        "Linear CKA says how alike the hidden states of two layers are, whatever turns, moves or "
        "scales them: 1 are the same. Few channels of large variance may decide it, so it is also "
        "measured without these."
    )
    seen = "Heat maps of layer × layer; the deeper the colour, the more alike two layers are."

    cka: Matrix
    cka_dropped: Matrix
    dropped_x: Annotated[tuple[tuple[Count, ...], ...], Axes.of("layers_x")]
    dropped_y: Annotated[tuple[tuple[Count, ...], ...], Axes.of("layers_y")]
    x: str
    y: str
    layers_x: Numbers
    layers_y: Numbers
    n_tokens: Count
    n_available: Count
    unbiased: bool
    seed: int

    @property
    def n_dropped(self) -> int:
        """Channels of each layer that ``cka_dropped`` leaves out."""
        return len(self.dropped_x[0])

    def title(self) -> str:
        """One line that says what was measured on how much."""
        kind = "unbiased" if self.unbiased else "biased"
        return (
            f"Linear CKA ({kind}), {self.x} × {self.y}, "
            f"{self.n_tokens:,} of {self.n_available:,} tokens"
        )

    def _panels(self) -> list[tuple[str, Array]]:
        panels = [("all channels", self.cka)]
        if self.n_dropped:
            plural = "s" if self.n_dropped > 1 else ""
            label = f"without the {self.n_dropped} channel{plural} of largest variance per layer"
            panels.append((label, self.cka_dropped))
        return panels

    def columns(self) -> list[Column]:
        """A column for each layer of y, of all channels."""
        digits = 3 if len(self.layers_y) <= 13 else 2
        across = (Column(f"layer_{j}", str(j), digits=digits) for j in self.layers_y)
        return [Column("layer", f"{self.x} \\ {self.y}", "text"), *across]

    def shown(self) -> list[dict[str, Any]]:
        """A row for each layer of x; what ends in ``_dropped`` is without the dropped channels."""
        values = zip(self.layers_x, to_json(self.cka), to_json(self.cka_dropped), strict=True)
        return [
            {"layer": str(layer)}
            | {f"layer_{j}": value for j, value in zip(self.layers_y, kept, strict=True)}
            | {f"layer_{j}_dropped": value for j, value in zip(self.layers_y, without, strict=True)}
            for layer, kept, without in values
        ]

    def table(self) -> str:
        """Text for a terminal: a row per layer of x, a column per layer of y, in both variants."""
        parts, columns, rows = [self.title()], self.columns(), self.shown()
        for (label, _), suffix in zip(self._panels(), ("", "_dropped"), strict=False):
            keyed = [replace(c, key=f"{c.key}{suffix}") for c in columns[1:]]
            lines = [[c.text(row) for c in (columns[0], *keyed)] for row in rows]
            text = format_table([c.label for c in columns], lines, stacked=True)
            parts.append(f"{label}\n{text}")
        return "\n\n".join([*parts, fill(self.reading)])

    def rows(self) -> list[dict[str, Any]]:
        """A row for each pair of layers, as ``--csv`` writes them; NaN becomes None."""
        values = zip(to_json(self.cka), to_json(self.cka_dropped), strict=True)
        return [
            {
                "x": self.x,
                "y": self.y,
                "layer_x": layer_x,
                "layer_y": layer_y,
                "cka": value,
                "cka_dropped": dropped,
            }
            for layer_x, (kept, without) in zip(self.layers_x, values, strict=True)
            for layer_y, value, dropped in zip(self.layers_y, kept, without, strict=True)
        ]

    def drawing(self, width: float = WIDE) -> Canvas:
        """Heat maps of layer × layer."""
        sides = (self.x, self.layers_x), (self.y, self.layers_y)
        return layer_maps("CKA", dict(self._panels()), *sides, width)


def cka(
    x: da.Array,
    y: da.Array,
    *,
    places: NDArray[np.int64] | None = None,
    unbiased: bool = True,
    drop_channels: int = 3,
    max_tokens: int | None = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    names: tuple[str, str] = ("x", "y"),
    layers_x: Sequence[int] | None = None,
    layers_y: Sequence[int] | None = None,
) -> CkaResult:
    """Linear CKA of every layer of x with every layer of y.

    Costs 2 · tokens · (layers_x · hidden_x) · (layers_y · hidden_y) operations in float32, or
    tokens² · (layers_x · hidden_x + layers_y · hidden_y) where these are fewer; half of it where x
    is y. The sample keeps that in bounds and is read from the splits once. With ``max_tokens=None``
    all tokens enter, and the blocks are read once for the means and once per group of layers.

    Args:
        x: (token, layer, hidden) float32 activations, chunked along the tokens.
        y: (token, layer, hidden) activations of the same tokens; its layers and hidden size may
            differ.
        places: (tokens,) row of y that holds the token of each row of x; None is the same row.
        unbiased: HSIC₁, else the biased HSIC₀.
        drop_channels: channels of largest variance to leave out of each layer in the second matrix.
        max_tokens: size of the uniform sample of tokens; None takes all of them.
        seed: of that sample.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        names: what x and y are, for titles (snapshot tags, for example).
        layers_x: layer numbers of x; 0, 1, … by default.
        layers_y: layer numbers of y; 0, 1, … by default.

    Raises:
        InputError: the tokens do not match, are fewer than 4, or an option is out of range.
        NonFiniteError: NaN or infinity in the activations.
    """
    hidden = min(x.shape[-1], y.shape[-1])
    if not 0 <= drop_channels < hidden:
        raise InputError(
            f"drop_channels is {drop_channels}; give 0 to {hidden - 1}, below the hidden size of "
            f"{hidden}"
        )
    arrays = (x,) if x is y else (x, y)
    tokens = min(x.shape[0], max_tokens or x.shape[0])
    form = cheaper_form(tokens, [array.shape[1:] for array in arrays])
    with use_scheduler(scheduler, "cka"):
        blocks = sampled_blocks(arrays, max_tokens, seed, form.rows(tokens), places)
        moments: list[ChannelMoments] = compute(tree_reduce(blocks, _moments, _merge))
        if moments[0].n < 4:
            raise InputError(f"CKA needs at least 4 tokens; there are {moments[0].n}")
        sides = [Centring.of(m, drop_channels) for m in moments]
        sums = form.sums(blocks, sides)
    values = sums.cka(unbiased=unbiased)[:, : x.shape[1], -y.shape[1] :]
    return CkaResult(
        cka=values[0],
        cka_dropped=values[-1],
        dropped_x=sides[0].dropped,
        dropped_y=sides[-1].dropped,
        x=names[0],
        y=names[1],
        layers_x=tuple(range(x.shape[1]) if layers_x is None else layers_x),
        layers_y=tuple(range(y.shape[1]) if layers_y is None else layers_y),
        n_tokens=sums.n,
        n_available=x.shape[0],
        unbiased=unbiased,
        seed=seed,
    )


def _moments(*blocks: Block) -> list[ChannelMoments]:
    return [ChannelMoments.of(block) for block in blocks]


def _merge(one: list[ChannelMoments], other: list[ChannelMoments]) -> list[ChannelMoments]:
    return [a.merge(b) for a, b in zip(one, other, strict=True)]
