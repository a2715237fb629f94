"""Isotropy of the hidden states of each layer: do tokens spread over all directions, or few?

One pass over the blocks. Mean cosine of two different tokens (Ethayarajh 2019), share of the
variance that the first principal components explain (Mu & Viswanath 2018; k/d where data are
white), mean norm, outlier channels, and the channel that adds most to the mean cosine (Timkey &
van Schijndel 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import dask.array as da
import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.analysis.fields import Axes, Numbers
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array, Block, Moments
from bertvision.pipelines.analysis.sums.reduce import check_finite, sampled_blocks, tree_reduce
from bertvision.pipelines.drawing.figures import WIDE, panels
from bertvision.pipelines.drawing.layers import layer_channels, layer_lines
from bertvision.pipelines.drawing.svg import Canvas
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.scheduler import compute, use_scheduler

OfLayers = Annotated[Array, Axes.of("layers")]


@dataclass(frozen=True, eq=False, repr=False)
class IsotropyResult(AnalysisResult):
    """Isotropy of each layer of a split.

    Attributes:
        mean_cosine: (layers,) mean cosine of all pairs of different tokens, exact.
        mean_norm: (layers,) mean Euclidean norm of a token.
        components: the numbers of principal components asked for.
        explained_variance: (layers, components) share of the variance in the first k components;
            NaN where a layer does not vary.
        top_channel: (layers,) the channel that adds most to the mean cosine.
        top_cosine: (layers,) what it adds to the mean cosine.
        outlier_channels: per layer, the channels whose mean or standard deviation lies more than
            ``outlier_sd`` standard deviations (over the channels of the layer) from the average.
        outlier_sd: that threshold.
        name: what was measured, for titles.
        layers: layer numbers (0 = embedding output).
        n_tokens: tokens that entered.
        n_available: tokens that the split holds.
        seed: of the sample of tokens.
    """

    kind = "isotropy"
    heading = "Isotropy: how tokens spread"
    caption = (
        "Isotropy by layer: mean cosine of two tokens, the part of one channel in it, variance "
        "that the first principal components explain"
    )
    reading = (
        "Mean cosine: of all pairs of different tokens, near 0 where they spread over all "
        "directions. Its part: what the top channel alone adds to the mean cosine. EV k: share of "
        "the variance that the first k principal components explain, little where they spread."
    )
    seen = "Four panels over the layers: mean cosine, variance, norm, outlier channels."

    mean_cosine: OfLayers
    mean_norm: OfLayers
    components: tuple[Count, ...]
    explained_variance: Annotated[Array, Axes.of("layers", "components")]
    top_channel: Annotated[tuple[Count, ...], Axes.of("layers")]
    top_cosine: OfLayers
    outlier_channels: Annotated[tuple[tuple[Count, ...], ...], Axes.of("layers")]
    outlier_sd: float
    name: str
    layers: Numbers
    n_tokens: Count
    n_available: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        return f"Isotropy, {self.name}, {self.n_tokens:,} of {self.n_available:,} tokens"

    def columns(self) -> list[Column]:
        """The outlier channels of a layer stand last, because there may be many."""
        return [
            Column("layer", "layer", "text"),
            Column("mean_norm", "mean norm", digits=2),
            Column("mean_cosine", "mean cosine", digits=3),
            Column("top_channel", "top channel", "text"),
            Column("top_cosine", "its part", digits=3),
            *(Column(f"explained_variance_{k}", f"EV {k}", digits=3) for k in self.components),
            Column("outliers", "outliers", "count"),
            Column("channels", f"outlier channels (> {self.outlier_sd:g} sd)", "text"),
        ]

    def shown(self) -> list[dict[str, Any]]:
        """The rows, with the number of outlier channels, and the first of them as a text."""
        found = []
        for row in self.rows():
            channels = row["outlier_channels"]
            text = " ".join(map(str, channels[:8])) + (" …" if len(channels) > 8 else "")
            found.append(row | {"outliers": len(channels), "channels": text or None})
        return found

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer, as ``--csv`` writes them; NaN becomes None."""
        values = self.to_json()
        by_layer = ("mean_norm", "mean_cosine", "top_channel", "top_cosine")
        return [
            {
                "name": self.name,
                "layer": layer,
                **{key: values[key][i] for key in by_layer},
                **{
                    f"explained_variance_{k}": share
                    for k, share in zip(
                        self.components, values["explained_variance"][i], strict=True
                    )
                },
                "outlier_channels": values["outlier_channels"][i],
            }
            for i, layer in enumerate(self.layers)
        ]

    def drawing(self, width: float = WIDE) -> Canvas:
        """Four panels over the layers."""
        cosine = {"mean cosine": self.mean_cosine, "largest part of one channel": self.top_cosine}
        by_k = zip(self.components, self.explained_variance.T, strict=True)
        variance = {f"k = {k}": share for k, share in by_k}
        norm = {"mean norm": self.mean_norm}
        lines = partial(layer_lines, layers=self.layers)
        share = partial(lines, lines=variance, label="share of the variance", top=1)
        outliers = partial(layer_channels, layers=self.layers, channels=self.outlier_channels)
        titles = [
            (partial(lines, lines=cosine, label="cosine", top=1), "Mean cosine of two tokens"),
            (share, "Variance in the first k principal components"),
            (partial(lines, lines=norm, label="Euclidean norm"), "Mean norm of a token"),
            (outliers, f"Outlier channels (mean or sd beyond {self.outlier_sd:g} sd)"),
        ]
        return panels(titles, lambda c, draw, box: draw(c, box), [], width)


def isotropy(
    x: da.Array,
    *,
    components: Sequence[int] = (1, 3, 10),
    outlier_sd: float = 6.0,
    max_tokens: int | None = 100_000,
    seed: int = 0,
    scheduler: str = "threads",
    name: str = "x",
    layers: Sequence[int] | None = None,
) -> IsotropyResult:
    """Isotropy of every layer.

    Costs 2 · tokens · layers · hidden² operations in float64; a partial result holds the
    covariances, layers · hidden² · 8 bytes.

    Args:
        x: (token, layer, hidden) float32 activations, chunked along the tokens.
        components: how many first principal components to sum the explained variance over.
        outlier_sd: threshold of the outlier channels. Kovaleva et al. (2021) take 3 for the
            parameters of the output LayerNorm; Bondarenko et al. (2021) take 6 for activations.
        max_tokens: size of the uniform sample of tokens; None takes all of them.
        seed: of that sample.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        name: what x is, for titles.
        layers: layer numbers of x; 0, 1, … by default.

    Raises:
        InputError: fewer than two tokens, or an option is out of range.
        NonFiniteError: NaN or infinity in the activations.
    """
    hidden = x.shape[-1]
    if not components or not all(1 <= k <= hidden for k in components):
        raise InputError(
            f"components are {list(components)}; give numbers from 1 to the hidden size {hidden}"
        )
    if not outlier_sd > 0:
        raise InputError(f"outlier_sd is {outlier_sd}; give a number above 0, such as 6")
    with use_scheduler(scheduler, "isotropy"):
        blocks = sampled_blocks((x,), max_tokens, seed)
        moments = compute(tree_reduce(blocks, partial(_pass, shape=x.shape[1:]), Moments.merge))
    if moments.n < 2:
        raise InputError("isotropy compares tokens; there is only one")
    check_finite(moments.m2)
    by_channel = moments.cosine_by_channel()
    top = by_channel.argmax(axis=1)
    return IsotropyResult(
        mean_cosine=by_channel.sum(axis=1),
        mean_norm=moments.sum_norm / moments.n,
        components=tuple(components),
        explained_variance=_explained_variance(moments, components),
        top_channel=tuple(top.tolist()),
        top_cosine=by_channel[np.arange(len(top)), top],
        outlier_channels=_outliers(moments, outlier_sd),
        outlier_sd=outlier_sd,
        name=name,
        layers=tuple(range(x.shape[1]) if layers is None else layers),
        n_tokens=moments.n,
        n_available=x.shape[0],
        seed=seed,
    )


def _pass(block: Block, shape: tuple[int, int]) -> Moments:
    moments = Moments.empty(*shape, covariance=True)
    moments.add(block)
    return moments


def _explained_variance(moments: Moments, components: Sequence[int]) -> Array:
    shares = []
    for covariance in moments.covariance():
        eigenvalues = np.linalg.eigvalsh(covariance)[::-1].clip(min=0)
        cumulative = np.cumsum(eigenvalues)
        total = cumulative[-1]
        shares.append(cumulative / total if total > 0 else np.full_like(cumulative, np.nan))
    return np.stack(shares)[:, np.array(components) - 1]


def _outliers(moments: Moments, outlier_sd: float) -> tuple[tuple[int, ...], ...]:
    far = np.zeros(moments.mean.shape, dtype=bool)
    for statistic in (moments.mean, np.sqrt(moments.variance())):
        centred = statistic - statistic.mean(axis=1, keepdims=True)
        far |= np.abs(centred) > outlier_sd * centred.std(axis=1, keepdims=True)
    return tuple(tuple(np.flatnonzero(layer).tolist()) for layer in far)
