"""95 % intervals of scores over other choices of questions, and of seeds.

As for differences (`uncertainty`): clusters of items that share a text are drawn with replacement,
and of a system that was trained with several seeds these too, each by itself. All systems see the
same draws, so that one pass over them gives the intervals of all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import BertvisionError
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.results.answers import check_recorded, gold_of
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.results.systems import read_predictions
from bertvision.pipelines.tasks.scores import headline, kind_of_metrics
from bertvision.pipelines.tasks.squad.metrics import answer_score
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.uncertainty import cluster_numbers, drawn_counts, percentiles
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
Floats = npt.NDArray[np.float64]
RESAMPLES = 2_000


class _Items(NamedTuple):
    """The items that are scored, their clusters, and scores that were computed before."""

    items: Sequence[Any]
    task: Task
    member: npt.NDArray[np.int64]
    """(items,) number of the cluster of each."""
    known: dict[tuple[int, str], tuple[float, float]]
    """Exact match and F1 of a text on a row: systems often give the same answer."""

    @classmethod
    def of(cls, items: Sequence[Any], task: Task) -> _Items:
        """Items of a task, in clusters that share a text."""
        return cls(items, task, cluster_numbers([task.group(item) for item in items]), {})


def score_intervals(
    task: Task,
    items: Sequence[Any],
    systems: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[dict[str, tuple[float, float]]]:
    """The 95 % intervals of the metrics of systems, all on the same draws (see `add_intervals`).

    Args:
        task: Task of the items.
        items: Items with what is right.
        systems: Metrics of each system, and its answers by id, as in `Scores.predictions`.
        resamples: Number of draws.
        seed: Seed of the draws.

    Returns:
        Lower and upper end by metric, in per cent, of each system.
    """
    answered = _Items.of(items, task)
    sums = {
        str(number): {
            name: _by_cluster(terms, answered.member)
            for name, terms in _terms(metrics, said, answered).items()
        }
        for number, (metrics, said) in enumerate(systems)
    }
    drawn = _drawn(sums, answered.member, resamples, seed)
    return [
        {metric: (float(low), float(high)) for metric, (low, high) in ends.items()}
        for ends in (
            {metric: percentiles(scores) for metric, scores in by_metric.items()}
            for by_metric in drawn.values()
        )
    ]


def add_intervals(
    workspace: Workspace,
    rows: Sequence[Row],
    left_out: list[str],
    *,
    split: str = "dev",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> None:
    """Set ``<metric>_low`` and ``<metric>_high`` in rows, and ``score_low`` and ``score_high``.

    The metrics are those of items, F1 and exact match or accuracy, ratios such as UAS, and the
    correlations Matthews (of two classes) and Pearson. Rows whose answers are not kept, or are of
    other data, get none.

    Args:
        workspace: Workspace with the answers and the data.
        rows: Rows of `read_rows`, whose ``file`` names their results.
        left_out: List that gets a message for each damaged file of answers.
        split: Split that was scored.
        resamples: Number of draws.
        seed: Seed of the draws.
    """
    by_file = {
        (result.folder / "metrics.json").relative_to(workspace.root).as_posix(): result
        for result in read_results(workspace, split, left_out)
    }
    if not by_file:
        return
    try:
        data = workspace.dataset()
        items = workspace.items(split)
    except (BertvisionError, OSError) as error:
        log.warning("scores stand without intervals, which the data are needed for: %s", error)
        return
    answered = _Items.of(items, data.task)
    sums: dict[str, dict[str, Floats]] = {}
    for file in dict.fromkeys(file for row in rows for file in row["file"].split("; ")):
        if (by_file[file].folder / "predictions.json").is_file():
            with leaving_out(left_out):
                sums[file] = _sums(by_file[file], answered)
    if not sums:
        return
    drawn = _drawn(sums, answered.member, resamples, seed)
    random = np.random.default_rng(seed + 1)
    for row in rows:
        files = row["file"].split("; ")
        for metric in _shared([drawn.get(file, {}) for file in files]):
            by_seed = np.stack([drawn[file][metric] for file in files], axis=1)
            if len(files) > 1:
                by_seed = np.take_along_axis(
                    by_seed, random.integers(0, len(files), by_seed.shape), axis=1
                )
            low, high = percentiles(by_seed.mean(axis=1))
            row |= {f"{metric}_low": float(low), f"{metric}_high": float(high)}
            if row.get(metric) == row["score"]:
                row |= {"score_low": float(low), "score_high": float(high)}


def _shared(drawn: Sequence[Mapping[str, Floats]]) -> list[str]:
    """The metrics that all results of a row have."""
    return [metric for metric in drawn[0] if all(metric in each for each in drawn)]


def _sums(result: Result, answered: _Items) -> dict[str, Floats]:
    """By metric, (clusters, terms) sums of what the metric is made of.

    Raises:
        WorkspaceError: the answers are damaged, or of other data.
    """
    values = _terms(headline(result.rules), read_predictions(result, answered.items), answered)
    for name, terms in values.items():
        whole = terms.sum(axis=0, keepdims=True)
        score = _OF_TERMS[terms.shape[1]](whole, np.array([len(answered.items)]))
        check_recorded(result, name, float(score[0]))
    return {name: _by_cluster(terms, answered.member) for name, terms in values.items()}


def _terms(
    metrics: Mapping[str, Any], said: Mapping[str, Any], answered: _Items
) -> dict[str, Floats]:
    """By metric, (items, terms) what the metric is made of.

    Args:
        metrics: Metrics of the system, by which its kind is told.
        said: Answers by id.
        answered: Items that were answered.
    """
    values: dict[str, Floats] = {}
    if answered.task.ratios:
        parts = [answered.task.parts(item, said[item.id]) for item in answered.items]
        ratios = [metric for metric in answered.task.ratios if metric in parts[0]]
        values = {m: np.array([part[m] for part in parts], np.float64) for m in ratios}
    elif kind_of_metrics(metrics) == "span":
        scores = [
            _span(answered, row, str(said[item.id])) for row, item in enumerate(answered.items)
        ]
        exact, f1 = 100 * np.array(scores, np.float64).T
        values = {"exact": exact[:, None], "f1": f1[:, None]}
    else:
        gold = np.array([gold_of(item) for item in answered.items], np.float64)
        answers = np.array([said[item.id] for item in answered.items], np.float64)
        if "pearson" not in metrics:
            values["accuracy"] = 100 * (answers == gold).astype(np.float64)[:, None]
        if "pearson" in metrics or ("matthews" in metrics and set(gold) <= {0, 1}):
            x, y = answers - answers.mean(), gold - gold.mean()
            name = "pearson" if "pearson" in metrics else "matthews"
            values[name] = np.stack([x, y, x * x, y * y, x * y], axis=1)
    return values


def _span(answered: _Items, row: int, text: str) -> tuple[float, float]:
    if (row, text) not in answered.known:
        score = answer_score(text, answered.items[row])
        answered.known[row, text] = score.exact, score.f1
    return answered.known[row, text]


def _by_cluster(terms: Floats, member: npt.NDArray[np.int64]) -> Floats:
    sums = np.zeros((int(member.max()) + 1, terms.shape[1]))
    np.add.at(sums, member, terms)
    return sums


def _drawn(
    sums: Mapping[str, Mapping[str, Floats]],
    member: npt.NDArray[np.int64],
    resamples: int,
    seed: int,
) -> dict[str, dict[str, Floats]]:
    """By file and metric, (resamples,) the score of the clusters that were drawn."""
    sizes = np.bincount(member).astype(np.float64)
    parts = [(file, name, terms_of) for file, by in sums.items() for name, terms_of in by.items()]
    columns = np.concatenate([*(terms_of for _, _, terms_of in parts), sizes[:, None]], axis=1)
    counts = drawn_counts(len(sizes), resamples, np.random.default_rng(seed))
    all_sums = np.concatenate([times.astype(np.float64) @ columns for times in counts])
    scores: dict[str, dict[str, Floats]] = {}
    at = 0
    for file, name, terms_of in parts:
        terms = all_sums[:, at : at + terms_of.shape[1]]
        scores.setdefault(file, {})[name] = _OF_TERMS[terms.shape[1]](terms, all_sums[:, -1])
        at += terms_of.shape[1]
    return scores


def _mean(terms: Floats, n: Floats) -> Floats:
    """(resamples,) mean of one term."""
    return np.asarray(terms[:, 0] / n)


def _ratio(terms: Floats, n: Floats) -> Floats:
    """(resamples,) 100 × what is right over how much there is of it."""
    return np.asarray(100 * terms[:, 0] / terms[:, 1])


def _correlation(terms: Floats, n: Floats) -> Floats:
    """(resamples,) 100 × correlation of x and y, from the sums of x, y, x², y² and xy."""
    x, y, xx, yy, xy = (terms / n[:, None]).T
    scale = np.sqrt((xx - x * x).clip(min=0) * (yy - y * y).clip(min=0))
    ratio = np.divide(xy - x * y, scale, out=np.zeros_like(scale), where=scale > 1e-12)
    return np.asarray(100 * ratio, np.float64)


_OF_TERMS: dict[int, Callable[[Floats, Floats], Floats]] = {1: _mean, 2: _ratio, 5: _correlation}
"""The function of sums that a metric is, by the number of its sums."""
