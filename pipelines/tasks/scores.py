"""The scores of a system on a split: one form for BERT, for heads and for ensembles."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.tasks.registry import find_task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bertvision.models import Kind

ORACLE = "n-best, oracle threshold"
"""Rule whose threshold was chosen on the very questions that it is scored on."""


class Rule(TypedDict):
    """Scores of one decoding rule."""

    threshold: float | None
    """Threshold of no answer; None where there is none."""
    metrics: dict[str, int | float]
    """In per cent, but for counts and thresholds."""


Rules = Annotated[dict[str, Rule], Field(min_length=1)]


class Scores(NamedTuple):
    """The scores of one system on one split.

    Attributes:
        rules: Threshold and metrics by decoding rule (of spans ``n-best`` with the tuned
            threshold, ``n-best, threshold 0``, ``argmax`` and `ORACLE`; of classes ``argmax``).
        predictions: Answers by item id: those of ``n-best``, the official predictions file; whether
            the question is answerable; the index of the class; the score; a parse (see
            `trees.attachment`); or an order of sentences.
        na_scores: Lead of no answer over the best span, or over answerable, by question id; empty
            where the items are no questions.
        tuned: whether the held-out part that was given could tell a threshold.
    """

    rules: Rules
    predictions: dict[str, str] | dict[str, bool] | dict[str, int] | dict[str, float]
    na_scores: dict[str, float]
    tuned: bool = True


def class_answers(
    logits: npt.NDArray[np.floating], classes: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The class, or the score, that logits say of each item.

    Args:
        logits: (items, classes), or (items, 1) of scores.
        classes: Names of the classes; none of scores.

    Returns:
        For each item ``label`` and ``score`` as the text-classification pipeline of transformers
        gives them, the probability of the class or the score itself, and of classes
        ``probabilities`` by name.
    """
    import numpy as np

    values = np.asarray(logits, np.float64)
    if not classes:
        return [{"label": "score", "score": float(score)} for score in values[:, 0]]
    shares = np.exp(values - values.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return [
        {
            "label": classes[int(row.argmax())],
            "score": float(row.max()),
            "probabilities": dict(zip(classes, row.tolist(), strict=True)),
        }
        for row in shares
    ]


def headline(rules: Rules) -> Mapping[str, float]:
    """The metrics that stand for a system: of ``n-best`` where it is there, else of ``argmax``.

    Where there are questions with and without an answer, ``balanced``, the mean of HasAns F1 and
    NoAns, is among them; and ``best_f1``, where an oracle's threshold was looked for.

    Args:
        rules: Rules of its ``metrics.json``.
    """
    metrics: dict[str, float] = dict(rules["n-best" if "n-best" in rules else "argmax"]["metrics"])
    if "HasAns_f1" in metrics and "NoAns_f1" in metrics:
        metrics["balanced"] = (metrics["HasAns_f1"] + metrics["NoAns_f1"]) / 2
    if ORACLE in rules:
        metrics["best_f1"] = rules[ORACLE]["metrics"]["f1"]
    return metrics


def trivial_score(metrics: Mapping[str, float], key: str) -> float | None:
    """Score of always giving the commonest answer (no answer, the largest class or one arc).

    Args:
        metrics: Metrics of any system on the same items.
        key: Key of the metric.

    Returns:
        Per cent; None where the metric has nothing to tell, as correlations, which then have 0.
    """
    if key in METRICS and METRICS[key].trivial:
        return metrics.get("majority")
    if metrics.get("NoAns_total"):
        return 100 * metrics["NoAns_total"] / metrics["total"]
    return None


def first_trivial_score(systems: Iterable[Mapping[str, float]], key: str) -> float | None:
    """The `trivial_score` that the first system tells, or the next of its kind that tells one.

    Earlier versions recorded none for some tasks, so that systems differ in it.

    Args:
        systems: metrics of each, all on the same items.
        key: Key of the metric.
    """
    every = list(systems)
    alike = [m for m in every if kind_of_metrics(m) == kind_of_metrics(every[0])]
    scores = (trivial_score(metrics, key) for metrics in alike)
    return next((score for score in scores if score is not None), None)


def trivial_metrics(score: float, keys: Container[str]) -> tuple[str, dict[str, float]]:
    """A system that learned nothing, as a row among others.

    Args:
        score: its `trivial_score`.
        keys: Keys of the metrics that others have.

    Returns:
        What it is called, and its metrics.
    """
    if kind_of_metrics(keys) != "span":
        key = next((k for k, m in METRICS.items() if m.trivial and k in keys), "accuracy")
        return f"({METRICS[key].trivial})", {key: score}
    always = {"exact": score, "f1": score, "best_f1": score, "balanced": 50.0}
    never = {"HasAns_exact": 0.0, "HasAns_f1": 0.0, "NoAns_exact": 100.0}
    return "(never answering)", always | never


def is_untuned(rules: Rules, tuned_on: str | None) -> bool:
    """Whether the threshold that ``n-best`` answers with was left at 0, where others tune it.

    Such scores and tuned ones cannot be compared: the difference is of the thresholds too.

    Args:
        rules: Rules of its ``metrics.json``.
        tuned_on: the split that tuned its threshold, likewise.
    """
    return tuned_on is None and "n-best" in rules and rules["n-best"]["threshold"] is not None


def kind_of_metrics(metrics: Container[str]) -> Kind:
    """Whether metrics are of spans, which alone can match exactly, or of classes and scores.

    Args:
        metrics: Metrics by name, as in `headline` or in a row of the report; or their names.
    """
    return "span" if "exact" in metrics else "classification"


def headline_metric(task: str, metrics: Mapping[str, float]) -> str:
    """The metric that stands for a system where there is room for one number.

    That of the task; a file with labels of one's own has classes or scores, and of scores it is
    Pearson's correlation.

    Args:
        task: its name.
        metrics: Metrics of a system.
    """
    key = find_task(task).headline
    return next((name for name in (key, "accuracy") if name in metrics), "pearson")
