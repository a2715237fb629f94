"""What is told of each ranking: means, intervals over questions, and the difference from BM25."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.ranking.metrics import (
    Candidates,
    Floats,
    Metrics,
    expected_at_random,
    summary,
)
from bertvision.pipelines.ranking.records import Ranking
from bertvision.pipelines.text import format_table
from bertvision.pipelines.uncertainty import format_p, paired_bootstrap

Row = dict[str, Any]


def system_row(
    records: Sequence[Ranking], baseline: Ranking | None, *, resamples: int, **names: Any
) -> Row:
    """A row of the table: one scorer with one input, over its seeds.

    A question's score is its mean over seeds. Questions are drawn with replacement for the 95 %
    interval of the MAP and, paired with BM25's, of the difference (`paired_bootstrap`).

    Args:
        records: a seed each.
        baseline: BM25's; None where this is BM25 itself.
        resamples: how often questions are drawn.
        **names: what the system is, the first fields of the row.
    """
    ap = 100 * np.mean([record.ap for record in records], axis=0)
    maps = over_seeds([record.metrics["test"]["map"] for record in records])
    dev = [record.metrics["dev"]["map"] for record in records if "dev" in record.metrics]
    interval = paired_bootstrap(ap, np.zeros_like(ap), resamples=resamples)
    row: Row = {
        **names,
        "seeds": len(records),
        "epochs": [record.epoch for record in records],
        "dev_map": float(np.mean(dev)) if dev else None,
        **_means([record.metrics["test"] for record in records]),
        "map_low": interval.low,
        "map_high": interval.high,
        "map_sd_over_seeds": maps.std,
    }
    if baseline is not None:
        row |= _difference(ap, 100 * baseline.ap, resamples)
    return row


def random_row(dev: Candidates | None, test: Candidates, **names: Any) -> Row:
    """The row of a random order: exact expectations."""

    def expected(part: Candidates) -> Metrics:
        return summary(expected_at_random(part.label, part.question), len(part.questions))

    return {
        **names,
        "dev_map": expected(dev).map if dev is not None else None,
        **expected(test)._asdict(),
    }


def mark_best(rows: Sequence[Row], same: Sequence[str]) -> None:
    """Set ``best`` in every row: whether its MAP on dev is the highest of its group.

    The choice never sees test, so that the MAP of the row it falls on is no maximum of many.

    Args:
        rows: of systems.
        same: fields that the rows of a group have in common.
    """
    tops: dict[tuple[Any, ...], float] = {}
    for row in rows:
        group = tuple(row[field] for field in same)
        tops[group] = max(tops.get(group, -1.0), -1.0 if row["dev_map"] is None else row["dev_map"])
    for row in rows:
        row["best"] = row["dev_map"] == tops[tuple(row[field] for field in same)]


def table(result: Row) -> str:
    """The rows for a terminal, BM25 first, and what the columns leave out."""
    header = ["system", "checkpoint", "pool", "layers", "dev MAP", "MAP", "95 % interval"]
    header += ["MRR", "P@1", "− BM25", "95 % interval", "p"]
    lines = [format_table(header, [_cells(row, result["resamples"]) for row in result["rows"]]), ""]
    first = result["rows"][0]
    lines.append(f"test: {first['questions']:,} questions with a positive passage")
    if without := first["without_positive"]:
        lines[-1] += f"; {without:,} without one are left out (counted as 0 in --json, --csv)"
    if any(row.get("best") for row in result["rows"]):
        lines.append("*: the layers with the highest MAP on dev, of each system and pooling")
    return "\n".join(lines)


def _cells(row: Row, resamples: int) -> list[str]:
    def number(key: str, form: str = "{:.1f}") -> str:
        value = row.get(key)
        return "-" if value is None else form.format(value)

    def interval(prefix: str, form: str) -> str:
        low, high = (number(f"{prefix}_{end}", form) for end in ("low", "high"))
        return "-" if low == "-" else f"{low} to {high}"

    deviation = row.get("map_sd_over_seeds")
    return [
        row["system"],
        row.get("checkpoint") or "-",
        row.get("pooling") or "-",
        (row.get("layers") or "-") + (" *" if row.get("best") else ""),
        number("dev_map"),
        number("map") + ("" if deviation is None else f" ± {deviation:.1f}"),
        interval("map", "{:.1f}"),
        number("mrr"),
        number("p1"),
        number("difference", "{:+.1f}"),
        interval("difference", "{:+.1f}"),
        format_p(row["p"], resamples) if "p" in row else "-",
    ]


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Each field of `Metrics` over seeds; counts are the same in all."""
    means = {k: float(np.mean([m[k] for m in metrics])) for k in Metrics._fields}
    return means | {k: int(means[k]) for k in ("questions", "without_positive")}


def _difference(ap: Floats, baseline: Floats, resamples: int) -> dict[str, float]:
    found = paired_bootstrap(ap, baseline, resamples=resamples)
    return {
        "difference": found.difference,
        "difference_low": found.low,
        "difference_high": found.high,
        "p": found.p,
    }


class Spread(NamedTuple):
    """Scores of the same system with different seeds."""

    mean: float
    std: float | None
    """Deviation of the sample (n − 1 in the denominator); None for a single seed."""
    n: int


def over_seeds(scores: Sequence[float]) -> Spread:
    """Mean and standard deviation of one system's scores with different seeds.

    Raises:
        InputError: there are none.
    """
    if not scores:
        raise InputError("no scores to take a mean of: evaluate at least one seed")
    std = statistics.stdev(scores) if len(scores) > 1 else None
    return Spread(math.fsum(scores) / len(scores), std, len(scores))
