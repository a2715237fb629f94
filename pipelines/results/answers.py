"""Answers of a system on a split, item by item, whether each is right, and the confusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import TypedDict

from bertvision.errors import WorkspaceError
from bertvision.pipelines.results.results import Result
from bertvision.pipelines.results.systems import read_predictions
from bertvision.pipelines.tasks.metrics import MetricName
from bertvision.pipelines.tasks.scores import headline, kind_of_metrics
from bertvision.pipelines.tasks.squad.metrics import answer_score
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.tasks.task import Task


class Confusion(TypedDict):
    """A class that is taken for another."""

    gold: str
    answer: str
    n: int
    """How often."""
    of: int
    """How many items of the class there are."""


class ConfusionMatrix(TypedDict):
    """How often each class is taken for each."""

    classes: list[str]
    counts: list[list[int]]
    """(classes, classes) items: a row for each class that is right, a column for what was said."""


_CONFUSIONS = 10  # the most frequent ones


class Answers(NamedTuple):
    """A system's answers to the items of a split, and whether each is right."""

    result: Result
    predictions: Mapping[str, Any]
    scores: dict[MetricName, list[float]]
    """By metric, per item, in per cent; the last metric is right or wrong."""

    @property
    def right(self) -> list[bool]:
        """Whether the answer is exactly a gold answer, or the class is the right one."""
        return [score == 100 for score in list(self.scores.values())[-1]]


def read_answers(result: Result, items: Sequence[Any]) -> Answers:
    """Read a system's predictions and score each.

    Raises:
        WorkspaceError: they are missing, damaged or of other data.
    """
    predictions = read_predictions(result, items)
    scores = {m: per_item(result, predictions, items, m) for m in item_metrics(result)}
    return Answers(result, predictions, scores)


def item_metrics(result: Result) -> list[MetricName]:
    """The metrics that each item has by itself, the last of which is right or wrong."""
    spans = kind_of_metrics(headline(result.rules)) == "span"
    return ["f1", "exact"] if spans else ["accuracy"]


def per_item(
    result: Result, predictions: Mapping[str, Any], items: Sequence[Any], metric: MetricName
) -> list[float]:
    """A system's score on each item in per cent, whose mean is the score it was given.

    Args:
        result: the system.
        predictions: its answers by item id.
        items: Items of the split.
        metric: ``accuracy`` of classes or of yes or no, ``f1`` or ``exact`` of answers.

    Raises:
        WorkspaceError: the mean is another than was recorded, so the data or a file changed.
    """
    if metric == "accuracy":
        scores = [100.0 * (predictions[item.id] == gold_of(item)) for item in items]
    else:
        scores = [100.0 * getattr(answer_score(str(predictions[q.id]), q), metric) for q in items]
    check_recorded(result, metric, sum(scores) / len(scores))
    return scores


def gold_of(item: Any) -> int | float | bool | str | None:
    """Gold answer of an item that is no question with answers, as predictions say it."""
    return not item.is_impossible if isinstance(item, Question) else item.label


def check_recorded(result: Result, metric: str, score: float) -> None:
    """Make sure that a score computed from predictions is the one that was recorded.

    Raises:
        WorkspaceError: it is not, so the data or a file changed.
    """
    recorded = headline(result.rules)[metric]
    if abs(score - recorded) > 1e-6:
        raise WorkspaceError(
            f"{result.folder / 'predictions.json'} scores {score:.4f} on the workspace's items, "
            f"recorded is {recorded:.4f}: one of them changed; make both again with "
            f"`{result.command}`"
        )


def answer_rows(workspace: Workspace, result: Result) -> list[dict[str, Any]]:
    """A row for each item, in the order of the data.

    Args:
        workspace: Workspace with the system's predictions.
        result: the system.

    Returns:
        ``id``, the item's texts, ``gold``, ``answer``, and by metric the item's score in per cent;
        no score of a task that predicts a number. Texts of parses have the names of relations.

    Raises:
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    data = workspace.dataset()
    items, metrics = workspace.items(result.split), headline(result.rules)
    scores: dict[MetricName, list[float]] = {}
    if ratios := data.task.ratios:
        said = read_predictions(result, items)
        parts = [data.task.parts(item, said[item.id]) for item in items]
        # of which there is nothing to tell, nothing is wrong
        scores = {
            m: [100 * p[m][0] / p[m][1] if p[m][1] else 100.0 for p in parts]
            for m in ratios
            if m in parts[0]
        }
    elif "pearson" in metrics:
        said = read_predictions(result, items)
    else:
        answers = read_answers(result, items)
        said, scores = dict(answers.predictions), answers.scores
    spans = "exact" in metrics
    return [
        {
            "id": item.id,
            **_texts(item),
            "gold": _gold(item, data.task, data.classes, spans=spans),
            "answer": data.task.answer_text(said[item.id], data.classes),
            **{metric: values[i] for metric, values in scores.items()},
        }
        for i, item in enumerate(items)
    ]


def _texts(item: Any) -> dict[str, Any]:
    if isinstance(item, Question):
        return {"question": item.question, "context": item.context}
    pair = {"pair": item.pair} if hasattr(item, "pair") else {}
    phrases = {"phrases": list(item.phrases)} if hasattr(item, "phrases") else {}
    return {"text": item.text, **pair, **phrases}


def _gold(item: Any, task: Task, classes: Sequence[str], *, spans: bool) -> Any:
    if spans:
        return list(dict.fromkeys(answer.text for answer in item.answers))
    return task.answer_text(gold_of(item), classes)


def confusions(items: Sequence[Any], answers: Answers, classes: Sequence[str]) -> list[Confusion]:
    """The classes that are mistaken, most often first: ``gold``, ``answer``, ``n``, ``of``."""
    gold = Counter(item.label for item in items)
    wrong = Counter(
        (item.label, answers.predictions[item.id])
        for item, right in zip(items, answers.right, strict=True)
        if not right
    )
    return [
        {"gold": classes[a], "answer": classes[b], "n": n, "of": gold[a]}
        for (a, b), n in sorted(wrong.items(), key=lambda pair: (-pair[1], pair[0]))[:_CONFUSIONS]
    ]


def confusion_matrix(
    items: Sequence[Any], answers: Answers, classes: Sequence[str]
) -> ConfusionMatrix:
    """How often each class is taken for each, itself included."""
    pairs = Counter((item.label, answers.predictions[item.id]) for item in items)
    numbers = range(len(classes))
    return {
        "classes": list(classes),
        "counts": [[pairs[gold, answer] for answer in numbers] for gold in numbers],
    }
