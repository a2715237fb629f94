"""From the logits of output layers to the curves of all criteria."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.analysis.exiting.confidence import confidence
from bertvision.pipelines.analysis.exiting.curve import Array, exit_curve, points_of
from bertvision.pipelines.analysis.exiting.exits_result import ExitsResult
from bertvision.pipelines.analysis.exiting.outcomes import outcomes_of
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.scores import Metric, headline, headline_metric, trivial_score
from bertvision.pipelines.tasks.task import Task

WITHIN = 1.0
"""Points below the full encoder that `ExitsResult.least` allows."""
_STEPS = 4
"""Points of a curve that are kept, for each layer."""


def measure_exits(
    task: Task,
    logits: Sequence[Logits],
    layers: Sequence[int],
    criteria: Sequence[str],
    *,
    tolerance: float | None = None,
    threshold: float | None = None,
    weights: Sequence[float] | None = None,
    name: str = "x",
) -> ExitsResult:
    """Score against the mean layer at which windows leave, for each criterion.

    Args:
        task: that was learned.
        logits: of each output layer, from the lowest, of the same windows.
        layers: their layers, ascending.
        criteria: of `confidence.CRITERIA`.
        tolerance: scores that differ by less agree; None is a tenth of the standard deviation of
            what the last layer gives.
        threshold: of no answer, of spans; None where there always is one.
        weights: of their losses in training, summing to 1; None where they are not known.
        name: of what was measured, for titles.

    Raises:
        InputError: logits are not finite, or the task is scored by something that is no sum over
            items.
    """
    if not all(np.isfinite(values).all() for of in logits for values in of.arrays.values()):
        raise InputError(f"the logits of {name} hold NaN or infinity: its training has diverged")
    metrics = headline(task.score(logits[-1], None).rules)
    metric = headline_metric(task.name, metrics)
    outcomes = outcomes_of(task, logits, metric, threshold)
    windows = logits[-1].windows
    fixed = [
        outcomes.metric(outcomes.total(np.full(len(outcomes.item), place))[None])[0]
        for place in range(len(layers))
    ]
    if threshold in (None, 0.0) and not np.isclose(fixed[-1], metrics[metric], atol=1e-6):
        raise InputError(
            f"{task.name} computes its {metric} in a way of its own ({metrics[metric]:.4f}, and "
            f"{fixed[-1]:.4f} as it is followed over thresholds here)"
        )
    values = next(iter(logits[-1].arrays.values()))
    scores = values.ndim == 2 and values.shape[1] == 1
    if scores and tolerance is None:
        tolerance = 0.1 * float(values.std())
    arrays = [of.arrays for of in logits]
    budgets = np.linspace(layers[0], layers[-1], _STEPS * (layers[-1] - layers[0]) + 1)
    shown: list[tuple[Array, Array, Array]] = []
    least, least_scores = [], []
    for criterion in criteria:
        sure = confidence(criterion, arrays, windows.n_tokens, tolerance or 0.0)
        curve = exit_curve(sure, layers, outcomes)
        near = np.flatnonzero(curve.scores >= fixed[-1] - WITHIN)
        first = near[np.argmin(curve.layers[near])]
        least.append(float(curve.layers[first]))
        least_scores.append(float(curve.scores[first]))
        at = points_of(curve, budgets)
        sign = -1 if criterion == "entropy" else 1
        limits = np.where(np.isinf(curve.thresholds[at]), np.nan, sign * curve.thresholds[at])
        shown.append((limits, curve.layers[at], curve.scores[at]))
    thresholds, mean_layers, found = (_padded(list(of)) for of in zip(*shown, strict=True))
    trivial = trivial_score(metrics, metric)
    return ExitsResult(
        criteria=tuple(criteria),
        thresholds=thresholds,
        mean_layers=mean_layers,
        scores=found,
        least=np.array(least),
        least_scores=np.array(least_scores),
        layers=tuple(layers),
        fixed=np.array(fixed),
        weights=np.array(weights or [np.nan] * len(layers)),
        metric=cast(Metric, metric),
        trivial=None if trivial is None else float(trivial),
        tolerance=tolerance if scores else None,
        name=name,
        n_windows=len(outcomes.item),
        n_items=len(windows.items),
    )


def _padded(rows: Sequence[Array]) -> Array:
    """(rows, longest), NaN behind the shorter ones."""
    found = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found
