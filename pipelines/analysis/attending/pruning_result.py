"""What an encoder loses without some of its attention heads, as it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from bertvision.pipelines.analysis.fields import Axes, Numbers
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.plotting import Chart, HeatMap, curves
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.scores import CORRELATIONS, METRICS, Metric


@dataclass(frozen=True, eq=False, repr=False)
class PruningResult(AnalysisResult):
    """What an encoder loses without some of its attention heads.

    Attributes:
        rise: (layers, heads) by how much the mean loss rises where this head alone is masked;
            below 0 the encoder does better without it.
        sensitivity: (layers, heads) by how much the loss of a window moves with the head's gate,
            each layer's of l2 norm 1; by it heads are ordered.
        loss: mean loss with all heads, on the same items.
        left: (steps,) share of heads that are left.
        score: (steps,) with the least important masked first, in per cent.
        random: (steps,) mean of the scores with heads masked in random orders.
        random_sd: (steps,) their standard deviation over the orders.
        metric: name of the score.
        trivial: score of the commonest answer; None where the metric has none.
        layers: numbers of the transformer layers, from 1.
        heads: numbers of the attention heads, from 1.
        name: what was measured, for titles.
        n_ranked: items by which heads were ordered.
        n_scored: other items, of which the curve is.
        seed: of the choice of items, and of the random orders.
    """

    kind = "prune"
    heading = "Which attention heads the encoder needs"
    caption = (
        "Score with ever fewer attention heads: the least important masked first, and at random"
    )
    reading = (
        "Attention heads are ordered by how much the loss moves with their gate, on some items; "
        "scores are of other items, by one rule, without a tuned threshold."
    )
    seen = (
        "A map of how much the loss rises without each head, and the score over the share of "
        "heads that are left, the least important masked first, beside random orders."
    )

    rise: Annotated[Array, Axes.of("layers", "heads")]
    sensitivity: Annotated[Array, Axes.of("layers", "heads")]
    loss: float
    left: Annotated[Array, Axes.of("steps")]
    score: Annotated[Array, Axes.of("steps")]
    random: Annotated[Array, Axes.of("steps")]
    random_sd: Annotated[Array, Axes.of("steps")]
    metric: Metric
    trivial: float | None
    layers: Numbers
    heads: Numbers
    name: str
    n_ranked: Count
    n_scored: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        many = f"ordered on {self.n_ranked:,} items, scored on {self.n_scored:,} others"
        return f"Pruning of attention heads, {self.name}, {many}"

    def columns(self) -> list[Column]:
        """Columns for a point of the curve."""
        of = METRICS[self.metric]
        return [
            Column("percent", "heads left (%)", digits=0),
            Column(self.metric, of),
            Column("random", f"{of}, random order", sd=True),
        ]

    def shown(self) -> list[dict[str, Any]]:
        """The points of the curve."""
        return [row | {"percent": 100 * row["left"]} for row in self._curve()]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head, then a row for each point of the curve."""
        of_heads = [
            {
                "name": self.name,
                "layer": layer,
                "head": head,
                "rise": float(self.rise[i, j]),
                "sensitivity": float(self.sensitivity[i, j]),
            }
            for i, layer in enumerate(self.layers)
            for j, head in enumerate(self.heads)
        ]
        return of_heads + self._curve()

    def _curve(self) -> list[dict[str, Any]]:
        return [
            {
                "name": self.name,
                "left": float(left),
                self.metric: float(score),
                "random": float(random),
                "random_sd": float(sd),
            }
            for left, score, random, sd in zip(
                self.left, self.score, self.random, self.random_sd, strict=True
            )
        ]

    def remarks(self) -> list[str]:
        """The heads that matter most, and how many do not."""
        order = np.argsort(-self.rise, axis=None)[:5]
        most = ", ".join(
            f"{self.layers[i]}.{self.heads[j]} (+{self.rise[i, j]:.3f})"
            for i, j in zip(*np.unravel_index(order, self.rise.shape), strict=True)
        )
        harmless = int((self.rise <= 0).sum())
        found = [
            f"Without one head the loss, {self.loss:.3f} with all, rises most at (layer.head) "
            f"{most}; it does not rise at {harmless} of {self.rise.size} heads."
        ]
        if self.trivial is not None:
            found.append(f"The commonest answer has {self.trivial:.1f}.")
        return found

    def charts(self) -> dict[str, Chart]:
        """The score over the heads that are left, and what the loss rises without each head."""
        of = METRICS[self.metric]
        rows = [
            {"left": 100 * row["left"], "order": name, "score": row[key], "score_sd": row.get(sd)}
            for name, key, sd in (
                ("least important first", self.metric, ""),
                ("random order", "random", "random_sd"),
            )
            for row in self._curve()
        ]
        return {
            "score": curves(
                rows,
                "score",
                f"{of} ({'× 100' if self.metric in CORRELATIONS else '%'})",
                by=["order"],
                places="left",
                of_places="attention heads left (%)",
                levels={"commonest answer": self.trivial},
                over="orders",
            ),
            "rise": HeatMap(
                "layer",
                self.layers,
                "attention head",
                self.heads,
                "rise of the loss without the head",
                self.rise,
                signed=True,
            ),
        }

    def drawn(self) -> list[Chart]:
        """A heat map of layer × head, then the curve."""
        charts = self.charts()
        return [charts["rise"], charts["score"]]
