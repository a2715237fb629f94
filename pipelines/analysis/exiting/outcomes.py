"""What each output layer says of each window, as counts that add up to the score of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.exiting.curve import Array, Outcomes
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.squad.decoding import decode
from bertvision.pipelines.tasks.squad.metrics import answer_score
from bertvision.pipelines.tasks.squad.spans import AnswerableTask, SpanTask
from bertvision.pipelines.tasks.task import Task

Labels = npt.NDArray[np.int64]


def outcomes_of(
    task: Task, logits: Sequence[Logits], metric: str, threshold: float | None
) -> Outcomes:
    """What is counted of each window at each output layer.

    Args:
        task: that was learned.
        logits: of each output layer, of the same windows.
        metric: of the task: ``accuracy``, ``f1``, ``matthews``, ``pearson``.
        threshold: of no answer, of spans; None where there always is one.

    Raises:
        InputError: the task is scored by something that is no sum over items.
    """
    windows = logits[0].windows
    if isinstance(task, SpanTask) and metric == "f1":
        return _spans(windows, logits, threshold)
    arrays = np.stack([np.asarray(of.arrays["logits"], np.float64) for of in logits], axis=1)
    item = windows.item_index.astype(np.int64)
    if isinstance(task, AnswerableTask) and metric == "accuracy":
        gold = np.array([not windows.items[i].is_impossible for i in item], np.int64)
        gain = arrays[..., 1] - arrays[..., 0]
        right = (gain > 0) == gold[:, None]
        return Outcomes(item, gain, right[..., None].astype(np.float64), _share(len(windows.items)))
    if isinstance(task, SentenceTask):
        labels: list[Any] = [windows.items[i].label for i in item]
        if metric == "pearson" and arrays.shape[-1] == 1:
            return _scores(item, arrays[..., 0], np.array(labels, np.float64))
        if metric in ("accuracy", "f1", "matthews") and arrays.shape[-1] > 1:
            gold = np.array(labels, np.int64)
            return _classes(item, arrays, gold, metric, task.positive)
    raise InputError(
        f"{task.name} is scored by {metric}, which is not followed over thresholds here; there are "
        "accuracy, F1 and Matthews of classes, Pearson of scores, and F1 of spans"
    )


def _share(items: int) -> Callable[[Array], Array]:
    """The first count, as a part of all items."""
    return lambda sums: 100 * sums[:, 0] / items


def _classes(
    item: Labels, logits: Array, gold: Labels, metric: str, positive: int | None
) -> Outcomes:
    said, rank = logits.argmax(-1), np.zeros(logits.shape[:2])
    right = said == gold[:, None]
    if metric == "accuracy":
        return Outcomes(item, rank, right[..., None].astype(np.float64), _share(len(gold)))
    if metric == "f1":
        of = said == positive
        counts = np.stack([right & of, of], -1).astype(np.float64)
        true = int((gold == positive).sum())
        return Outcomes(
            item, rank, counts, lambda sums: _ratio(200 * sums[:, 0], sums[:, 1] + true)
        )
    classes = max(logits.shape[-1], int(gold.max()) + 1)
    one_hot = np.eye(classes)[said]
    counts = np.concatenate([right[..., None].astype(np.float64), one_hot], -1)
    true_of = np.bincount(gold, minlength=classes).astype(np.float64)

    def matthews(sums: Array) -> Array:  # see `sentences.metrics.matthews`
        total, named = float(len(gold)), sums[:, 1:]
        covariance = sums[:, 0] * total - named @ true_of
        variances = (total**2 - (named**2).sum(1)) * (total**2 - true_of @ true_of)
        return _ratio(100 * covariance, np.sqrt(variances))

    return Outcomes(item, rank, counts, matthews)


def _scores(item: Labels, predicted: Array, gold: Array) -> Outcomes:
    """Moments, of predictions that are centred and scaled, which correlations do not tell."""
    middle, spread = predicted[:, -1].mean(), np.abs(predicted).max() or 1.0
    x, y = (predicted - middle) / spread, gold - gold.mean()
    counts = np.stack([x, x**2, x * y[:, None]], -1)
    total, of_gold = len(gold), float(y @ y)

    def pearson(sums: Array) -> Array:
        varied = np.maximum(sums[:, 1] - sums[:, 0] ** 2 / total, 0) * of_gold
        varied[varied < 1e-24 * total * of_gold] = 0.0
        return np.clip(_ratio(100 * sums[:, 2], np.sqrt(varied)), -100, 100)

    return Outcomes(item, np.zeros(predicted.shape), counts, pearson)


def _ratio(above: Array, below: Array) -> Array:
    """0 where it is not defined, as in `sentences.metrics`."""
    found: Array = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return found


def _spans(windows: WindowIndex, logits: Sequence[Logits], threshold: float | None) -> Outcomes:
    """The best span of each window, decoded as if the window were a question of its own."""
    questions = [windows.items[i] for i in windows.item_index]
    alone = WindowIndex(
        [replace(question, id=str(row)) for row, question in enumerate(questions)],
        windows.n_tokens,
        np.arange(len(questions), dtype=np.int32),
        windows.offset_mapping,
    )
    shape = (len(questions), len(logits))
    rank, null, counts = np.empty(shape), np.empty(shape), np.empty((*shape, 1))
    for place, of in enumerate(logits):
        for row, found in enumerate(decode(Logits(of.arrays, alone)).values()):
            rank[row, place], null[row, place] = found.score, found.null_score
            counts[row, place] = answer_score(found.text, questions[row]).f1
    items = windows.item_index.astype(np.int64)
    silent = np.array([[answer_score("", question).f1] for question in questions])
    share = _share(len(windows.items))
    if threshold is None:
        return Outcomes(items, rank, counts, share)
    return Outcomes(items, rank, counts, share, null, silent, threshold)
