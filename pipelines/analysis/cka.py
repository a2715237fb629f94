"""Linear CKA of every layer of one split with every layer of another, streamed.

Centered kernel alignment, HSIC(X, Y) / √(HSIC(X, X) · HSIC(Y, Y)) with linear kernels, of
Kornblith et al. (2019), eq. 2; by default with the unbiased HSIC₁ of Song et al. (2012), because
biased CKA of unrelated features is far from zero unless there are many more tokens than channels.
CKA is driven by the few channels of largest variance, so it is also given without those.

Two passes over the blocks: channel means and variances, then cross moments about these means. The
cross moments of a layer pair take hidden_x × hidden_y × 8 bytes; layers of x are taken in groups
so that a partial result stays near ``GROUP_BYTES``, each group being one more pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.cross_moments import CrossMoments
from bertvision.pipelines.analysis.moments import Array, Block, Moments
from bertvision.pipelines.analysis.reduce import Blocks, check_finite, sampled_blocks, tree_reduce
from bertvision.pipelines.drawing.figures import Figure, titled
from bertvision.pipelines.drawing.layers import layer_maps
from bertvision.pipelines.files import to_json
from bertvision.pipelines.scheduler import compute, use_scheduler
from bertvision.pipelines.text import format_table

if TYPE_CHECKING:
    import pandas as pd

GROUP_BYTES = 2**29
"""About the size of one partial result: 512 MiB are 455 layer pairs of hidden size 384, or 64 of
1,024. One to three partial results per worker are alive at a time."""


@dataclass(frozen=True, eq=False)
class CkaResult:
    """Similarity of the layers of two splits.

    Attributes:
        cka: (layers_x, layers_y) CKA with all channels; NaN where a layer does not vary.
        cka_dropped: (layers_x, layers_y) the same without ``dropped_x`` and ``dropped_y``.
        dropped_x: per layer of x, the channels of largest variance, largest first.
        dropped_y: the same of y.
        name_x: what x is, for titles.
        name_y: what y is.
        layers_x: layer numbers of the rows (0 = embedding output).
        layers_y: layer numbers of the columns.
        n_tokens: tokens that entered.
        n_available: tokens that the splits hold.
        unbiased: HSIC₁ (may be slightly below zero) or the biased HSIC₀.
        seed: of the sample of tokens.
    """

    cka: Array
    cka_dropped: Array
    dropped_x: tuple[tuple[int, ...], ...]
    dropped_y: tuple[tuple[int, ...], ...]
    name_x: str
    name_y: str
    layers_x: tuple[int, ...]
    layers_y: tuple[int, ...]
    n_tokens: int
    n_available: int
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
            f"Linear CKA ({kind}), {self.name_x} × {self.name_y}, "
            f"{self.n_tokens:,} of {self.n_available:,} tokens"
        )

    def _panels(self) -> list[tuple[str, Array]]:
        panels = [("all channels", self.cka)]
        if self.n_dropped:
            plural = "s" if self.n_dropped > 1 else ""
            label = f"without the {self.n_dropped} channel{plural} of largest variance per layer"
            panels.append((label, self.cka_dropped))
        return panels

    def table(self) -> str:
        """Text for a terminal: a row per layer of x, a column per layer of y."""
        digits = 3 if len(self.layers_y) <= 13 else 2
        parts = [self.title()]
        for label, values in self._panels():
            corner = f"{self.name_x} \\ {self.name_y}"
            rows = [
                [str(layer), *(f"{v:.{digits}f}" for v in row)]
                for layer, row in zip(self.layers_x, values, strict=True)
            ]
            parts.append(
                f"{label}\n" + format_table([corner, *map(str, self.layers_y)], rows, stacked=True)
            )
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """The result for JSON; NaN becomes null."""
        return {
            "x": self.name_x,
            "y": self.name_y,
            "layers_x": list(self.layers_x),
            "layers_y": list(self.layers_y),
            "cka": to_json(self.cka),
            "cka_dropped": to_json(self.cka_dropped),
            "dropped_x": [list(channels) for channels in self.dropped_x],
            "dropped_y": [list(channels) for channels in self.dropped_y],
            "n_tokens": self.n_tokens,
            "n_available": self.n_available,
            "unbiased": self.unbiased,
            "seed": self.seed,
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each pair of layers, as ``--csv`` writes them; NaN becomes None."""
        values = zip(to_json(self.cka), to_json(self.cka_dropped), strict=True)
        return [
            {
                "x": self.name_x,
                "y": self.name_y,
                "layer_x": layer_x,
                "layer_y": layer_y,
                "cka": value,
                "cka_dropped": dropped,
            }
            for layer_x, (kept, without) in zip(self.layers_x, values, strict=True)
            for layer_y, value, dropped in zip(self.layers_y, kept, without, strict=True)
        ]

    def to_pandas(self) -> pd.DataFrame:
        """A frame with a row for each pair of layers: those of `rows`."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def figure(self) -> Figure:
        """Heat maps of layer × layer."""
        rows, columns = (self.name_x, self.layers_x), (self.name_y, self.layers_y)
        desc = "Heat maps of layer × layer; the deeper the colour, the more alike two layers are."
        return titled(self.title(), desc, layer_maps("CKA", dict(self._panels()), rows, columns))


def cka(
    x: da.Array,
    y: da.Array,
    *,
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

    Costs 2 · tokens · (layers_x · hidden_x) · (layers_y · hidden_y) operations in float64; the
    sample keeps that in bounds and is read from the splits once. With ``max_tokens=None`` all
    tokens enter, and the blocks are read once for the means and once per group of layers.

    Args:
        x: (token, layer, hidden) float32 activations, chunked along the tokens.
        y: (token, layer, hidden) activations of the same tokens in the same order; its layers and
            hidden size may differ.
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
    with use_scheduler(scheduler, "cka"):
        blocks = sampled_blocks((x, y), max_tokens, seed)
        sides = _sides(blocks, (x.shape[1:], y.shape[1:]), drop_channels)
        n_tokens, values = _cka(blocks, sides, unbiased=unbiased)
    return CkaResult(
        cka=values[0],
        cka_dropped=values[-1],
        dropped_x=sides[0].dropped,
        dropped_y=sides[1].dropped,
        name_x=names[0],
        name_y=names[1],
        layers_x=tuple(range(x.shape[1]) if layers_x is None else layers_x),
        layers_y=tuple(range(y.shape[1]) if layers_y is None else layers_y),
        n_tokens=n_tokens,
        n_available=x.shape[0],
        unbiased=unbiased,
        seed=seed,
    )


class _Side(NamedTuple):
    """What the second pass must know of x or of y from the first."""

    shift: Array  # (layers, hidden) means
    keep: Array  # (variants, layers, hidden)
    dropped: tuple[tuple[int, ...], ...]


_Product = tuple[tuple[int, slice], tuple[int, slice]]
"""The layers of one side that meet those of another."""


def _sides(blocks: Blocks, shapes: Sequence[tuple[int, int]], drop_channels: int) -> list[_Side]:
    moments = compute(tree_reduce(blocks, partial(_first_pass, shapes=shapes), _merge))
    n_tokens = moments[0].n
    if n_tokens < 4:
        raise InputError(f"CKA needs at least 4 tokens; there are {n_tokens}")
    sides = []
    for m in moments:
        check_finite(m.m2)
        order = np.argsort(-m.m2, axis=1, kind="stable")[:, :drop_channels]  # (layers, dropped)
        rest = np.ones_like(m.mean)
        np.put_along_axis(rest, order, 0.0, axis=1)
        keep = np.stack([np.ones_like(rest), rest] if drop_channels else [rest])
        sides.append(_Side(m.mean, keep, tuple(map(tuple, order.tolist()))))
    return sides


def _cka(blocks: Blocks, sides: list[_Side], *, unbiased: bool) -> tuple[int, Array]:
    (lx, dx), (ly, dy) = sides[0].shift.shape, sides[1].shift.shape
    step = max(1, GROUP_BYTES // (8 * dx * ly * dy))
    variants = len(sides[0].keep)
    cross = np.empty((variants, lx, ly))
    own = [np.empty((variants, lx)), np.empty((variants, ly))]
    for start in range(0, lx, step):
        group = slice(start, min(start + step, lx))
        selves = [(0, i) for i in range(lx)[group]]
        if start == 0:
            selves += [(1, j) for j in range(ly)]
        products: list[_Product] = [((0, group), (1, slice(None)))]
        products += [((side, slice(i, i + 1)),) * 2 for side, i in selves]
        leaf = partial(_second_pass, sides=sides, products=products)
        first, *rest = compute(tree_reduce(blocks, leaf, _merge))
        cross[:, group] = first.hsic(unbiased=unbiased)
        for (side, i), moments in zip(selves, rest, strict=True):
            own[side][:, i] = moments.hsic(unbiased=unbiased)[:, 0, 0]
    product = own[0][:, :, None] * own[1][:, None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.where(product > 0, cross / np.sqrt(product), np.nan)
    return first.n, values


def _first_pass(*blocks: Block, shapes: Sequence[tuple[int, int]]) -> list[Moments]:
    moments = [Moments.empty(*shape) for shape in shapes]
    for m, block in zip(moments, blocks, strict=True):
        m.add(block)
    return moments


def _second_pass(
    *blocks: NDArray[np.float32], sides: Sequence[_Side], products: Sequence[_Product]
) -> list[CrossMoments]:
    result = []
    for (a, layers_a), (b, layers_b) in products:
        moments = CrossMoments.empty(
            sides[a].shift[layers_a],
            sides[b].shift[layers_b],
            sides[a].keep[:, layers_a],
            sides[b].keep[:, layers_b],
        )
        moments.add(blocks[a][:, layers_a], blocks[b][:, layers_b])
        result.append(moments)
    return result


def _merge(one: list[Any], other: list[Any]) -> list[Any]:
    return [a.merge(b) for a, b in zip(one, other, strict=True)]
