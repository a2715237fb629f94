"""Scores of predictors on other data of their task: out of domain, or never trained on any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from bertvision.errors import InputError
from bertvision.pipelines.prediction.predictor import Predictor, check_alike, together
from bertvision.pipelines.records import Count, Record
from bertvision.pipelines.results.intervals import score_intervals
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.scores import Rules, Scores, headline
from bertvision.pipelines.tasks.soundness import report_skipped
from bertvision.pipelines.tasks.squad.spans import SpanTask
from bertvision.pipelines.tasks.tagging import OUTSIDE, TaggingTask


class DataScores(Record):
    """The scores of a system on data that its workspace does not have."""

    head: str
    """Name of the run, ``bert``, or an ensemble."""
    trained_on: str
    checkpoint: str
    data: str
    """Source of the items, as it was given."""
    data_sha256: str
    split: str
    """Split of the source."""
    items: Count
    rules: Rules
    threshold_tuned_on: str | None = None
    """Split of the workspace that tuned the threshold of no answer."""
    precision: str
    intervals: dict[str, tuple[float, float]]
    """Lower and upper end of the 95 % interval of each metric that has one, by the choice of items
    (see `score_intervals`)."""
    predictions: dict[str, str | bool | int | float] = Field(repr=False)
    """Answers by id, as in `Scores.predictions`."""


def _as_scores(data: TaskData, source: str, head: str) -> TaskData:
    """Labels as scores, where whole numbers were taken for the names of classes.

    Raises:
        InputError: A label is no number.
    """
    try:
        scores = [float(name) for name in data.classes]
    except ValueError:
        raise InputError(
            f"{source} has the classes {', '.join(data.classes)}, and {head} tells scores: give "
            "data with numbers as labels"
        ) from None
    items = [x._replace(label=None if x.label is None else scores[x.label]) for x in data.items]
    return replace(data, items=items, classes=())


def evaluate_on(
    predictors: Sequence[Predictor], source: str, split: str | None, *, skip_bad: bool
) -> list[DataScores]:
    """Score predictors on the labelled items of a source.

    Thresholds of no answer are those of the workspace: nothing is tuned on these data.

    Args:
        predictors: Predictors of one task.
        source: File, folder or data set of the hub, in a form that the task reads.
        split: Split of it; None is dev where there is one, else the only one.
        skip_bad: Leave malformed rows out and count them.

    Raises:
        InputError: The source cannot be read, has no such split, or has labels that the systems
            do not know.
    """
    first = predictors[0]
    check_alike(predictors)
    config = first.record.task.model_copy(update={"skip_bad": skip_bad})
    there = first.task.splits(source)
    only = "dev" if "dev" in there else there[0] if len(there) == 1 else None
    chosen = split or only
    if chosen not in there:
        asked = "which split is meant" if chosen is None else f"--split {chosen}"
        raise InputError(f"{asked}: {source} has {', '.join(there)}; say one with --split")
    data = first.task.read(source, chosen, config)
    if data.classes and not config.classes:
        data = _as_scores(data, source, first.record.name)
    if data.classes and data.classes != config.classes:
        raise InputError(
            f"{source} has the classes {', '.join(data.classes)}, and {first.record.name} tells "
            f"{', '.join(config.classes)}: give data with labels among these"
        )
    if isinstance(first.task, TaggingTask):
        gold = {tag for item in data.items for tag in item.tags} - {OUTSIDE}
        if gold and not gold & set(config.classes):
            raise InputError(
                f"{source} has the tags {', '.join(sorted(gold))}, and {first.record.name} tells "
                f"{', '.join(config.classes)}: give data with tags among these"
            )
    report_skipped(source, data.skipped)
    scored: list[Scores] = []
    for predictor, logits in zip(
        predictors, together(predictors, data.items, "evaluate"), strict=True
    ):
        task, threshold = predictor.task, predictor.record.threshold
        if isinstance(task, SpanTask):
            scored.append(task.score(logits, None, threshold=threshold))
        else:
            scored.append(task.score(logits, None))
    intervals = score_intervals(
        first.task,
        data.items,
        [(headline(scores.rules), scores.predictions) for scores in scored],
    )
    results = []
    for predictor, scores, ends in zip(predictors, scored, intervals, strict=True):
        name, _, tags = predictor.record.name.partition(":")
        results.append(
            DataScores(
                head=name,
                trained_on=tags.partition(":")[0],
                checkpoint=predictor.record.checkpoint,
                data=source,
                data_sha256=data.sha256,
                split=chosen,
                items=len(data.items),
                rules=scores.rules,
                threshold_tuned_on=predictor.record.threshold_tuned_on,
                precision=predictor.precision,
                intervals=ends,
                predictions=scores.predictions,
            )
        )
    return results
