"""Two systems on the same questions: which is better, and is it more than noise?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.analysis.bootstrap import Difference, paired_bootstrap
from bertvision.pipelines.results import Result, read_results
from bertvision.pipelines.scoring import headline
from bertvision.pipelines.systems import find_system, read_predictions, written
from bertvision.pipelines.tasks.squad import Question
from bertvision.pipelines.tasks.squad_metrics import answer_score
from bertvision.pipelines.workspace import Workspace

Metric = Literal["f1", "exact", "accuracy"]
By = Literal["context", "question"]


def compare(
    workspace: Workspace,
    first: str,
    second: str,
    *,
    metric: Metric | None = None,
    split: str = "dev",
    by: By = "context",
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Paired bootstrap of the difference of two systems' scores, first minus second.

    Args:
        workspace: with both systems' predictions.
        first: ``NAME[:TRAINED_ON[:CHECKPOINT]]`` of `systems.find_system`.
        second: likewise.
        metric: ``f1`` (where None) or ``exact`` of answers, ``accuracy`` of yes or no.
        split: what they were scored on.
        by: what is drawn: whole contexts, whose questions are not independent, or questions.
        resamples: how often.
        seed: of the draws.

    Returns:
        The fields of `Difference` in points of per cent, what was compared, and a ``sentence``.

    Raises:
        UnknownNameError: a system was not scored, or several are meant.
        InputError: the systems are of different kinds, or have no such metric.
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    results = read_results(workspace, split)
    a, b = find_system(results, first), find_system(results, second)
    metric = _metric(a, b, metric)
    questions = workspace.questions(split)
    scores = [per_question(r, read_predictions(r, questions), questions, metric) for r in (a, b)]
    difference = paired_bootstrap(
        *scores,
        clusters=[q.context for q in questions] if by == "context" else None,
        resamples=resamples,
        seed=seed,
    )
    return {
        "first": written(a),
        "second": written(b),
        "metric": metric,
        "split": split,
        "by": by,
        "first_score": difference.first,
        "second_score": difference.second,
        **{k: v for k, v in difference._asdict().items() if k not in ("first", "second")},
        "sentence": sentence(written(a), written(b), metric, difference),
    }


def per_question(
    result: Result,
    predictions: Mapping[str, str | bool],
    questions: Sequence[Question],
    metric: Metric,
) -> list[float]:
    """A system's score on each question in per cent, whose mean is the score it was given.

    Args:
        result: the system.
        predictions: its answers by question id.
        questions: of the split.
        metric: ``accuracy`` of yes or no, ``f1`` or ``exact`` of answers.

    Raises:
        WorkspaceError: the mean is another than was recorded, so the data or a file changed.
    """
    if metric == "accuracy":
        scores = [100.0 * (predictions[q.id] is not q.is_impossible) for q in questions]
    else:
        scores = [
            100.0 * getattr(answer_score(str(predictions[q.id]), q), metric) for q in questions
        ]
    recorded, mean = headline(result.rules)[metric], sum(scores) / len(scores)
    if abs(mean - recorded) > 1e-6:
        raise WorkspaceError(
            f"{result.folder / 'predictions.json'} scores {mean:.4f} on the workspace's questions, "
            f"recorded is {recorded:.4f}: one of them changed; make both again with "
            f"`{result.command}`"
        )
    return scores


def sentence(first: str, second: str, metric: str, d: Difference) -> str:
    """What a comparison says, in words."""
    name = {"f1": "F1", "exact": "exact match"}.get(metric, metric)
    if d.difference == 0 and d.low == 0 == d.high:
        return f"{first} and {second} have the same {name} on every question."
    low, high = d.low, d.high
    if d.difference < 0:
        first, second, low, high = second, first, -d.high, -d.low
    drawn = "contexts" if d.clusters < d.questions else "questions"
    evidence = (
        f"95 % interval {low:+.2f} to {high:+.2f}, p {format_p(d.p, d.resamples, '= ')}, paired "
        f"bootstrap over {d.clusters:,} {drawn}"
    )
    points = f"{abs(d.difference):.2f} points of {name}"
    if d.p < 0.05:
        return (
            f"{first} is better than {second} by {points}, more than the choice of questions "
            f"explains ({evidence})."
        )
    return (
        f"{first} is {points} above {second}, which the choice of questions alone may give "
        f"({evidence})."
    )


def format_p(p: float, resamples: int, equals: str = "") -> str:
    """A p-value as far as so many resamples can tell it."""
    return f"{equals}{p:.2g}" if p > 1 / (resamples + 1) else f"< {1 / resamples:g}"


def _metric(a: Result, b: Result, metric: Metric | None) -> Metric:
    """The metric that both systems have question by question."""
    if metric is not None and metric not in get_args(Metric):
        raise InputError(f"--metric {metric!r}: choose one of {', '.join(get_args(Metric))}")
    allowed = [metrics_of(a), metrics_of(b)]
    if allowed[0] != allowed[1]:
        raise InputError(
            f"{written(a)} is scored by {' and '.join(allowed[0])}, {written(b)} by "
            f"{' and '.join(allowed[1])}: compare systems of one task"
        )
    if metric is None:
        return allowed[0][0]
    if metric not in allowed[0]:
        raise InputError(
            f"--metric {metric}: {written(a)} and {written(b)} are scored question by question "
            f"with {' and '.join(allowed[0])}"
        )
    return metric


def metrics_of(result: Result) -> list[Metric]:
    """F1 of yes and no is of the whole, not of a question; accuracy is of each."""
    return ["accuracy"] if "accuracy" in headline(result.rules) else ["f1", "exact"]
