"""What `isotropy` gives back: how tokens and [CLS] spread in each layer of some snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from bertvision.pipelines.analysis.fields import Axes, Names, Numbers
from bertvision.pipelines.analysis.geometry.spread import QUANTILES
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.plotting import LAYER, Chart, Curves, Series, curves
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column, table_of
from bertvision.pipelines.text import fill

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
    """Isotropy of each layer of snapshots, of all tokens and of [CLS].

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
        quantiles: which of them the next two have.
        sd: (snapshots, sets, layers, quantiles) of the channels' standard deviations.
        gamma: the same of the channels' γ; see `spread`.
        mean_correlation: mean absolute correlation of two channels.
        dominant: least part of the channels that holds half of the variance.
        top_channel: the channel that adds most to the mean cosine.
        top_cosine: what it adds to the mean cosine.
        outlier_channels: the channels whose mean or standard deviation lies more than
            ``outlier_sd`` standard deviations (over the channels of the layer) from the average.
        outlier_sd: that threshold.
        rounding: (snapshots, sets, layers) part of the variance that is rounding of the store's
            encoding; NaN where nothing varies.
        snapshots: names of the snapshots.
        sets: which vectors: ``tokens``, ``[CLS]``.
        name: what they are of, for titles.
        layers: layer numbers (0 = embedding output).
        n_vectors: (snapshots, sets) vectors that entered.
        n_available: (snapshots, sets) vectors that there are.
        seed: of the samples.
    """

    kind = "isotropy"
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
        "Panels over the layers, tokens beside [CLS]: cosine, correlation, isotropy, variance, "
        "norm, outlier channels; a line for each snapshot."
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
    snapshots: Names
    sets: Names
    name: str
    layers: Numbers
    n_vectors: Counts
    n_available: Counts
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        held = [f"{n:,} {name}" for n, name in zip(self.n_vectors[0], self.sets, strict=True)]
        return f"Isotropy, {', '.join(self.snapshots)}, {self.name}, {' and '.join(held)}"

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

    def _places(self) -> Iterator[tuple[int, int, int]]:
        for k in range(len(self.snapshots)):
            for j in range(len(self.sets)):
                yield from ((k, j, i) for i in range(len(self.layers)))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each snapshot, set and layer, as ``--csv`` writes them; NaN becomes None."""
        values, found = self.to_json(), []
        plain = [name for name in _OF_LAYERS if name != "outlier_channels"]
        for k, j, i in self._places():
            row = {"snapshot": self.snapshots[k], "set": self.sets[j], "layer": self.layers[i]}
            row |= {name: values[name][k][j][i] for name in plain}
            shares = zip(self.components, values["explained_variance"][k][j][i], strict=True)
            row |= {f"explained_variance_{c}": share for c, share in shares}
            for name in ("sd", "gamma"):
                parts = zip(self.quantiles, values[name][k][j][i], strict=True)
                row |= {f"{name}_{_NAMES.get(q, f'q{q:g}')}": value for q, value in parts}
            new, gone = self.moved(k, j, i)
            row["is_rounded"] = self.is_rounded(k, j, i)
            row["outlier_channels"] = values["outlier_channels"][k][j][i]
            found.append(row | {"new_outliers": new, "gone_outliers": gone})
        return found

    def shown(self) -> list[dict[str, Any]]:
        """The rows, with the number of outlier channels, and the first of them as a text."""
        found = []
        for row in self.rows():
            channels, moved = row["outlier_channels"], row["new_outliers"]
            text = [f"+{c}" if c in moved else str(c) for c in channels[:_SHOWN]]
            text += ["…"] * (len(channels) > _SHOWN)
            text += [f"−{c}" for c in row["gone_outliers"][:_SHOWN]]
            text += ["…"] * (len(row["gone_outliers"]) > _SHOWN)
            layer = f"{row['layer']}*" if row["is_rounded"] else row["layer"]
            counted = {"outliers": len(channels), "channels": " ".join(text) or None}
            found.append(row | counted | {"layer": layer})
        return found

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

    def table(self) -> str:
        """Text for a terminal: a table for each snapshot and set, what does not fit below."""
        parts, rows = [self.title()], self.shown()
        columns = [Column("layer", "layer", "text"), *self._measures()]
        for snapshot in self.snapshots:
            for name in self.sets:
                own = [row for row in rows if (row["snapshot"], row["set"]) == (snapshot, name)]
                text = table_of(columns, own, stacked=True)
                parts.append(f"{snapshot}, {name}\n{text}")
        return "\n\n".join([*parts, *map(fill, (self.reading, *self.footnotes()))])

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
        none = "" if any(of.values for of in series.values()) else "none"
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
