"""Two systems on the same questions: which is better, and is it more than noise?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, UnknownNameError
from bertvision.pipelines.results.answers import check_recorded, item_metrics, per_item
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.systems import (
    find_system,
    label,
    read_predictions,
    seedless,
)
from bertvision.pipelines.tasks.metrics import COMPARABLE, METRICS, MetricName
from bertvision.pipelines.tasks.scores import (
    first_trivial_score,
    headline,
    headline_metric,
)
from bertvision.pipelines.tasks.sentences import metrics as class_metrics
from bertvision.pipelines.uncertainty import (
    By,
    Difference,
    Seeds,
    format_p,
    paired_bootstrap,
    paired_bootstrap_of,
    paired_runs,
)
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.tasks.task import Task

_Whole = Callable[[npt.NDArray[Any], npt.NDArray[Any]], float]


def compare(
    workspace: Workspace,
    first: str,
    second: str,
    *,
    metric: MetricName | None = None,
    split: str = "dev",
    by: By = "context",
    resamples: int = 10_000,
    seed: int = 0,
    seeds: Seeds = "one",
    beside: Workspace | None = None,
) -> dict[str, Any]:
    """Paired bootstrap of the difference of two systems' scores, first minus second.

    Args:
        workspace: Workspace with both systems' predictions, or those of the first.
        first: ``NAME[:TRAINED_ON[:CHECKPOINT]]`` of `systems.find_system`.
        second: likewise.
        metric: one that both systems have; None is the task's own.
        split: Split that they were scored on.
        by: Unit that is drawn: all items of one text, which are not independent, or single items.
        resamples: Number of resamples.
        seed: Seed of the draws.
        seeds: ``all`` takes every seed that the systems were trained with, and draws these too.
        beside: the workspace of the second system, which was scored on the same items there.

    Returns:
        The fields of `Difference` in points of per cent, what was compared, and a ``sentence``.

    Raises:
        UnknownNameError: a system was not scored, or several are meant.
        InputError: the systems are of different kinds, or have no such metric; or the threshold of
            one of them alone was tuned; or the workspaces have other items.
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    spaces = workspace, beside or workspace
    results = [read_results(space, split) for space in spaces]
    a, b = (
        find_system(r, name, split=split) for r, name in zip(results, (first, second), strict=True)
    )
    names = [label(a), label(b)]
    if beside is not None:
        names = [f"{name} of {space.root.name}" for name, space in zip(names, spaces, strict=True)]
    sides = [[a], [b]]
    if seeds == "all":
        sides = [_trainings(r, system) for r, system in zip(results, (a, b), strict=True)]
        if len(sides[0]) == len(sides[1]) == 1:
            raise InputError(
                f"--seeds all: {names[0]} and {names[1]} were scored with one seed each; "
                "`bertvision sweep HEAD --seeds 3` trains and scores more"
            )
    for system in (*sides[0], *sides[1]):
        _check_thresholds(a, system)
    data = workspace.dataset()
    metric = _metric(a, b, metric, data.task.name)
    items = workspace.items(split)
    if beside is not None:
        _check_items(beside, data.task.name, split, items, "--with ")
    clusters = [data.task.group(item) for item in items] if by == "context" else None
    whole = _whole(metric, a, data.task)
    said = [[(r, read_predictions(r, items)) for r in side] for side in sides]
    if whole is None:
        scores = [[per_item(r, answers, items, metric) for r, answers in side] for side in said]
        x, y = (np.array(side if len(side) > 1 else side[0]) for side in scores)
        difference = paired_bootstrap(x, y, clusters=clusters, resamples=resamples, seed=seed)
    else:
        ratio = metric in data.task.ratios
        values = [
            [_values(x, items, data.task, metric if ratio else None) for _, x in side]
            for side in said
        ]
        gold = values[0][0][1]
        for (result, _), (other, _) in zip(chain(*said), chain(*values), strict=True):
            check_recorded(result, metric, whole(other, gold))
        x, y = (np.array([other for other, _ in side]) for side in values)
        difference = paired_bootstrap_of(
            whole, x, y, gold, clusters=clusters, resamples=resamples, seed=seed
        )
    return {
        **_numbers(a, names, metric, difference, [a, *chain(*results)]),
        "split": split,
        "by": by,
        "words": list(data.task.words),
        "sentence": sentence(names[0], names[1], metric, difference, data.task.words),
    }


def compare_runs(
    runs: Sequence[Workspace],
    first: str,
    second: str,
    *,
    metric: MetricName | None = None,
    split: str = "dev",
    by: By = "context",
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """The difference of two systems that several fine-tunings have, over these and questions.

    Args:
        runs: Workspaces that differ in their seed alone, each with both systems' predictions.
        first: As of `compare`, likewise all that follow.
        second: likewise.
        metric: one that is a mean over items.
        split: Split that they were scored on.
        by: Unit that is drawn.
        resamples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        As of `compare`; ``seeds`` is the number of fine-tunings, on both sides.

    Raises:
        UnknownNameError: a system was not scored in one of the runs, or several are meant.
        InputError: as of `compare`, there is one run alone, or the metric is no mean over items.
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    data = runs[0].dataset()
    items = runs[0].items(split)
    for other in runs[1:]:
        _check_items(other, data.task.name, split, items)
    results = [read_results(run, split) for run in runs]
    pairs = []
    for run, scored in zip(runs, results, strict=True):
        try:
            pairs.append([find_system(scored, name, split=split) for name in (first, second)])
        except UnknownNameError as error:
            raise UnknownNameError(f"{run.root}: {error}") from None
    a, b = pairs[0]
    for system in chain(*pairs):
        _check_thresholds(a, system)
    metric = _metric(a, b, metric, data.task.name)
    if _whole(metric, a, data.task) is not None:
        raise InputError(
            f"{METRICS[metric].name} is no mean over {data.task.words[1]}, and cannot be compared "
            "over runs and these: name another --metric, or `bertvision spread` compares over runs"
        )
    scores = np.array(
        [[per_item(r, read_predictions(r, items), items, metric) for r in pair] for pair in pairs]
    )  # (runs, systems, items)
    clusters = [data.task.group(item) for item in items] if by == "context" else None
    difference = paired_runs(
        scores[:, 0], scores[:, 1], clusters=clusters, resamples=resamples, seed=seed
    )
    names = label(a), label(b)
    return {
        **_numbers(a, names, metric, difference, [*chain(*results)]),
        "split": split,
        "by": by,
        "words": list(data.task.words),
        "sentence": sentence(*names, metric, difference, data.task.words, runs=True),
    }


def _numbers(
    system: Result,
    names: Sequence[str],
    metric: MetricName,
    d: Difference,
    results: Sequence[Result],
) -> dict[str, Any]:
    """A comparison's names and numbers, as they are recorded.

    Args:
        system: The first system.
        names: Names of both.
        metric: Metric of the scores.
        d: Difference of the two.
        results: Results whose baseline is told.
    """
    scores = {**d._asdict(), "first_score": d.first, "second_score": d.second}
    return {
        **scores,
        "first": names[0],
        "second": names[1],
        "seeds": [*d.seeds],
        "metric": metric,
        "baseline": first_trivial_score((headline(r.rules) for r in results), metric),
        **system.tuning,
    }


def _check_items(
    other: Workspace, task: str, split: str, items: Sequence[Any], option: str = ""
) -> None:
    """Refuse a workspace whose systems were scored on other items."""
    data = other.dataset()
    if data.task.name != task or list(other.items(split)) != list(items):
        raise InputError(
            f"{option}{other.root}: its {split} has other items: only systems that were scored on "
            "the same ones can be compared; name a workspace of the same task and data"
        )


def _trainings(results: Sequence[Result], system: Result) -> list[Result]:
    """A system with every seed that it was trained and scored with."""

    def same(result: Result) -> tuple[Any, ...]:
        place = result.fraction, result.trained_on, result.checkpoint
        return result.system, seedless(result), *place

    return [result for result in results if same(result) == same(system)]


def _check_thresholds(a: Result, b: Result) -> None:
    """Refuse scores that differ by how their thresholds were chosen, not by the systems alone."""
    if a.untuned != b.untuned:
        tuned, other = (b, a) if a.untuned else (a, b)
        raise InputError(
            f"the no-answer threshold of {label(tuned)} was tuned on {tuned.threshold_tuned_on}, "
            f"that of {label(other)} was not, it is 0: such scores cannot be compared; after "
            f"`bertvision extract --checkpoint {other.checkpoint} --split tune`, `{other.command}` "
            "tunes it too"
        )


def _whole(metric: MetricName, result: Result, task: Any) -> _Whole | None:
    """How a metric of the whole is computed; None of one that is a mean over items."""
    if metric == "f1" and "macro_f1" in headline(result.rules):
        return lambda predicted, gold: class_metrics.f1(predicted, gold, task.positive)
    if metric in task.ratios:
        return lambda parts, _: float(100 * parts.real.sum() / max(parts.imag.sum(), 1))
    return getattr(class_metrics, metric) if METRICS[metric].whole else None


def _values(
    answers: Mapping[str, Any], items: Sequence[Any], task: Task, ratio: str | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Values that a metric of the whole is computed from, (items,) each.

    Returns:
        The answers and the labels; of a ratio what is right of each item as the real part and of
        how much as the imaginary one, both of which a system may decide, and zeros.
    """
    if ratio is None:
        said = np.array([answers[item.id] for item in items])
        return said, np.array([item.label for item in items])
    parts = np.array([task.parts(item, answers[item.id])[ratio] for item in items], np.float64)
    return parts[:, 0] + 1j * parts[:, 1], np.zeros(len(items))


def sentence(
    first: str,
    second: str,
    metric: str,
    d: Difference,
    words: tuple[str, str] = ("contexts", "questions"),
    *,
    runs: bool = False,
) -> str:
    """A comparison in words; every sign is of first minus second.

    Args:
        first: the first system.
        second: the second.
        metric: Metric that was compared.
        d: Result of the comparison.
        words: Names of clusters and items.
        runs: Whether seeds are fine-tunings that have both systems.
    """
    name = "exact match" if metric == "exact" else METRICS[metric].name
    if d.difference == 0 and d.low == 0 == d.high:
        of_each = metric == "accuracy" or words[1] == "questions"
        where = f"every {words[1].removesuffix('s')}" if of_each else f"these {words[1]}"
        return f"{first} and {second} have the same {name} on {where}."
    drawn, choice = words[d.clusters == d.questions], words[1]
    evidence = (
        f"95 % interval {d.low:+.2f} to {d.high:+.2f}, p {format_p(d.p, d.resamples, '= ')}, "
        f"{'' if runs else 'paired bootstrap '}over {d.clusters:,} {drawn}"
    )
    if runs:
        evidence += f" and {d.seeds[0]} fine-tunings, each of which has both systems"
        choice += " and fine-tunings"
    elif d.seeds == (1, 1):
        evidence += f"; one seed: the interval covers the choice of {choice} alone"
    else:
        evidence += f" and over seeds, {d.seeds[0]} of the first and {d.seeds[1]} of the second"
        choice += " and seeds"
        if 1 in d.seeds:
            evidence += "; the interval does not cover the choice of the one seed"
    better, above = ("better", "above") if d.difference >= 0 else ("worse", "below")
    points = f"{abs(d.difference):.2f} points of {name}"
    if d.p < 0.05:
        return (
            f"{first} is {better} than {second} by {points}, more than the choice of {choice} "
            f"explains ({evidence})."
        )
    return (
        f"{first} is {points} {above} {second}, which the choice of {choice} alone may give "
        f"({evidence})."
    )


def _metric(a: Result, b: Result, metric: MetricName | None, task: str) -> MetricName:
    """The metric that both systems have and that can be drawn anew."""
    if metric is not None and metric not in COMPARABLE:
        raise InputError(f"--metric {metric!r}: choose one of {', '.join(COMPARABLE)}")
    allowed = [metrics_of(result, task) for result in (a, b)]
    if allowed[0] != allowed[1]:
        raise InputError(
            f"{label(a)} is scored by {' and '.join(allowed[0])}, {label(b)} by "
            f"{' and '.join(allowed[1])}: compare systems of one task"
        )
    if metric is None:
        return allowed[0][0]
    if metric not in allowed[0]:
        raise InputError(
            f"--metric {metric}: {label(a)} and {label(b)} can be compared by "
            f"{' and '.join(allowed[0])}"
        )
    return metric


def metrics_of(result: Result, task: str) -> list[MetricName]:
    """The metrics that a system can be compared by, the task's own first.

    F1 of yes and no is not among them: it is of the whole, and accuracy says as much.
    """
    metrics = headline(result.rules)
    from bertvision.pipelines.tasks.task import load_task  # with torch, which names do not need

    if ratios := load_task(task).ratios:
        return [name for name in ratios if name in metrics]
    if "macro_f1" in metrics or "pearson" in metrics:
        names = [name for name in COMPARABLE if name in metrics]
        return sorted(names, key=lambda name: name != headline_metric(task, metrics))
    return item_metrics(result)
