"""From the results of a workspace to rows: one for each system, its seeds together.

A row is what every table and figure of the report selects from: means over seeds with their
standard deviations, the difference from BERT on the same snapshot, costs, and the files and
commands that the numbers come from.

What a result cost, in the form used for compression: parameters, time, bytes, retention.

What is summed, so that a head and BERT can be compared:

- *Fine-tuning* is BERT's, up to the snapshot that the system needs: BERT's own, or of a head the
  later one of the snapshot it was trained on and the snapshot it was scored on (both are of one
  run, so that the earlier one costs nothing more). It is counted as the optimiser steps times the
  median seconds of a step, one median for the whole run: what else the machine did while one
  snapshot was made is no cost of it. (Runs of earlier versions did not time their steps; of them it
  is the wall time.)
- *Extraction* is that of the head's training split, whole, also where the head was trained on a
  part of it; where it was pooled from stored tokens, that of the tokens too. The split that is
  scored is not counted: a forward pass over it is what BERT itself would need for its answers.
- *Training* is the head's own steps times the median of their seconds, with an equal share of the
  rest, the reading above all, where several were trained from one pass.
- An *ensemble* needs what its members need, each thing once: one fine-tuning up to the latest
  snapshot, one extraction of each split, the training of every head.

Nothing is estimated: what was not recorded is None, and so is every sum with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.records import leaving_out, read_record
from bertvision.pipelines.results.columns import Column, grouped, marked
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.systems import label, seedless
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.scores import (
    first_trivial_score,
    headline,
    headline_metric,
    kind_of_metrics,
    trivial_metrics,
)
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.records import (
    ExtractionCosts,
    read_run_config,
    read_run_metrics,
    read_snapshot_info,
)
from bertvision.pipelines.workspace.snapshots import count_encoder_parameters
from bertvision.pipelines.workspace.workspace import Workspace


class Costs(TypedDict):
    """Costs of one result; None is what was not recorded."""

    parameters: int | None
    """Parameters of the heads; of BERT, alone or in an ensemble, those of its encoder."""
    percent: float | None
    """Parameters in per cent of the encoder's."""
    fine_tuning_seconds: float | None
    """Fine-tuning of BERT up to the latest snapshot that is needed."""
    extraction_seconds: float | None
    """Extraction of the splits that the heads were trained on; 0 where there is no head."""
    training_seconds: float | None
    """Training of the heads; 0 where there is none."""
    seconds: float | None
    """The sum of the three."""
    bytes: int | None
    """Stored activations that the heads were trained on; 0 where there is no head."""
    retention: float | None
    """Excess of the score over always giving the commonest answer, in per cent of what BERT's is at
    the last snapshot of the workspace; None where BERT's is not above it."""
    speed_up: float | None
    """BERT's fine-tuning up to that snapshot, divided by ``seconds``."""


class _Parts(NamedTuple):
    """Parts of a result: whether BERT answers, and the folders of its runs."""

    bert: bool
    runs: tuple[Path, ...]
    whole: bool = True


def read_costs(
    workspace: Workspace, results: Sequence[Result], left_out: list[str] | None = None
) -> list[Costs]:
    """Costs of results, in their order.

    Args:
        workspace: Workspace that they are of.
        results: Results of `read_results`; BERT's among them give the retention.
        left_out: gets a message for each record of an extraction that is damaged; its costs are
            then unknown.

    Raises:
        WorkspaceError: a file is damaged; the message names it and the command that makes it again.
    """
    records = _Records(workspace, left_out)
    tags = workspace.snapshots()
    last = tags[-1] if tags else None
    reference: dict[tuple[str, bool], Mapping[str, float]] = {
        (r.split, r.untuned): headline(r.rules)
        for r in results
        if r.system == "bert" and r.checkpoint == last
    }
    whole = None if last is None else records.fine_tuning(str(last))
    costs = []
    for result in results:
        cost = _costs(workspace, records, result)
        score = headline(result.rules)
        full = reference.get((result.split, result.untuned))
        # A classification head beside BERT's spans has other metrics under the same names
        if full is not None and kind_of_metrics(full) == kind_of_metrics(score):
            key = headline_metric(workspace.config.task.name, full)
            same = (headline(r.rules) for r in results if r.split == result.split)
            trivial = first_trivial_score((full, *same), key) or 0.0
            learned = full[key] - trivial
            cost["retention"] = 100 * ((score[key] - trivial) / learned) if learned > 0 else None
        if whole and cost["seconds"]:
            cost["speed_up"] = whole / cost["seconds"]
        costs.append(cost)
    return costs


def _costs(workspace: Workspace, records: _Records, result: Result) -> Costs:
    parts = _parts(workspace, result)
    encoder = records.encoder()
    trainings = [read_run_metrics(run) for run in parts.runs]
    unknown = [] if parts.whole else [None]  # a member was removed since
    parameters = _sum([*(t.total for t in trainings), *([encoder] if parts.bert else []), *unknown])
    stored = sorted({records.stored_split(run) for run in parts.runs})
    latest = max(SnapshotTag(result.trained_on), SnapshotTag(result.checkpoint))
    fine_tuning = records.fine_tuning(str(latest))
    extractions = [records.extraction(*split) for split in stored]
    pooled = {(e.tag, e.pooled_from) for e in extractions if e is not None and e.pooled_from}
    needed = [*extractions, *(records.extraction(*s) for s in sorted(pooled.difference(stored)))]
    extraction = _sum([None if e is None else e.seconds for e in needed])
    training = _sum([*(t.own_seconds for t in trainings), *unknown])
    size = _sum([None if e is None else e.bytes for e in extractions])
    return Costs(
        parameters=None if parameters is None else int(parameters),
        percent=100 * parameters / encoder if parameters is not None and encoder else None,
        fine_tuning_seconds=fine_tuning,
        extraction_seconds=extraction,
        training_seconds=training,
        seconds=_sum([fine_tuning, extraction, training]),
        bytes=None if size is None else int(size),
        retention=None,
        speed_up=None,
    )


def _parts(workspace: Workspace, result: Result) -> _Parts:
    if result.system in ("bert", "quantised"):
        return _Parts(True, ())
    if result.system == "head":
        return _Parts(False, (result.folder.parents[1],))
    runs = [workspace.head_dir(result.trained_on, run) for run in result.members if run != "bert"]
    there = tuple(run for run in runs if (run / "metrics.json").is_file())
    return _Parts("bert" in result.members, there, len(there) == len(runs))


class _Records:
    """Records of fine-tuning and extraction, each file read once."""

    def __init__(self, workspace: Workspace, left_out: list[str] | None) -> None:
        self._workspace = workspace
        self._left_out = left_out
        self._tags = workspace.snapshots()
        self.encoder = cache(self._encoder)
        self.fine_tuning = cache(self._fine_tuning)
        self.extraction = cache(self._extraction)
        self.stored_split = cache(self._stored_split)

    def _encoder(self) -> int | None:
        """Parameters of the encoder, which all snapshots share."""
        if not self._tags:
            return None
        return count_encoder_parameters(self._workspace.snapshot_dir(self._tags[0]))

    def _fine_tuning(self, tag: str) -> float | None:
        """Seconds up to a snapshot; none at all are needed for ``0e`` and ``untrained``."""
        try:
            info, last = (
                read_snapshot_info(self._workspace.snapshot_dir(t)) for t in (tag, self._tags[-1])
            )
        except FileNotFoundError:
            return None
        if SnapshotTag(tag).fraction <= 0:
            return 0.0
        if last.seconds_per_step is None:
            return info.seconds
        return info.step * last.seconds_per_step

    def _extraction(self, tag: str, split: str) -> ExtractionCosts | None:
        """Seconds of the extraction of a stored split; None where those of a part are unknown."""
        path = self._workspace.root / "extraction" / tag / f"{split}.json"
        if not path.is_file():
            return None
        mend = "delete it, and the costs of extraction are unknown"
        with leaving_out(self._left_out):
            costs = read_record(path, ExtractionCosts, "bertvision extract", mend)
            return costs if costs.examples_written >= costs.examples else None
        return None

    def _stored_split(self, run: Path) -> tuple[str, str]:
        """Snapshot and split of the store that a run was trained on."""
        config = read_run_config(run)
        return config.trained_on, StoredName("train", config.tokens).name


def _sum(values: Sequence[float | int | None]) -> float | None:
    """Their sum; None where one is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


Row = dict[str, Any]

METRIC_COLUMNS = (
    *(Column(key, m.label, sd=True) for key, m in METRICS.items() if m.score),
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
    """Name of the items: ``questions``, or ``items`` of other tasks."""
    quantised: Sequence[Row] = ()
    """BERT with 8-bit linear layers, a row for each snapshot."""
    split: str = "dev"
    """Split that was scored."""

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
        """Name of the compared metric inside a sentence: ``F1``, ``accuracy``, …."""
        return METRICS[self.key].name

    @property
    def title(self) -> str:
        """The score at the beginning of a sentence."""
        return self.score[0].upper() + self.score[1:]

    @property
    def label(self) -> str:
        """The score with its unit, for an axis."""
        return f"{self.score} ({METRICS[self.key].unit})"


def is_control(row: Mapping[str, Any]) -> bool:
    """Whether a head was trained on activations of a snapshot that was not fine-tuned."""
    return bool(SnapshotTag(row["trained_on"]).fraction <= 0)


def read_rows(
    workspace: Workspace, split: str = "dev", left_out: list[str] | None = None
) -> Results:
    """Rows of all results on a split.

    Args:
        workspace: Workspace that they are of.
        split: Split that was scored.
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
    joined = [_joined(group) for group in grouped(runs, _trainings).values()]
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
        split=split,
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
        **{key: metrics[key] for key, m in METRICS.items() if m.score and key in metrics},
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
    by_run = {(run["run"], run["trained_on"], run["checkpoint"]): run for run in runs}
    for run in runs:
        if run["system"] == "ensemble":
            at, on = run["checkpoint"], run["trained_on"]
            keys = [(m, at if m == "bert" else on, at) for m in run["members"]]
            members = [by_run[key] for key in keys if key in by_run]
            if len(members) == len(keys) and {_tuned(m) for m in members} == {_tuned(run)}:
                run["best_member"] = max(member["score"] for member in members)
                run["gain"] = run["score"] - run["best_member"]


def _trainings(run: Row) -> tuple[Any, ...]:
    """Key of runs that differ by their seed alone; tuned and untuned ones have no mean."""
    names = ("system", "name", "fraction", "trained_on", "checkpoint")
    return *(run[name] for name in names), _tuned(run)


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
