"""What `exits` gives back: score against layers for each way to decide where to leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from bertvision.pipelines.analysis.fields import Axes, Names, Numbers
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.scores import CORRELATIONS, METRICS, Metric

OfPoints = Annotated[Array, Axes.of("criteria", "points")]
OfLayers = Annotated[Array, Axes.of("layers")]
_LIMITS = {"entropy": "at most", "probability": "at least", "patience": "in a row"}
"""What a threshold is called, by the criterion."""


@dataclass(frozen=True, eq=False, repr=False)
class ExitsResult(AnalysisResult):
    """Scores where windows leave the encoder at the first output layer that is sure enough.

    Attributes:
        criteria: what is asked of an output layer: ``entropy``, ``probability``, ``patience``.
        thresholds: (criteria, points) of entropy, nats, the most, of the others the least at which
            a window leaves; NaN where none leaves early.
        mean_layers: (criteria, points) mean number of the layer at which windows leave, descending;
            NaN behind the last point of a criterion.
        scores: (criteria, points) of the task, per cent.
        least: (criteria,) fewest mean layers at any threshold with a score of at most one point
            below that of the last layer.
        least_scores: (criteria,) score there.
        layers: that have an output layer, the last of the encoder among them.
        fixed: (layers,) score where all windows leave at this layer.
        weights: (layers,) of their losses in training, sum 1; NaN where the encoder did not hear
            of them.
        metric: what the scores are.
        trivial: score of always giving the commonest answer; None where that is 0.
        tolerance: scores that differ by less agree; None where the task gives no scores.
        name: what was measured, for titles.
        n_windows: windows that entered.
        n_items: items that they are of.
    """

    kind = "exits"
    heading = "Leaving the encoder early (exits)"
    caption = "Score against the mean layer at which windows leave, by what decides it"
    reading = (
        "A window leaves at the first output layer that is sure enough, at the last in any case. "
        "In a row are the scores with so many layers in the mean over windows, or fewer, with the "
        "threshold that gives them: entropy of the classes, nats; probability of the likeliest "
        "class; patience, so many output layers in a row that said the same as the one before. "
        "Fixed: all leave at this layer. Weight: of the layer's loss in fine-tuning. Curves are "
        "exact: every threshold was tried."
    )
    seen = (
        "Score over the mean layer: a line for each criterion, one where all leave at one layer, "
        "and level lines for all layers and the commonest answer."
    )

    criteria: Names
    thresholds: OfPoints
    mean_layers: OfPoints
    scores: OfPoints
    least: Annotated[Array, Axes.of("criteria")]
    least_scores: Annotated[Array, Axes.of("criteria")]
    layers: Numbers
    fixed: OfLayers
    weights: OfLayers
    metric: Metric
    trivial: float | None
    tolerance: float | None
    name: str
    n_windows: Count
    n_items: Count

    def title(self) -> str:
        """One line that says what was measured on how much."""
        many = f"{METRICS[self.metric]} of {self.n_items:,} items"
        if self.n_windows != self.n_items:
            many += f" in {self.n_windows:,} windows"
        return f"Early exits, {self.name}, {many}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each point of each curve, then one for each layer that all leave at."""
        values = self.to_json()
        of_points = zip(
            *(values[key] for key in ("criteria", "thresholds", "mean_layers", "scores")),
            strict=True,
        )
        found = [
            {"name": self.name, "criterion": criterion, "threshold": limit, "layers": mean}
            | {"share": mean / self.layers[-1] if self.layers[-1] else None, self.metric: score}
            for criterion, *lines in of_points
            for limit, mean, score in zip(*lines, strict=True)
            if mean is not None
        ]
        return found + [
            {"name": self.name, "criterion": "fixed", "threshold": None, "layers": float(layer)}
            | {"share": layer / self.layers[-1] if self.layers[-1] else None, self.metric: score}
            | {"weight": weight}
            for layer, score, weight in zip(
                self.layers, values["fixed"], values["weights"], strict=True
            )
        ]

    def shown(self) -> list[dict[str, Any]]:
        """A row for each output layer: what so many layers in the mean are enough for."""
        values, found = self.to_json(), []
        for place, layer in enumerate(self.layers):
            row = {"layer": layer, "fixed": values["fixed"][place]}
            row["weight"] = values["weights"][place]
            for k, criterion in enumerate(self.criteria):
                fits = np.flatnonzero(self.mean_layers[k] <= layer)
                at = int(fits[0]) if len(fits) else None  # the most that is allowed
                row[criterion] = None if at is None else values["scores"][k][at]
                row[f"{criterion}_threshold"] = None if at is None else values["thresholds"][k][at]
            found.append(row)
        return found

    def columns(self) -> list[Column]:
        """Score and threshold of each criterion."""
        columns = [Column("layer", "layers", "text"), Column("fixed", "fixed")]
        for criterion in self.criteria:
            digits = 0 if criterion == "patience" else 3
            columns.append(Column(criterion, criterion))
            label = _LIMITS.get(criterion, "threshold")
            columns.append(Column(f"{criterion}_threshold", label, digits=digits))
        if np.isfinite(self.weights).any():
            columns.append(Column("weight", "weight", digits=3))
        return columns

    def remarks(self) -> list[str]:
        """How few layers would do, and what one scores who looks at nothing."""
        least = ", ".join(
            f"{value:.2f} by {criterion}"
            for criterion, value in zip(self.criteria, self.least.tolist(), strict=True)
        )
        found = [
            f"Within one point of all {self.layers[-1]} layers ({float(self.fixed[-1]):.1f}): "
            f"{least} in the mean, with a threshold that was chosen on what is scored here."
        ]
        if self.trivial is not None:
            found.append(f"The commonest answer has {self.trivial:.1f}.")
        if self.tolerance is not None:
            found.append(f"Scores that differ by less than {self.tolerance:.3g} agree.")
        return found

    def charts(self) -> dict[str, Chart]:
        """Score over the mean layer, a line for each criterion."""
        of = METRICS[self.metric]
        chart = curves(
            self.rows(),
            self.metric,
            f"{of} ({'× 100' if self.metric in CORRELATIONS else '%'})",
            by=["criterion"],
            places="layers",
            of_places="mean layer at which windows leave",
            levels={"all layers": float(self.fixed[-1]), "commonest answer": self.trivial},
        )
        return {self.metric: chart}
