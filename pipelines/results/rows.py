"""From the results of a workspace to rows: one for each system, its seeds together.

A row is what every table and figure of the report selects from: means over seeds with their
standard deviations, the difference from BERT on the same snapshot, costs, and the files and
commands that the numbers come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.results.columns import Column, marked
from bertvision.pipelines.results.costs import read_costs
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.systems import label, seedless
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.scores import (
    CORRELATIONS,
    METRICS,
    first_trivial_score,
    headline,
    headline_metric,
    kind_of_metrics,
    trivial_metrics,
)
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.workspace import Workspace

Row = dict[str, Any]

METRIC_COLUMNS = (
    *(Column(key, name, sd=True) for key, name in METRICS.items() if key != "majority"),
    Column("argmax_exact", "argmax EM", sd=True),
    Column("argmax_f1", "argmax F1", sd=True),
)
COSTS = (
    "parameters",
    "percent",
    "fine_tuning_seconds",
    "extraction_seconds",
    "training_seconds",
    "seconds",
    "bytes",
    "retention",
    "speed_up",
)


class Results(NamedTuple):
    """The rows of a workspace."""

    bert: list[Row]
    """BERT, a row for each snapshot."""
    heads: list[Row]
    """Heads: one row for each head, fraction, snapshot trained on and snapshot scored on."""
    ensembles: list[Row]
    """Ensembles, likewise."""
    others: list[Row]
    """Heads that tell only whether a question is answerable, where the task is to find answers."""
    runs: list[Row]
    """Every single result, seeds apart."""
    metrics: list[Column]
    """The metrics that occur."""
    key: str
    """Key of the metric that the report compares."""
    baseline: float | None
    """Score of always giving the commonest answer (`trivial_score`), in per cent; None where the
    metric has none to tell, as correlations."""
    questions: int | None
    """How many items were scored."""
    items: str
    """What they are: ``questions``, or ``items`` of other tasks."""
    quantised: Sequence[Row] = ()
    """BERT with 8-bit linear layers, a row for each snapshot."""

    @property
    def trivial(self) -> list[Row]:
        """A row of always giving the commonest answer, where that has a score."""
        if self.baseline is None:
            return []
        name, metrics = trivial_metrics(self.baseline, {column.key for column in self.metrics})
        return [{"name": name, "score": self.baseline, **metrics}]

    @property
    def full(self) -> list[Row]:
        """Heads trained on all examples, but for controls."""
        return [r for r in self.heads if r["fraction"] == 1 and not is_control(r)]

    @property
    def score(self) -> str:
        """What the report compares, inside a sentence: ``F1``, ``accuracy``, …."""
        return METRICS[self.key] + (" correlation" if self.key in CORRELATIONS else "")

    @property
    def title(self) -> str:
        """The score at the beginning of a sentence."""
        return self.score[0].upper() + self.score[1:]

    @property
    def label(self) -> str:
        """The score with its unit, for an axis."""
        return f"{self.score} ({'× 100' if self.key in CORRELATIONS else '%'})"


def is_control(row: Mapping[str, Any]) -> bool:
    """Whether a head was trained on activations of ``0e`` or ``untrained``, not fine-tuned."""
    return bool(SnapshotTag(row["trained_on"]).fraction <= 0)


def read_rows(
    workspace: Workspace, split: str = "dev", left_out: list[str] | None = None
) -> Results:
    """Rows of all results on a split.

    Args:
        workspace: that they are of.
        split: what was scored.
        left_out: see `read_results`.

    Raises:
        WorkspaceError: a file is damaged and there is no list of these; the message names it.
    """
    results = read_results(workspace, split, left_out)
    task = workspace.config.task.name
    kind = "span" if find_task(task).kind == "span" else "classification"
    runs = [_run(workspace, result, task) for result in results]
    costs = read_costs(workspace, results, left_out)
    for run, cost in zip(runs, costs, strict=True):
        run.update(cost)
    _add_best_members(runs)
    joined = [_joined(group) for group in _groups(runs)]
    rows = [r for r in joined if kind_of_metrics(r) == kind]
    bert = {(r["checkpoint"], _tuned(r)): r["score"] for r in rows if r["system"] == "bert"}
    metrics = [m for r in results if kind_of_metrics(m := headline(r.rules)) == kind]
    first: Mapping[str, float] = metrics[0] if metrics else {}
    key = headline_metric(task, first) if first else find_task(task).headline
    baseline = first_trivial_score(metrics, key)
    for row in (*joined, *runs):
        row["baseline"] = baseline if kind_of_metrics(row) == kind else None
        compared = row["system"] != "bert" and kind_of_metrics(row) == kind
        row["bert"] = bert.get((row["checkpoint"], _tuned(row))) if compared else None
        row["difference"] = None if row["bert"] is None else row["score"] - row["bert"]
    return Results(
        bert=[r for r in rows if r["system"] == "bert"],
        heads=[r for r in rows if r["system"] == "head"],
        ensembles=[r for r in rows if r["system"] == "ensemble"],
        others=[r for r in joined if kind_of_metrics(r) != kind],
        runs=runs,
        metrics=columns_of(rows),
        key=key,
        baseline=baseline,
        questions=int(first["total"]) if "total" in first else None,
        items=load_task(task).words[1],
        quantised=[r for r in rows if r["system"] == "quantised"],
    )


def with_marks(results: Results) -> Results:
    """The same rows, with `MARK` behind the names of systems whose threshold was not tuned.

    So they stand apart from the tuned seeds of the same head wherever rows are found by name.
    """

    def mark(rows: Sequence[Row], *keys: str) -> list[Row]:
        return [row | {key: marked(row[key], row) for key in keys} for row in rows]

    return results._replace(
        bert=mark(results.bert, "name"),
        heads=mark(results.heads, "name"),
        ensembles=mark(results.ensembles, "name"),
        quantised=mark(results.quantised, "name"),
        runs=mark(results.runs, "name", "run"),
    )


def _tuned(row: Mapping[str, Any]) -> bool:
    """Whether nothing of a system was left untuned that others tune."""
    return row.get("threshold_tuned_on", "") is not None


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The metrics that occur in some rows."""
    return [column for column in METRIC_COLUMNS if any(column.key in row for row in rows)]


def _run(workspace: Workspace, result: Result, task: str) -> Row:
    metrics = dict(headline(result.rules))
    row: Row = {
        "system": result.system,
        "name": seedless(result),
        "run": result.run,
        "written": label(result),
        "trained_on": result.trained_on,
        "checkpoint": result.checkpoint,
        "fraction": result.fraction,
        "seed": result.seed,
        "score": metrics[headline_metric(task, metrics)],
        **{key: metrics[key] for key in METRICS if key in metrics and key != "majority"},
    }
    if kind_of_metrics(metrics) == "span" and "argmax" in result.rules:
        argmax = result.rules["argmax"]["metrics"]
        row.update({f"argmax_{name}": argmax[name] for name in ("exact", "f1")})
    row |= result.tuning
    path = result.folder / "metrics.json"
    if result.system == "ensemble":
        row["members"] = list(result.members)
    row["file"] = path.relative_to(workspace.root).as_posix()
    row["command"] = result.command
    return row


def _add_best_members(runs: Sequence[Row]) -> None:
    """The highest score of each ensemble's members, where all were scored themselves, and alike."""
    found = {(run["run"], run["trained_on"], run["checkpoint"]): run for run in runs}
    for run in runs:
        if run["system"] == "ensemble":
            at, on = run["checkpoint"], run["trained_on"]
            keys = [(m, at if m == "bert" else on, at) for m in run["members"]]
            members = [found[key] for key in keys if key in found]
            if len(members) == len(keys) and {_tuned(m) for m in members} == {_tuned(run)}:
                run["best_member"] = max(member["score"] for member in members)
                run["gain"] = run["score"] - run["best_member"]


def _groups(runs: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        names = ("system", "name", "fraction", "trained_on", "checkpoint")
        key = (*(run[name] for name in names), _tuned(run))  # no mean of both
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _joined(runs: Sequence[Row]) -> Row:
    """Runs that differ in their seed alone as one row: means, sample standard deviations."""
    row = dict(runs[0])
    row["first_run"] = row.pop("run")
    del row["written"], row["seed"]
    row["seeds"] = len(runs)
    for column in (
        *METRIC_COLUMNS,
        Column("score", "", sd=True),
        *map(_plain, (*COSTS, "best_member", "gain")),
    ):
        values = [run[column.key] for run in runs if run.get(column.key) is not None]
        if not values:
            continue
        # the same number for each seed stays the integer it is
        row[column.key] = values[0] if len(set(values)) == 1 else statistics.fmean(values)
        if column.sd:
            row[f"{column.key}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    row["file"] = "; ".join(run["file"] for run in runs)
    row["command"] = "; ".join(dict.fromkeys(run["command"] for run in runs))
    return row


def _plain(name: str) -> Column:
    return Column(name, "")
