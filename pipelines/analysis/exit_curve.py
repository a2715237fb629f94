"""Score against layers for every threshold there is, in one pass over what is stored.

As the threshold falls, a window leaves ever earlier: from the last output layer to where it was
surest, from there to the best of those before it, and so on. Each of these steps happens at one
confidence. All steps of all windows are sorted once, and what they change is summed.

How sure output layers are of what they say: what decides where a window leaves.

Entropy: Xin et al. (2020, arXiv:2004.12993, section 3.2), *DeeBERT*. Probability of the likeliest
class: Schwartz et al. (2020, arXiv:2004.07453), *The Right Tool for the Job*. Patience: Zhou et al.
(2020, arXiv:2006.04152, section 3.2), *BERT Loses Patience* (PABEE).

What each output layer says of each window, as counts that add up to the score of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, did_you_mean
from bertvision.pipelines.results.ensemble import log_partition
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.squad.decoding import decode
from bertvision.pipelines.tasks.squad.metrics import answer_score
from bertvision.pipelines.tasks.squad.spans import AnswerableTask, SpanTask
from bertvision.pipelines.tasks.task import Task

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Contribution of each output layer's answer to each window to the score of its item.

    Of an item with several windows the one of highest rank answers, with what its own output layer
    said. Where the null rank, the lowest of its windows', is above that by more than the threshold,
    the item is not answered.
    """

    item: Rows
    """(windows,) the item of each."""
    rank: Array
    """(windows, output layers)"""
    counts: Array
    """(windows, output layers, counts) what is summed over items, where this answers."""
    metric: Callable[[Array], Array]
    """(points, counts) sums → (points,) scores in per cent."""
    null: Array | None = None
    """(windows, output layers) rank of no answer; None where there always is one."""
    unanswered: Array | None = None
    """(windows, counts) what is summed where the window's item is not answered."""
    threshold: float = 0.0

    @cached_property
    def alone(self) -> Array:
        """(windows, output layers, counts) of an item that has this window alone."""
        if self.null is None or self.unanswered is None:
            return self.counts
        silent = self.null - self.rank > self.threshold
        return np.where(silent[..., None], self.unanswered[:, None], self.counts)

    @cached_property
    def shared(self) -> dict[int, Rows]:
        """By item the windows of those that have several."""
        order = np.argsort(self.item, kind="stable")
        items, first, many = np.unique(self.item[order], return_index=True, return_counts=True)
        starts = zip(items[many > 1], first[many > 1], many[many > 1], strict=True)
        return {int(i): order[a : a + n] for i, a, n in starts}

    def of_item(self, windows: Rows, exits: Rows) -> Array:
        """(counts,) of an item whose windows leave at these output layers."""
        ranks = self.rank[windows, exits]
        best = int(np.argmax(ranks))
        nothing = -np.inf if self.null is None else self.null[windows, exits].min()
        if self.unanswered is not None and nothing - ranks[best] > self.threshold:
            return np.asarray(self.unanswered[windows[best]])
        return np.asarray(self.counts[windows[best], exits[best]])

    def total(self, exits: Rows) -> Array:
        """(counts,) of all items, where windows leave at these output layers, (windows,)."""
        single = np.ones(len(exits), bool)
        total = np.zeros(self.counts.shape[-1])
        for windows in self.shared.values():
            single[windows] = False
            total += self.of_item(windows, exits[windows])
        rows = np.flatnonzero(single)
        return np.asarray(total + self.alone[rows, exits[rows]].sum(axis=0))


class Curve(NamedTuple):
    """Every threshold at which something changes, from the one at which nothing leaves early."""

    thresholds: Array
    """(points,) descending; ∞ first. A window leaves at the first output layer that is as sure."""
    layers: Array
    """(points,) mean number of the layer at which a window leaves."""
    scores: Array
    """(points,)"""


def exit_curve(confidence: Array, layers: Sequence[int], outcomes: Outcomes) -> Curve:
    """The score at every threshold, exactly, by one sort: O(windows · layers · log).

    Args:
        confidence: (windows, output layers − 1) how sure each but the last is.
        layers: number of the layer of each output layer, ascending.
        outcomes: Outcomes of each output layer.
    """
    at, last = np.asarray(layers, np.float64), len(layers) - 1
    best = np.maximum.accumulate(confidence, axis=1)
    surer = np.ones(confidence.shape, bool)  # than all before: only there may a window leave
    surer[:, 1:] = confidence[:, 1:] > best[:, :-1]
    origin, following = np.empty(confidence.shape, np.int64), np.full(len(confidence), last)
    for place in reversed(range(last)):
        origin[:, place] = following
        following = np.where(surer[:, place], place, following)
    windows, to = np.nonzero(surer)
    order = np.argsort(-confidence[windows, to], kind="stable")
    windows, to = windows[order], to[order]
    values, come = confidence[windows, to], origin[windows, to]
    changes = outcomes.alone[windows, to] - outcomes.alone[windows, come]
    _correct_shared(changes, windows, to, outcomes, last)
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], True))
    begun = outcomes.total(np.full(len(confidence), last))
    sums = begun + np.concatenate([np.zeros((1, len(begun))), np.cumsum(changes, 0)[ends]])
    sums[-1] = outcomes.total(np.zeros(len(confidence), np.int64))  # without what sums round
    moved = np.concatenate([[0.0], np.cumsum(at[to] - at[come])[ends]])
    return Curve(
        np.append(np.inf, values[ends]),
        at[last] + moved / len(confidence),
        outcomes.metric(sums),
    )


def _correct_shared(
    changes: Array, windows: Rows, to: npt.NDArray[np.integer], outcomes: Outcomes, last: int
) -> None:
    """Put in what a step changes of an item with several windows."""
    where = {int(w): item for item, of in outcomes.shared.items() for w in of}
    exits = np.full(len(outcomes.item), last)
    now = {item: outcomes.of_item(of, exits[of]) for item, of in outcomes.shared.items()}
    for step in np.flatnonzero(np.isin(windows, np.array([*where], np.int64))):
        item = where[int(windows[step])]
        exits[windows[step]] = to[step]
        of = outcomes.shared[item]
        correct = outcomes.of_item(of, exits[of])
        changes[step] = correct - now[item]
        now[item] = correct


def points_of(curve: Curve, budgets: Array) -> Rows:
    """Places of a curve that are shown: for each budget the most layers that it allows.

    Args:
        curve: any.
        budgets: mean layers.

    Returns:
        Ascending, each once, the first and the last among them.
    """
    places = np.searchsorted(-curve.layers, -budgets)  # the first that needs no more
    places = places[places < len(curve.layers)]
    return np.unique(np.concatenate([[0], places, [len(curve.layers) - 1]]))


Scores = npt.NDArray[np.float64]
LayerLogits = Sequence[Mapping[str, npt.NDArray[np.floating]]]
"""By output layer, from the lowest, the arrays of `tasks.logits.Logits`."""

CRITERIA = ("entropy", "probability", "patience")
"""In the order in which they are shown."""


def fitting_criteria(asked: Sequence[str] | None, *, scores: bool) -> tuple[str, ...]:
    """The criteria that can be told, of those that were asked for.

    Args:
        asked: names; None is all that fit.
        scores: Whether the task is regression.

    Raises:
        InputError: there is none of a name, or it does not fit scores.
    """
    fit = CRITERIA[-1:] if scores else CRITERIA
    for name in asked or ():
        if name not in CRITERIA:
            raise InputError(
                f"--criterion {name}: there is none; {did_you_mean(name, CRITERIA)}choose of "
                f"{', '.join(CRITERIA)}"
            )
        if name not in fit:
            raise InputError(
                f"--criterion {name}: the task gives scores, which have no {name}; take patience, "
                "which asks whether scores change less than --tolerance"
            )
    return tuple(name for name in fit if asked is None or name in asked)


def confidence(
    criterion: str, logits: LayerLogits, n_tokens: npt.NDArray[np.integer], tolerance: float = 0.0
) -> Scores:
    """How sure each output layer but the last is of each window.

    Args:
        criterion: Criterion of `CRITERIA`.
        logits: finite; those of the last layer are not looked at.
        n_tokens: (windows,) where the logits are of tokens.
        tolerance: scores that differ by less agree.

    Returns:
        (windows, output layers − 1), higher where surer: minus the entropy in nats, of spans the
        mean of that of start and end; the probability of the likeliest class, of spans of the
        likeliest start times that of the likeliest end; or how many output layers in a row, up to
        this one, said the same as the one before.
    """
    scores = [_patience(logits, n_tokens, tolerance)] if criterion == "patience" else []
    for arrays in logits[:-1] if not scores else ():
        logs = [_log_probabilities(values, n_tokens) for values in arrays.values()]
        if criterion == "entropy":
            scores.append(np.mean([_sums(np.exp(x) * x, n) for x, n in logs], axis=0))
        else:
            scores.append(np.exp(np.sum([_highest(x, n) for x, n in logs], axis=0)))
    return scores[0] if criterion == "patience" else np.stack(scores, axis=1)


def _log_probabilities(
    values: npt.NDArray[np.floating], n_tokens: npt.NDArray[np.integer]
) -> tuple[Scores, npt.NDArray[np.integer]]:
    """Log-probabilities one after another, and how many belong to each window."""
    lengths = n_tokens if values.ndim == 1 else np.full(len(values), values.shape[1])
    flat = values.astype(np.float64).ravel()
    return flat - np.repeat(log_partition(flat[None], lengths)[0], lengths), lengths


def _first(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def _sums(values: Scores, lengths: npt.NDArray[np.integer]) -> Scores:
    sums: Scores = np.add.reduceat(values, _first(lengths))
    return sums


def _highest(values: Scores, lengths: npt.NDArray[np.integer]) -> Scores:
    highest: Scores = np.maximum.reduceat(values, _first(lengths))
    return highest


def _patience(logits: LayerLogits, n_tokens: npt.NDArray[np.integer], tolerance: float) -> Scores:
    """(windows, output layers − 1) PABEE's counter; 0 at the first."""
    said = [
        np.stack([_said(values, n_tokens) for values in arrays.values()]) for arrays in logits[:-1]
    ]
    scores = next(iter(logits[0].values())).shape[1:] == (1,)
    counters = [np.zeros(said[0].shape[1])]
    for before, now in zip(said, said[1:], strict=False):
        same = np.abs(now - before) < tolerance if scores else now == before
        counters.append(np.where(same.all(axis=0), counters[-1] + 1, 0.0))
    return np.stack(counters, axis=1)


def _said(values: npt.NDArray[np.floating], n_tokens: npt.NDArray[np.integer]) -> Scores:
    """(windows,) the likeliest class or token, or the score."""
    if values.ndim == 2:
        return values[:, 0].astype(np.float64) if values.shape[1] == 1 else values.argmax(1) * 1.0
    first = _first(n_tokens)
    windows = [values[a : a + n].argmax() for a, n in zip(first, n_tokens, strict=True)]
    return np.array(windows, np.float64)


Labels = npt.NDArray[np.int64]


def outcomes_of(
    task: Task, logits: Sequence[Logits], metric: str, threshold: float | None
) -> Outcomes:
    """Counts of each window at each output layer.

    Args:
        task: Task that was learned.
        logits: Logits of each output layer, of the same windows.
        metric: Metric of the task: ``accuracy``, ``f1``, ``matthews``, ``pearson``.
        threshold: Threshold of no answer, of spans; None where there always is one.

    Raises:
        InputError: the task is scored by something that is no sum over items.
    """
    windows = logits[0].windows
    if isinstance(task, SpanTask) and metric == "f1":
        return _spans(windows, logits, threshold)
    arrays = np.stack([np.asarray(one.arrays["logits"], np.float64) for one in logits], axis=1)
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
        is_positive = said == positive
        counts = np.stack([right & is_positive, is_positive], -1).astype(np.float64)
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
    ratio: Array = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return ratio


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
    for place, exit_logits in enumerate(logits):
        for row, span in enumerate(decode(Logits(exit_logits.arrays, alone)).values()):
            rank[row, place], null[row, place] = span.score, span.null_score
            counts[row, place] = answer_score(span.text, questions[row]).f1
    items = windows.item_index.astype(np.int64)
    silent = np.array([[answer_score("", question).f1] for question in questions])
    share = _share(len(windows.items))
    if threshold is None:
        return Outcomes(items, rank, counts, share)
    return Outcomes(items, rank, counts, share, null, silent, threshold)
