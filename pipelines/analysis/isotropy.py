"""Spread of vectors by their moments: variance, correlation, outlier channels.

What `isotropy` gives back: how tokens, and the first of each window, spread in each layer of some
snapshots.

Isotropy of the hidden states of each layer: do vectors spread over all directions, or few?

Mean cosine of two different vectors (Ethayarajh 2019), share of the variance that the first
principal components explain, isotropy by the partition function and after the correction of Mu &
Viswanath (2018), the statistics of [CLS] of Zhou et al. (2021), outlier channels, and the channel
that adds most to the mean cosine (Timkey & van Schijndel 2021).

Two passes over the blocks: moments, then projections on the directions that these give.

Geometry of the hidden states that a workspace stores, and under which name it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Unpack

import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.channel_partition import Bases, Partition, merged
from bertvision.pipelines.analysis.moments import Array, Moments
from bertvision.pipelines.analysis.reduce import (
    Blocks,
    aligned_blocks,
    check_finite,
    chosen_blocks,
    hold,
    sampled_rows,
    tree_reduce,
)
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Keeps, Labels, Numbers
from bertvision.pipelines.declare import MaxTokens, OnDask, Seed, job
from bertvision.pipelines.plotting import LAYER, Chart, Curves, Series, curves
from bertvision.pipelines.reading import Tags, parse_tags
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column, grouped
from bertvision.pipelines.scheduler import compute, map_here, use_scheduler

if TYPE_CHECKING:
    import dask.array as da

    from bertvision.featurestore.split import ActivationSplit


QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Quantiles over the channels of a layer: the least, the quartiles, the largest."""


class Spread(NamedTuple):
    """How the vectors of each layer spread; NaN where they do not vary.

    Attributes:
        explained_variance: (layers, components) share of the variance in the first k principal
            components; k / hidden of white vectors.
        mean_share: (layers,) squared length of the mean vector, as a part of the vectors' mean
            squared length.
        sd: (layers, quantiles) of the channels' standard deviations σ_j.
        gamma: (layers, quantiles) of the channels' γ_j = mean over k of ρ_jk²; 1 / hidden of white
            vectors, 1 where all channels say the same.
        mean_correlation: (layers,) mean of the absolute correlations |ρ_jk| of two channels.
        dominant: (layers,) the least part of the channels that holds half of the variance; 0.5
            where all vary alike.
    """

    explained_variance: Array
    mean_share: Array
    sd: Array
    gamma: Array
    mean_correlation: Array
    dominant: Array

    @classmethod
    def of(cls, moments: Moments, variances: Array, components: Sequence[int]) -> Spread:
        """The spread of vectors with these moments.

        The statistics are those that Zhou et al. (2021), *IsoBN: Fine-Tuning BERT with Isotropic
        Batch Normalization*, section 3, take of [CLS].

        Args:
            moments: Moments with covariances.
            variances: (layers, hidden) of the principal components, falling.
            components: numbers of principal components.
        """
        layers = zip(moments.mean, moments.covariance(), variances, strict=True)
        spreads = map_here(lambda of: _layer(*of, components), list(layers))
        return cls(*(np.array(column) for column in zip(*spreads, strict=True)))


class Rounding(NamedTuple):
    """Variance that an encoding's rounding adds to each channel.

    Attributes:
        variance: (layers, hidden) of a quantised encoding, or 0.
        relative: Root mean square error of a float encoding, as a part of the value.
    """

    variance: Array | float = 0.0
    relative: float = 0.0

    def share(self, moments: Moments) -> Array:
        """Part of the variance that is rounding, (layers,), at most 1; NaN where nothing varies.

        The larger of two: of the variance in all channels, and of that in the median channel, which
        a few channels with most of the variance would hide.

        Args:
            moments: Moments of the decoded vectors.
        """
        variance = moments.variance()
        rounding = self.variance + self.relative**2 * (variance + moments.mean**2)
        shares = []
        for of_layer, total in zip(rounding, variance, strict=True):
            varies = total > 0  # a channel that does not has nothing to hide
            if not varies.any():
                shares.append(np.nan)
                continue
            whole = of_layer.sum() / total.sum()
            shares.append(max(whole, np.median(of_layer[varies] / total[varies])))
        return np.clip(shares, None, 1.0)


def outlier_channels(moments: Moments, outlier_sd: float) -> list[list[int]]:
    """By layer the channels whose mean or standard deviation is far from that of the others.

    Args:
        moments: Moments of the vectors.
        outlier_sd: Number of standard deviations over the channels that is far.
    """
    far = np.zeros(moments.mean.shape, dtype=bool)
    for statistic in (moments.mean, np.sqrt(moments.variance())):
        centred = statistic - statistic.mean(axis=1, keepdims=True)
        far |= np.abs(centred) > outlier_sd * centred.std(axis=1, keepdims=True)
    return [np.flatnonzero(layer).tolist() for layer in far]


def _layer(
    mean: Array, covariance: Array, variances: Array, components: Sequence[int]
) -> tuple[object, ...]:
    variance = covariance.diagonal()
    total, length = variance.sum(), variance.sum() + mean @ mean
    share = mean @ mean / length if length > 0 else np.nan
    if not total > 0:
        none = np.full(len(QUANTILES), np.nan)
        return np.full(len(components), np.nan), share, none, none, np.nan, np.nan
    cumulated = np.cumsum(variances.clip(min=0))
    explained = cumulated[np.array(components) - 1] / cumulated[-1]
    sd = np.sqrt(variance)
    varies = sd > 0  # a channel that does not has no correlation
    rho = covariance[np.ix_(varies, varies)] / np.outer(sd[varies], sd[varies])
    k = len(rho)
    apart = (np.abs(rho).sum() - np.trace(rho)) / (k * (k - 1)) if k > 1 else np.nan
    largest = np.cumsum(np.sort(variance)[::-1])
    half = (np.searchsorted(largest, 0.5 * total) + 1) / len(variance)
    gamma = np.quantile((rho**2).mean(axis=1), QUANTILES)
    return explained, share, np.quantile(sd, QUANTILES), gamma, apart, half


PLACE = ("snapshots", "sets", "layers")
OfLayers = Annotated[Array, Axes.of(*PLACE)]
OfChannels = Annotated[Array, Axes.of(*PLACE, "quantiles")]
Counts = Annotated[tuple[tuple[Count, ...], ...], Axes.of("snapshots", "sets")]
ROUNDED = 0.05
"""Part of the variance that may be rounding: below it what is said of variances and correlations
differs from float32 by about as much, above it by anything."""
_SHOWN = 8
"""Outlier channels of a layer that a table names."""


@dataclass(frozen=True, eq=False, repr=False)
class IsotropyResult(AnalysisResult):
    """Isotropy of each layer of snapshots, of all tokens and of the first ones.

    Attributes:
        mean_cosine: (snapshots, sets, layers) mean cosine of all pairs of different vectors, exact.
        mean_norm: mean Euclidean norm of a vector.
        mean_share: squared length of the mean vector, as a part of the mean squared length.
        components: the numbers of principal components asked for.
        explained_variance: (snapshots, sets, layers, components) share of the variance in the first
            k components; NaN where a layer does not vary.
        log_ratio: log I of Mu & Viswanath, 0 at most; see `partition`.
        removed: components that are taken out for the next two, beside the mean.
        corrected_cosine: mean cosine after that.
        corrected_ratio: log I after that.
        quantiles: Quantiles of the next two.
        sd: (snapshots, sets, layers, quantiles) of the channels' standard deviations.
        gamma: the same of the channels' γ; see `spread`.
        mean_correlation: mean absolute correlation of two channels.
        dominant: least part of the channels that holds half of the variance.
        top_channel: the channel that adds most to the mean cosine.
        top_cosine: Its part of the mean cosine.
        outlier_channels: the channels whose mean or standard deviation lies more than
            ``outlier_sd`` standard deviations (over the channels of the layer) from the average.
        outlier_sd: Threshold of outliers.
        rounding: (snapshots, sets, layers) part of the variance that is rounding of the store's
            encoding; NaN where nothing varies.
        snapshots: names of the snapshots.
        sets: Sets of vectors: ``tokens``, ``first tokens``, which are one of each window.
        name: Name of the snapshots, for titles.
        layers: layer numbers (0 = embedding output).
        n_vectors: (snapshots, sets) vectors that entered.
        n_available: (snapshots, sets) vectors that there are.
        seed: Seed of the samples.
    """

    kind = "isotropy"
    keeps: ClassVar[Keeps] = {"int8": "values", "int4": "course"}
    heading = "Isotropy: how tokens spread"
    caption = (
        "Isotropy by layer: cosines, the share of the mean vector, variance in the first principal "
        "components, correlation of channels, outlier channels"
    )
    reading = (
        "Mean cosine: of all pairs of different vectors, near 0 where they spread over all "
        "directions. Its part: what the top channel alone adds to it. Mean's share: of the squared "
        "length, what all vectors have in common. EV k: share of the variance that the first k "
        "principal components explain. log I: least over largest partition function, 0 where no "
        "direction differs from another; corrected: without the mean and the first components. "
        "Half: share of the channels that holds half of the variance, 0.5 where all vary alike. "
        "|ρ|: mean absolute correlation of two channels; γ: mean squared one of the most entangled "
        "channel with all. Outliers: + and − are to the snapshot before. "
        "Rounding: part of the variance that is rounding of the store's encoding."
    )
    seen = (
        "Panels over the layers, tokens beside first tokens: cosine, correlation, isotropy, "
        "variance, norm, outlier channels; a line for each snapshot."
    )

    mean_cosine: OfLayers
    mean_norm: OfLayers
    mean_share: OfLayers
    components: tuple[Count, ...]
    explained_variance: Annotated[Array, Axes.of(*PLACE, "components")]
    log_ratio: OfLayers
    removed: Count
    corrected_cosine: OfLayers
    corrected_ratio: OfLayers
    quantiles: tuple[float, ...]
    sd: OfChannels
    gamma: OfChannels
    mean_correlation: OfLayers
    dominant: OfLayers
    top_channel: Annotated[tuple[tuple[tuple[Count, ...], ...], ...], Axes.of(*PLACE)]
    top_cosine: OfLayers
    outlier_channels: Annotated[
        tuple[tuple[tuple[tuple[Count, ...], ...], ...], ...], Axes.of(*PLACE)
    ]
    outlier_sd: float
    rounding: OfLayers
    snapshots: Labels
    sets: Labels
    name: str
    layers: Numbers
    n_vectors: Counts
    n_available: Counts
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        counts = [f"{n:,} {name}" for n, name in zip(self.n_vectors[0], self.sets, strict=True)]
        return f"Isotropy, {', '.join(self.snapshots)}, {self.name}, {' and '.join(counts)}"

    def moved(self, snapshot: int, of: int, layer: int) -> tuple[list[int], list[int]]:
        """Outlier channels that are new, and that are gone, since the snapshot before.

        Args:
            snapshot: its place; of the first nothing has moved.
            of: place of the set.
            layer: its place.
        """
        if snapshot == 0:
            return [], []
        now, before = (set(self.outlier_channels[k][of][layer]) for k in (snapshot, snapshot - 1))
        return sorted(now - before), sorted(before - now)

    def is_rounded(self, snapshot: int, of: int, layer: int) -> bool:
        """Whether rounding is more than `ROUNDED` of the variance of a set in a layer.

        Args:
            snapshot: Place of the snapshot.
            of: Place of the set.
            layer: Place of the layer.
        """
        return bool(self.rounding[snapshot, of, layer] > ROUNDED)

    def remarks(self) -> list[str]:
        """Layers in which the store's encoding hides how vectors vary."""
        hidden: dict[str, list[str]] = {}
        for k, j, i in self._places():
            if self.is_rounded(k, j, i):
                where = f"{self.sets[j]} of {self.snapshots[k]}"
                hidden.setdefault(where, []).append(str(self.layers[i]))
        if not hidden:
            return []
        where = "; ".join(f"{name}: {', '.join(layers)}" for name, layers in hidden.items())
        return [
            "* Rounding of the stored values is more than 5 % of the variance here, so that EV, σ, "
            "half, |ρ|, γ, outliers and what is corrected say nothing of the model (norms, cosines "
            f"and log I do). Layers of {where}. Extract with --encoding float32 into another "
            "--store to measure them.",
        ]

    def _places(self) -> Iterator[tuple[int, ...]]:
        return product(*(range(len(x)) for x in (self.snapshots, self.sets, self.layers)))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each snapshot, set and layer, as ``--csv`` writes them; NaN becomes None."""
        values = {name: getattr(self, name) for name in _OF_LAYERS}
        shares = np.moveaxis(self.explained_variance, -1, 0)
        values |= {
            f"explained_variance_{c}": x for c, x in zip(self.components, shares, strict=True)
        }
        for name in ("sd", "gamma"):
            parts = zip(self.quantiles, np.moveaxis(getattr(self, name), -1, 0), strict=True)
            values |= {f"{name}_{_NAMES.get(q, f'q{q:g}')}": part for q, part in parts}
        values |= {"is_rounded": self.rounding > ROUNDED, "outlier_channels": self.outlier_channels}
        labels = {"snapshot": self.snapshots, "set": self.sets, "layer": self.layers}
        rows = self.listed(labels, values)
        for row, place in zip(rows, self._places(), strict=True):
            row["new_outliers"], row["gone_outliers"] = self.moved(*place)
        return rows

    def shown(self) -> list[dict[str, Any]]:
        """The rows, with the number of outlier channels, and the first of them as a text."""
        rows = []
        for row in self.rows():
            channels, moved = row["outlier_channels"], row["new_outliers"]
            text = [f"+{c}" if c in moved else str(c) for c in channels[:_SHOWN]]
            text += ["…"] * (len(channels) > _SHOWN)
            text += [f"−{c}" for c in row["gone_outliers"][:_SHOWN]]
            text += ["…"] * (len(row["gone_outliers"]) > _SHOWN)
            layer = f"{row['layer']}*" if row["is_rounded"] else row["layer"]
            counted = {"outliers": len(channels), "channels": " ".join(text) or None}
            rows.append(row | counted | {"layer": layer})
        return rows

    def columns(self) -> list[Column]:
        """The outlier channels of a layer stand last, because there may be many."""
        return [
            Column("layer", "layer", "text"),
            Column("snapshot", "snapshot", "text"),
            Column("set", "of", "text"),
            *self._measures(),
        ]

    def _measures(self) -> list[Column]:
        return [
            Column("mean_norm", "mean norm", digits=2),
            Column("mean_cosine", "mean cosine", digits=3),
            Column("top_channel", "top channel", "text"),
            Column("top_cosine", "its part", digits=3),
            Column("mean_share", "mean's share", digits=3),
            *(Column(f"explained_variance_{k}", f"EV {k}", digits=3) for k in self.components),
            Column("log_ratio", "log I", digits=2),
            Column("corrected_cosine", "corrected cosine", digits=3),
            Column("corrected_ratio", "corrected log I", digits=2),
            Column("sd_median", "median σ", digits=3),
            Column("sd_largest", "largest σ", digits=3),
            Column("dominant", "half", digits=3),
            Column("mean_correlation", "|ρ|", digits=3),
            Column("gamma_largest", "largest γ", digits=3),
            Column("rounding", "rounding", digits=4),
            Column("outliers", "outliers", "count"),
            Column("channels", f"outlier channels (> {self.outlier_sd:g} sd)", "text"),
        ]

    def tables(self) -> list[tuple[str, list[Column], list[dict[str, Any]]]]:
        """A table for each snapshot and set."""
        columns = [Column("layer", "layer", "text"), *self._measures()]
        parts = grouped(self.shown(), lambda row: f"{row['snapshot']}, {row['set']}")
        return [(name, columns, rows) for name, rows in parts.items()]

    def charts(self) -> dict[str, Chart]:
        """A line for each snapshot and set."""
        rows, told = self.rows(), dict(_PLOTTED)
        told |= {
            f"explained_variance_{k}": f"share of the variance in {k} principal components"
            for k in self.components
        }
        charts: dict[str, Chart] = {
            key: curves(rows, key, label, by=["snapshot", "set"]) for key, label in told.items()
        }
        return charts | {"outlier_channels": self._outliers()}

    def drawn(self) -> list[Chart]:
        """Six panels over the layers, the variance that the most components explain among them."""
        last = max(self.components, default=None)
        variance = "mean_share" if last is None else f"explained_variance_{last}"
        keys = ["mean_cosine", "mean_correlation", "log_ratio", variance, "mean_norm"]
        charts = self.charts()
        return [charts[key] for key in [*keys, "outlier_channels"]]

    def _outliers(self) -> Curves:
        """A point for every outlier channel of a layer; one that recurs makes a horizontal row."""
        many = len(self.snapshots) * len(self.sets)
        series: dict[str, Series] = {}
        for number in range(many):
            k, j = divmod(number, len(self.sets))
            at = [
                (layer, channel)
                for layer, channels in zip(self.layers, self.outlier_channels[k][j], strict=True)
                for channel in channels
            ]
            name = f"{self.snapshots[k]}, {self.sets[j]}"
            aside = min(0.2, 0.5 / many) * (number - (many - 1) / 2)  # beside each other
            places = [layer + aside for layer, _ in at]
            tips = [f"channel {channel} in layer {layer}, {name}" for layer, channel in at]
            values = [float(channel) for _, channel in at]
            series[name] = Series(places, values, look="points", tips=tips)
        label = f"outlier channel (> {self.outlier_sd:g} sd)"
        none = "" if any(one.values for one in series.values()) else "none"
        return Curves(LAYER, label, series, title=none and f"{label}: none")


_PLOTTED = {
    "mean_cosine": "mean cosine of two vectors",
    "mean_correlation": "mean |correlation| of two channels",
    "log_ratio": "isotropy log I (0 at most)",
    "mean_share": "share of the squared length in the mean",
    "mean_norm": "mean Euclidean norm",
    "corrected_cosine": "mean cosine, corrected",
    "corrected_ratio": "isotropy log I, corrected",
}
_OF_LAYERS = (
    *("mean_norm", "mean_cosine", "top_channel", "top_cosine", "mean_share", "log_ratio"),
    *("corrected_cosine", "corrected_ratio", "dominant", "mean_correlation", "rounding"),
)
_NAMES = dict(
    zip(QUANTILES, ("least", "first_quartile", "median", "third_quartile", "largest"), strict=True)
)


Rows = NDArray[np.int64]

ROWS = 2048
"""Vectors of a block: partial results hold covariances, and are worth so many."""


class _Measured(NamedTuple):
    """Results of the passes over a set of vectors."""

    moments: Moments
    spread: Spread
    partition: Partition


def isotropy_of_arrays(
    snapshots: Mapping[str, da.Array],
    *,
    first: Mapping[str, Rows] | None = None,
    components: Sequence[int] = (1, 3, 10),
    outlier_sd: float = 6.0,
    max_tokens: int | None = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    name: str = "x",
    layers: Sequence[int] | None = None,
    rounding: Mapping[str, Sequence[Rounding]] | None = None,
) -> IsotropyResult:
    """Isotropy of every layer of snapshots, of their tokens and of the first ones.

    Costs vectors · layers · hidden² operations in float64 and 4 times as many in the type of the
    activations for each snapshot and set, and two eigenvalue problems of hidden size for each
    layer; a partial result holds the covariances, layers · hidden² · 8 bytes.

    Args:
        snapshots: by name (token, layer, hidden) float32 activations, chunked along the tokens, all
            of the same layers.
        first: Rows of the first token of each window by snapshot, which are then measured apart
            too.
        components: Number of first principal components to sum the explained variance over.
        outlier_sd: threshold of the outlier channels. Kovaleva et al. (2021) take 3 for the
            parameters of the output LayerNorm; Bondarenko et al. (2021) take 6 for activations.
        max_tokens: size of the uniform sample of each set; None takes all.
        seed: Seed of the samples.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        name: Name of their subject, for titles.
        layers: layer numbers; 0, 1, … by default.
        rounding: By snapshot what the encoding adds to the variance of tokens, and of first ones;
            by default nothing.

    Raises:
        InputError: fewer than two vectors, or an option is out of range.
        NonFiniteError: NaN or infinity in the activations.
    """
    x = next(iter(snapshots.values()))
    hidden = x.shape[-1]
    if not components or not all(1 <= k <= hidden for k in components):
        raise InputError(
            f"components are {list(components)}; give numbers from 1 to the hidden size {hidden}"
        )
    if not outlier_sd > 0:
        raise InputError(f"outlier_sd is {outlier_sd}; give a number above 0, such as 6")
    if max_tokens is not None and max_tokens < 2:
        raise InputError(f"max_tokens is {max_tokens}; give at least 2, or None for all tokens")
    measured: list[list[_Measured]] = []
    with use_scheduler(scheduler, "isotropy"):
        for snapshot, states in snapshots.items():
            rows = [np.arange(states.shape[0]), *([first[snapshot]] if first else [])]
            sets = _blocks(states, rows, max_tokens, seed)
            measured.append([_measured(blocks, states, components) for blocks in sets])

    def each(value: Any) -> Array:
        return np.array([[value(one) for one in sets] for sets in measured])

    shares = [
        [
            (rounding[tag][j] if rounding else Rounding()).share(one.moments)
            for j, one in enumerate(sets)
        ]
        for tag, sets in zip(snapshots, measured, strict=True)
    ]
    # what does not vary has nothing left when its mean is taken out, but rounding errors
    varies = np.isfinite(each(lambda one: one.spread.mean_correlation))
    by_channel = each(lambda one: one.moments.cosine_by_channel())
    top = by_channel.argmax(axis=-1)
    return IsotropyResult(
        **{name: each(attrgetter(f"spread.{name}")) for name in Spread._fields},
        mean_cosine=by_channel.sum(axis=-1),
        mean_norm=each(lambda one: one.moments.sum_norm / one.moments.n),
        components=tuple(components),
        log_ratio=each(lambda one: one.partition.log_ratio()),
        removed=hidden - measured[0][0].partition.sum_unit.shape[1],
        corrected_cosine=np.where(
            varies, each(lambda one: one.partition.corrected_cosine()), np.nan
        ),
        corrected_ratio=np.where(varies, each(lambda one: one.partition.corrected_ratio()), np.nan),
        quantiles=QUANTILES,
        top_channel=_tuples(top.tolist()),
        top_cosine=np.take_along_axis(by_channel, top[..., None], axis=-1)[..., 0],
        outlier_channels=_tuples(
            [[outlier_channels(one.moments, outlier_sd) for one in sets] for sets in measured]
        ),
        outlier_sd=outlier_sd,
        rounding=np.array(shares),
        snapshots=tuple(snapshots),
        sets=("tokens", "first tokens") if first else ("tokens",),
        name=name,
        layers=tuple(range(x.shape[1]) if layers is None else layers),
        n_vectors=tuple(tuple(one.moments.n for one in sets) for sets in measured),
        n_available=tuple(
            (states.shape[0], *([len(first[snapshot])] if first else []))
            for snapshot, states in snapshots.items()
        ),
        seed=seed,
    )


def _blocks(
    states: da.Array, rows: Sequence[Rows], max_tokens: int | None, seed: int
) -> list[Blocks]:
    """The blocks of each set: what is sampled is read once for all and held, else streamed."""
    sampled = [chosen[sampled_rows(len(chosen), max_tokens, seed)] for chosen in rows]
    whole = aligned_blocks((states,), ROWS)
    parts = [
        whole if len(chosen) == states.shape[0] else chosen_blocks((states,), [chosen], ROWS)
        for chosen in sampled
    ]
    blocks = iter(hold(*(part for part in parts if part is not whole)))
    return [part if part is whole else next(blocks) for part in parts]


def _measured(blocks: Blocks, states: da.Array, components: Sequence[int]) -> _Measured:
    leaf = partial(Moments.of, covariance=True)
    moments = compute(tree_reduce(blocks, leaf, Moments.merge))
    if moments.n < 2:
        raise InputError("isotropy compares vectors; there is only one")
    check_finite(moments.m2)
    bases = Bases.of(moments, np.result_type(states.dtype, np.float32))
    shared = delayed(bases)  # one object in the graph, not one in each task
    partition = compute(tree_reduce([(*block, shared) for block in blocks], Partition.of, merged))
    return _Measured(moments, Spread.of(moments, bases.variances, components), partition)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@job
def isotropy(
    checkpoint: Tags,
    *,
    split: str = "dev",
    max_tokens: MaxTokens = 20_000,
    seed: Seed = 0,
    **where: Unpack[OnDask],
) -> IsotropyResult:
    """Measure how hidden states spread in each layer.

    All tokens, and the first of each window alone, are measured: mean cosine, spectrum, outlier
    channels. Of a split that keeps some tokens of each example these are all there is.

    Examples:
        >>> import bertvision
        >>> spread = bertvision.isotropy("0.5e,1e", max_tokens=200)
        >>> spread.mean_cosine.shape  # (snapshots, tokens and first tokens, layers)
        (2, 2, 3)
        >>> frame = spread.to_pandas()
        >>> len(frame), list(frame.columns)[:5]
        (12, ['snapshot', 'set', 'layer', 'mean_norm', 'mean_cosine'])

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the snapshots do not hold the same layers.
    """
    request = Request(isotropy, locals())
    splits = request.splits(tuple(dict.fromkeys(parse_tags(checkpoint))), split, whole=False)
    request.same_layers()

    def measure() -> IsotropyResult:
        # where windows are one vector each, or begin anywhere, these are all there is
        pooled = all(x.record.tokens == x.record.examples for x in splits)
        alone = pooled or any(x.keep is not None for x in splits)
        lengths = {str(x.tag): x.plan.n_tokens.astype(np.int64) for x in splits}
        first = {tag: np.cumsum(n) - n for tag, n in lengths.items()}
        sets = [False] if alone else [False, True]
        return isotropy_of_arrays(
            {str(x.tag): x.dask() for x in splits},
            first=None if alone else first,
            max_tokens=max_tokens or None,
            seed=seed,
            scheduler=request.scheduler,
            name=split,
            layers=splits[0].record.layers,
            rounding={str(x.tag): [_rounding(x, first=each) for each in sets] for x in splits},
        )

    return request.answer(IsotropyResult, measure)


def _rounding(split: ActivationSplit, *, first: bool) -> Rounding:
    """Variance that the encoding of a split adds to its tokens, or to its first ones."""
    variance = split.rounding_variance(first=first)
    if variance is None:
        return Rounding(relative=split.encoding.relative_rounding)
    return Rounding(variance)
