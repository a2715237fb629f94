"""Methods as a table: its columns, what each row shows, and what stands above and below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.scores import CORRELATIONS, METRICS

LEGEND = (
    "Mean ± standard deviation over the runs of a method, which differ in their seed alone; "
    "failed: runs that are not above the trivial answer (Mosbach et al. 2021). The 95 % interval "
    "of the difference (Welch's t) is over seeds alone, on these examples: it does not say what "
    "other examples would give."
)
"""Legend of the columns."""


def basis(found: Mapping[str, Any]) -> str:
    """Sentence on the kind of the scores.

    Args:
        found: fields of `spread.spread`.
    """
    return (
        f"{found['task']}, {METRICS[found['metric']]} on dev, in per cent; trivial answer: "
        f"{found['baseline_name']} {found['baseline'] or 0.0:.1f}"
    )


def name_of(metric: str) -> str:
    """A metric as sentences call it.

    Args:
        metric: its key.
    """
    return METRICS[metric] + (" correlation" if metric in CORRELATIONS else "")


def axis_of(metric: str) -> str:
    """The name of a metric with its unit.

    Args:
        metric: its key.
    """
    return f"{name_of(metric)} ({'× 100' if metric in CORRELATIONS else '%'})"


def columns(found: Mapping[str, Any]) -> list[Column]:
    """The columns; no difference of one method alone, and no time of heads where there are none.

    Args:
        found: fields of `spread.spread`.
    """
    rows = found["rows"]
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
        Column("score", METRICS[found["metric"]], sd=True),
        Column("lowest", "lowest"),
        Column("highest", "highest"),
        Column("failed", "failed", "share"),
        *[difference][: len(rows) > 1],
        Column("trained_parameters", "trained", digits=0),
        Column("kept_bytes", "kept", "size"),
        Column("fine_tuning_seconds", "fine-tuning s"),
        *(heads if any(row["training_seconds"] for row in rows) else []),
    ]


def shown(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with their variants as one types them, None where there is none.

    Args:
        found: fields of `spread.spread`.
    """
    return [{**row, "variant": ",".join(row["variant"]) or None} for row in found["rows"]]


def remarks(found: Mapping[str, Any]) -> list[str]:
    """Why a difference has no interval; then which seeds are without a score, and what makes it.

    Args:
        found: fields of `spread.spread`.
    """
    without: dict[str, list[str]] = {}
    for row in found["rows"]:
        if row["no_interval"] is not None:
            without.setdefault(row["no_interval"], []).append(row["method"])
    return [
        *(f"No interval of {', '.join(names)}: {why}." for why, names in without.items()),
        *(
            f"Not finished: {seed['method']}, seed {seed['seed']}: `{seed['command']}`"
            for seed in found["unfinished"]
        ),
    ]
