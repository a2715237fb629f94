"""One table of methods: mean and spread over seeds, failed runs, costs, differences.

A method is written ``FOLDER`` or ``FOLDER@NAME[:TRAINED_ON[:CHECKPOINT]]``: BERT at its last
snapshot, or another system that was scored in the workspace of every seed.
"""

from __future__ import annotations

import math
import reprlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.repeats.folder import require_seeds
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.rows import read_costs
from bertvision.pipelines.results.systems import find_system, label
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.tasks.scores import (
    first_trivial_score,
    headline,
    headline_metric,
    trivial_metrics,
)
from bertvision.pipelines.uncertainty import deviation
from bertvision.pipelines.workspace.records import read_run_metrics, read_snapshot_info
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.workspace import Workspace

LEGEND = (
    "Mean ± standard deviation over the runs of a method, which differ in their seed alone; "
    "failed: runs that are not above the trivial answer (Mosbach et al. 2021). The 95 % interval "
    "of the difference (Welch's t) is over seeds alone, on these examples: it does not say what "
    "other examples would give."
)
"""Legend of the columns."""


def basis(spread: Mapping[str, Any]) -> str:
    """Sentence on the kind of the scores.

    Args:
        spread: fields of `spread.spread`.
    """
    return (
        f"{spread['task']}, {METRICS[spread['metric']].label} on dev, in per cent; trivial answer: "
        f"{spread['baseline_name']} {spread['baseline'] or 0.0:.1f}"
    )


def name_of(metric: str) -> str:
    """A metric as sentences call it.

    Args:
        metric: its key.
    """
    return METRICS[metric].name


def axis_of(metric: str) -> str:
    """The name of a metric with its unit.

    Args:
        metric: its key.
    """
    return f"{METRICS[metric].name} ({METRICS[metric].unit})"


def columns(spread: Mapping[str, Any]) -> list[Column]:
    """The columns; no difference of one method alone, and no time of heads where there are none.

    Args:
        spread: fields of `spread.spread`.
    """
    rows = spread["rows"]
    difference = Column(
        "difference", f"− {rows[0]['method']} (95 % interval)", "signed", interval=True
    )
    heads = [
        Column("extraction_seconds", "extraction s"),
        Column("training_seconds", "training s"),
    ]
    return [
        Column("method", "method", "text"),
        Column("variant", "variant", "text"),
        Column("runs", "runs", "count"),
        Column("score", METRICS[spread["metric"]].label, sd=True),
        Column("lowest", "lowest"),
        Column("highest", "highest"),
        Column("failed", "failed", "share"),
        *[difference][: len(rows) > 1],
        Column("trained_parameters", "trained", digits=0),
        Column("kept_bytes", "kept", "size"),
        Column("fine_tuning_seconds", "fine-tuning s"),
        *(heads if any(row["training_seconds"] for row in rows) else []),
    ]


def shown(spread: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with their variants as one types them, None where there is none.

    Args:
        spread: fields of `spread.spread`.
    """
    return [{**row, "variant": ",".join(row["variant"]) or None} for row in spread["rows"]]


def remarks(spread: Mapping[str, Any]) -> list[str]:
    """Why a difference has no interval; then which seeds are without a score, and what makes it.

    Args:
        spread: fields of `spread.spread`.
    """
    without: dict[str, list[str]] = {}
    for row in spread["rows"]:
        if row["no_interval"] is not None:
            without.setdefault(row["no_interval"], []).append(row["method"])
    return [
        *(f"No interval of {', '.join(names)}: {why}." for why, names in without.items()),
        *(
            f"Not finished: {seed['method']}, seed {seed['seed']}: `{seed['command']}`"
            for seed in spread["unfinished"]
        ),
    ]


_ROUNDING = 1e-9  # two ways to compute the same share of items


class Difference(NamedTuple):
    """How far the mean of one method is from that of another."""

    value: float | None
    low: float | None
    """Lower end of the 95 % interval; None where the runs cannot tell one."""
    high: float | None
    why: str | None = None
    """Why there is no interval."""


def is_failed(score: float, trivial: float) -> bool:
    """Whether a run learned nothing: its score is not above that of the trivial answer.

    The failed run of Mosbach et al. (2021), whose trivial answer is the majority class.

    Args:
        score: Score of the run on dev, per cent.
        trivial: Score of always giving the commonest answer, likewise; 0 for correlations.
    """
    return score <= trivial + _ROUNDING


def welch(scores: Sequence[float], others: Sequence[float]) -> Difference:
    """The difference of two means with its 95 % interval by Welch's t.

    mean(a) − mean(b) ± t(0.975, ν) · √(s²(a)/n(a) + s²(b)/n(b)), with ν of Welch (1947),
    (s²(a)/n(a) + s²(b)/n(b))² / Σ (s²/n)² / (n − 1), and n − 1 in the variances s².

    Args:
        scores: Scores of the runs of a method, at least one.
        others: Scores of the runs of the method that it is compared with, at least one.
    """
    value = statistics.fmean(scores) - statistics.fmean(others)
    if min(len(scores), len(others)) < 2:
        return Difference(value, None, None, "one run alone has no spread")
    squares = [statistics.variance(sample) / len(sample) for sample in (scores, others)]
    if not sum(squares):
        return Difference(value, None, None, "all runs of both score the same")
    from scipy.special import stdtrit

    sizes = (len(scores), len(others))
    freedom = sum(squares) ** 2 / sum(s**2 / (n - 1) for s, n in zip(squares, sizes, strict=True))
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(squares))
    return Difference(value, value - half, value + half)


_TASK = (
    *("name", "answerable_only", "skip_bad", "dev_fraction", "linked"),
    *("classes", "text", "pair", "label"),
)
"""Settings of the task that decide what is scored; how texts are cut is a method's own."""


_DIFFERENCE = ("difference", "difference_low", "difference_high", "no_interval")


class SeedRun(NamedTuple):
    """A system, fine-tuned or trained with one seed, and scored on dev."""

    seed: int
    score: float
    """Per cent."""
    trained_parameters: int | None
    """Parameters of the encoder and its output layer, or of the head; None of ensembles,
    and of snapshots of earlier versions."""
    kept_bytes: int | None
    """Bytes of the weights that are kept for the task: the snapshot's, or the head's beside the
    encoder it was trained on; None of ensembles."""
    fine_tuning_seconds: float | None
    """Steps × median seconds of a step; None where it was not recorded."""
    extraction_seconds: float | None
    training_seconds: float | None
    """Training of a head; 0 of BERT."""
    folder: str
    """Where ``metrics.json`` is."""


class Unfinished(NamedTuple):
    """A seed without a score."""

    seed: int
    command: str
    """Command that makes it."""


class Method(NamedTuple):
    """The runs of a folder, seeds in order."""

    name: str
    """The folder's name, with the system behind it where it was named."""
    root: Path
    system: str
    """As one types it: ``bert:3e``."""
    variant: tuple[str, ...]
    task: str
    metric: str
    trivial: float | None
    """Score of always giving the commonest answer, in per cent; None where that has none to tell,
    as of correlations."""
    trivial_name: str
    """Name of that answer: ``majority class``, ``never answering``, …."""
    runs: tuple[SeedRun, ...]
    """At least one."""
    unfinished: tuple[Unfinished, ...]
    compared: dict[str, Any]
    """Settings that methods must have in common to be compared."""


def read_method(text: str) -> Method:
    """The runs of a method.

    Args:
        text: ``FOLDER[@NAME[:TRAINED_ON[:CHECKPOINT]]]``.

    Raises:
        WorkspaceError: there is no such folder, it holds no runs, they differ in more than the
            seed, none of them is scored, or a file is damaged.
        UnknownNameError: no seed has such a system, or several are meant.
        InputError: the folder is a file.
    """
    root, system = _parsed(text)
    workspaces = require_seeds(root)
    results = [read_results(workspace) for workspace in workspaces]
    if system is None:
        written = (
            f"bert:{[tag for tag in workspaces[0].config.finetune.tags if not tag.is_mean][-1]}"
        )
        command = BERT_COMMAND
    else:  # what the seeds have together decides, so that the same is taken of each
        meant = find_system(
            [*{label(r): r for results_of_seed in results for r in results_of_seed}.values()],
            system,
        )
        written, command = label(meant), meant.command
    runs, unfinished, failed = [], [], []
    for workspace, results_of_seed in zip(workspaces, results, strict=True):
        seed = workspace.config.finetune.seed
        if (result := next((r for r in results_of_seed if label(r) == written), None)) is None:
            again = f"{command} --workspace {shlex.quote(str(workspace.root))}"
            unfinished.append(Unfinished(seed, again))
        else:
            failed.append(result)
            runs.append(_run(workspace, result))
    if not failed:
        raise WorkspaceError(
            f"{root}: none of its runs is scored yet; `{unfinished[0].command}` finishes the first"
        )
    config = workspaces[0].config
    compared = [_compared(workspace, result) for result in failed]
    for other in compared[1:]:
        _check(root, root, compared[0], other)
    metric = compared[0]["metric"]
    every = [headline(result.rules) for result in failed]
    trivial = first_trivial_score(every, metric)
    return Method(
        name=root.name if system is None else f"{root.name}@{system}",
        root=root,
        system=written,
        variant=config.finetune.variant,
        task=config.task.name,
        metric=metric,
        trivial=trivial,
        trivial_name=_trivial_name(every[0], metric, trivial),
        runs=tuple(runs),
        unfinished=tuple(unfinished),
        compared=compared[0],
    )


def check_comparable(methods: Sequence[Method]) -> None:
    """Refuse methods of another task, other data or another metric than the first.

    Raises:
        InputError: one comes twice.
        WorkspaceError: one is of something else; names what.
    """
    seen = set()
    for method in methods:
        if (key := (method.root, method.system)) in seen:
            raise InputError(f"{method.name} is named twice: name each method once")
        seen.add(key)
        _check(methods[0].root, method.root, methods[0].compared, method.compared)


def _parsed(text: str) -> tuple[Path, str | None]:
    """Folder and system; an ``@`` that is part of the folder's name stays there."""
    places = [text, *(text[:i] for i, letter in enumerate(text) if letter == "@")]
    folder = next((p for p in places if p and Path(p).expanduser().exists()), None)
    if folder is None:
        folder = text.partition("@")[0]
    system = text[len(folder) + 1 :]
    if len(folder) < len(text) and not system:
        raise InputError(
            f"{text!r} names no system behind the @: write {folder}@bert:1e, or leave "
            "it out to mean the last snapshot of BERT"
        )
    return Path(folder).expanduser().resolve(), system or None


def _run(workspace: Workspace, result: Result) -> SeedRun:
    metrics = headline(result.rules)
    (costs,) = read_costs(workspace, [result])
    trained = weights = None
    if result.system in ("bert", "quantised"):
        weights = workspace.snapshot_dir(result.checkpoint)
        trained = read_snapshot_info(weights).trained_parameters
    elif result.system == "head":
        weights = result.folder.parents[1]
        trained = read_run_metrics(weights).trainable
    files = weights.glob("*.safetensors") if weights else ()
    return SeedRun(
        seed=workspace.config.finetune.seed,
        score=metrics[headline_metric(workspace.config.task.name, metrics)],
        trained_parameters=trained,
        kept_bytes=sum(file.stat().st_size for file in files) if weights else None,
        fine_tuning_seconds=costs["fine_tuning_seconds"],
        extraction_seconds=costs["extraction_seconds"],
        training_seconds=costs["training_seconds"],
        folder=str(result.folder),
    )


def _trivial_name(metrics: Mapping[str, float], metric: str, trivial: float | None) -> str:
    if trivial is None:
        return "no correlation" if METRICS[metric].correlation else "nothing right"
    return trivial_metrics(trivial, metrics)[0].strip("()")


def _compared(workspace: Workspace, result: Result) -> dict[str, Any]:
    config, metrics = workspace.config, headline(result.rules)
    task = config.task.model_dump(mode="json", include=set(_TASK))
    return {
        "task": {name: task[name] for name in _TASK},
        "data": {split: config.data[split].sha256 for split in ("train", "dev")},
        "misfits": config.data["dev"].misfits,
        "metric": headline_metric(config.task.name, metrics),
        "threshold_tuned": not result.untuned,
    }


def _check(first: Path, root: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    if difference := first_difference(there, here):
        name, of_first, own = difference
        raise WorkspaceError(
            f"{root} cannot be compared with {first}: {name} is {reprlib.repr(own)}, there it is "
            f"{reprlib.repr(of_first)}; methods are compared on one task, its data and its metric"
        )


_COSTS = (
    *("trained_parameters", "kept_bytes"),
    *("fine_tuning_seconds", "extraction_seconds", "training_seconds"),
)


def spread(folders: Sequence[str]) -> dict[str, Any]:
    """Read methods, and compare each with the first.

    Args:
        folders: As in `read_method`, one at least.

    Returns:
        See `compare_methods`.

    Raises:
        WorkspaceError: as of `read_method`, or a method is of another task, data or metric.
        UnknownNameError: no seed has a system that is named, or several are meant.
        InputError: a folder is a file, or a method is named twice.
    """
    return compare_methods([read_method(text) for text in folders])


def compare_methods(methods: Sequence[Method]) -> dict[str, Any]:
    """Compare each method with the first.

    Args:
        methods: one at least.

    Returns:
        ``task``, ``metric``, ``baseline`` (per cent; None where the metric has none to tell) and
        ``baseline_name`` of all; ``rows``, one for each method; ``runs``, one for each seed of
        each; ``unfinished``, the seeds without a score, with the ``command`` that makes it.

    Raises:
        WorkspaceError: a method is of another task, data or metric than the first.
        InputError: one is named twice.
    """
    check_comparable(methods)
    names = _names(methods)
    first = methods[0]
    trivial = 0.0 if first.trivial is None else first.trivial
    return {
        "task": first.task,
        "metric": first.metric,
        "baseline": first.trivial,
        "baseline_name": first.trivial_name,
        "rows": [
            {"method": name, **_row(method, first, trivial)}
            for name, method in zip(names, methods, strict=True)
        ],
        "runs": [
            {
                "method": name,
                "seed": run.seed,
                "score": run.score,
                "failed": is_failed(run.score, trivial),
                **{key: getattr(run, key) for key in _COSTS},
                "folder": run.folder,
            }
            for name, method in zip(names, methods, strict=True)
            for run in method.runs
        ],
        "unfinished": [
            {"method": name, **seed._asdict()}
            for name, method in zip(names, methods, strict=True)
            for seed in method.unfinished
        ],
    }


def _names(methods: Sequence[Method]) -> list[str]:
    """Names of methods; folders of one name in different places are told by their paths."""
    names = [method.name for method in methods]
    return [
        method.name if names.count(method.name) == 1 else f"{method.root.parent}/{method.name}"
        for method in methods
    ]


def _row(method: Method, first: Method, trivial: float) -> dict[str, Any]:
    scores = [run.score for run in method.runs]
    row: dict[str, Any] = {
        "variant": list(method.variant),
        "system": method.system,
        "runs": len(scores),
        "unfinished": len(method.unfinished),
        "score": statistics.fmean(scores),
        "score_sd": deviation(scores),
        "lowest": min(scores),
        "highest": max(scores),
        "failed": statistics.fmean(is_failed(score, trivial) for score in scores),
    }
    for key in _COSTS:
        values = [getattr(run, key) for run in method.runs]
        row[key] = None if None in values else statistics.fmean(values)
        if row[key] == values[0]:
            row[key] = values[0]  # the same number for each seed stays the integer it is
    none = Difference(None, None, None)
    gain = none if method is first else welch(scores, [run.score for run in first.runs])
    row |= dict(zip(_DIFFERENCE, gain, strict=True))
    return row
