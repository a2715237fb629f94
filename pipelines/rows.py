"""From the results of a workspace to rows: one for each system, its seeds together.

A row is what every table and figure of the report selects from: means over seeds with their
standard deviations, the difference from BERT on the same snapshot, costs, and the files and
commands that the numbers come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bertvision.featurestore.schema import SnapshotTag
from bertvision.pipelines.costs import read_costs
from bertvision.pipelines.report.table import Column
from bertvision.pipelines.results import Result, read_metrics, read_results
from bertvision.pipelines.scoring import HEADLINE, headline
from bertvision.pipelines.systems import written
from bertvision.pipelines.workspace import Workspace

Row = dict[str, Any]

SPAN_METRICS = (
    Column("exact", "EM", sd=True),
    Column("f1", "F1", sd=True),
    Column("HasAns_exact", "HasAns EM", sd=True),
    Column("HasAns_f1", "HasAns F1", sd=True),
    Column("NoAns_exact", "NoAns", sd=True),
    Column("argmax_exact", "argmax EM", sd=True),
    Column("argmax_f1", "argmax F1", sd=True),
)
CLASS_METRICS = (
    Column("accuracy", "accuracy", sd=True),
    Column("f1", "F1", sd=True),
    Column("precision", "precision", sd=True),
    Column("recall", "recall", sd=True),
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
    score: str
    """What the report compares: ``F1`` or ``accuracy``."""
    baseline: float | None
    """Score of always giving the commonest answer (no answer, or the larger class), in per cent."""
    questions: int | None
    """How many were scored."""

    @property
    def full(self) -> list[Row]:
        """Heads trained on all examples, but for controls."""
        return [r for r in self.heads if r["fraction"] == 1 and not is_control(r)]

    @property
    def title(self) -> str:
        """The score at the beginning of a sentence."""
        return self.score[0].upper() + self.score[1:]

    @property
    def label(self) -> str:
        """The score with its unit, for an axis."""
        return f"{self.score} (%)"


def is_control(row: Mapping[str, Any]) -> bool:
    """Whether a head was trained on activations of the encoder before any fine-tuning."""
    return bool(SnapshotTag(row["trained_on"]).fraction == 0)


def read_rows(workspace: Workspace, split: str = "dev") -> Results:
    """Rows of all results on a split.

    Raises:
        WorkspaceError: a file is damaged; the message names it.
    """
    results = read_results(workspace, split)
    key = HEADLINE[workspace.config.task.name]
    classes = workspace.config.task.name == "answerable"
    runs = [_run(workspace, result, key) for result in results]
    costs = read_costs(workspace, results)
    for run, cost in zip(runs, costs, strict=True):
        run.update(cost)
    _add_best_members(runs)
    joined = [_joined(group) for group in _groups(runs)]
    rows = [r for r in joined if _is_class(r) == classes]
    bert = {r["checkpoint"]: r["score"] for r in rows if r["system"] == "bert"}
    for row in (*joined, *runs):
        compared = row["system"] != "bert" and _is_class(row) == classes
        row["bert"] = bert.get(row["checkpoint"]) if compared else None
        row["difference"] = None if row["bert"] is None else row["score"] - row["bert"]
    columns = CLASS_METRICS if classes else SPAN_METRICS
    first: Mapping[str, float] = next(
        (
            headline(r.rules)
            for r, run in zip(results, runs, strict=True)
            if _is_class(run) == classes
        ),
        {},
    )
    return Results(
        bert=[r for r in rows if r["system"] == "bert"],
        heads=[r for r in rows if r["system"] == "head"],
        ensembles=[r for r in rows if r["system"] == "ensemble"],
        others=[r for r in joined if _is_class(r) != classes],
        runs=runs,
        metrics=[c for c in columns if any(c.key in r for r in rows)],
        score="accuracy" if classes else "F1",
        baseline=_baseline(first),
        questions=int(first["total"]) if "total" in first else None,
    )


def _run(workspace: Workspace, result: Result, key: str) -> Row:
    metrics = dict(headline(result.rules))
    row: Row = {
        "system": result.system,
        "name": result.name.replace(f"@s{result.seed}", "") if result.seed else result.name,
        "run": result.run,
        "written": written(result),
        "trained_on": result.trained_on,
        "checkpoint": result.checkpoint,
        "fraction": result.fraction,
        "seed": result.seed,
        "score": metrics[key],
        **{column.key: metrics[column.key] for column in _all_metrics() if column.key in metrics},
    }
    if "n-best" in result.rules and "argmax" in result.rules:
        argmax = result.rules["argmax"]["metrics"]
        row.update({f"argmax_{name}": argmax[name] for name in ("exact", "f1")})
    path = result.folder / "metrics.json"
    if result.system == "ensemble":
        row["members"] = read_metrics(path, result.command)["members"]
    row["file"] = path.relative_to(workspace.root).as_posix()
    row["command"] = result.command
    return row


def _add_best_members(runs: Sequence[Row]) -> None:
    """The highest score of each ensemble's members, where all of them were scored themselves."""
    scores = {(run["run"], run["trained_on"], run["checkpoint"]): run["score"] for run in runs}
    for run in runs:
        if run["system"] == "ensemble":
            at, on = run["checkpoint"], run["trained_on"]
            keys = [(m, at if m == "bert" else on, at) for m in run["members"]]
            if all(key in scores for key in keys):
                run["best_member"] = max(scores[key] for key in keys)
                run["gain"] = run["score"] - run["best_member"]


def _is_class(row: Mapping[str, Any]) -> bool:
    return "accuracy" in row


def _all_metrics() -> Iterable[Column]:
    return (*SPAN_METRICS, *CLASS_METRICS)


def _groups(runs: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        key = tuple(run[k] for k in ("system", "name", "fraction", "trained_on", "checkpoint"))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _joined(runs: Sequence[Row]) -> Row:
    """Runs that differ in their seed alone as one row: means, sample standard deviations."""
    row = dict(runs[0])
    row["first_run"] = row.pop("run")
    del row["written"], row["seed"]
    row["seeds"] = len(runs)
    for column in (
        *_all_metrics(),
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


def _baseline(metrics: Mapping[str, float]) -> float | None:
    if "majority" in metrics:
        return metrics["majority"]
    if metrics.get("NoAns_total"):
        return 100 * metrics["NoAns_total"] / metrics["total"]
    return None
