"""One table of methods: mean and spread over seeds, failed runs, costs, the difference."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bertvision.pipelines.repeats.methods import Method, check_comparable, read_method
from bertvision.pipelines.repeats.statistics import is_failed, welch
from bertvision.pipelines.uncertainty import deviation

_COSTS = (
    *("trained_parameters", "kept_bytes"),
    *("fine_tuning_seconds", "extraction_seconds", "training_seconds"),
)


def spread(folders: Sequence[str]) -> dict[str, Any]:
    """Read methods, and compare each with the first.

    Args:
        folders: as of `read_method`, one at least.

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
    found = welch(scores, [run.score for run in first.runs]) if method is not first else None
    row["difference"] = None if found is None else found.value
    row["difference_low"] = None if found is None else found.low
    row["difference_high"] = None if found is None else found.high
    row["no_interval"] = None if found is None else found.why
    return row
