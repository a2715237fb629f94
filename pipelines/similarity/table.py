"""Similarities as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.similarity.metrics import ALL, MEAN, WEIGHTED
from bertvision.pipelines.similarity.rows import notes
from bertvision.pipelines.text import format_table

_LEGEND = (
    "Correlations × 100 over all pairs of a data set, with 95 % intervals over pairs; mean and "
    "weighted: the mean\nSpearman over sub-sets, and that weighted by their pairs. *: the layer "
    "with the highest score on the pairs that are chosen on."
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each scorer, snapshot, pooling and input; sub-sets are in ``--json`` and CSV.

    Args:
        rows: see `similarity_rows`, as they are.
    """

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[k] for k in ("dataset", "target", "scorer", "tag", "pooling", "layers"))

    means = {(*key(row), row["subset"]): row["spearman"] for row in rows}
    header = ["data", "scorer", "snapshot", "pool", "layers", "pairs", "Spearman", "95 % interval"]
    header += ["mean", "weighted", "Pearson", "95 % interval", "MSE", "accuracy", "95 % interval"]
    lines = [
        [
            row["dataset"] + (" (entailment)" if row["target"] == "entailment" else ""),
            row["scorer"],
            row["tag"] or "-",
            row["pooling"] or "-",
            (row["layers"] or "-") + (" *" if row["best"] else ""),
            f"{row['pairs']:,}",
            *_with_interval(row, "spearman"),
            _number(means.get((*key(row), MEAN))),
            _number(means.get((*key(row), WEIGHTED))),
            *_with_interval(row, "pearson"),
            _number(row["mse"], "{:.3f}"),
            *_with_interval(row, "accuracy"),
        ]
        for row in rows
        if row["subset"] == ALL
    ]
    kept = [i for i in range(len(header)) if any(line[i] != "-" for line in lines)]
    text = format_table([header[i] for i in kept], [[line[i] for i in kept] for line in lines])
    return "\n".join([f"{text}\n\n{_LEGEND}", *notes(rows)])


def _with_interval(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    value, low, high, sd = (row[f"{name}{end}"] for end in ("", "_low", "_high", "_sd"))
    told = _number(value) + ("" if sd is None else f" ± {sd:.1f}")
    return told, "-" if low is None else f"{low:.1f} to {high:.1f}"


def _number(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)
