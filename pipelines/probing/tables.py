"""Probes for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertvision.pipelines.probing.summary import Row, by_snapshot
from bertvision.pipelines.text import format_table

LEGEND = (
    "Accuracy in per cent on the scored examples, of the layer that does best on held-out ones "
    "(@ layer);\nin brackets the difference from the untrained twin."
)


def probes_table(rows: Sequence[Row]) -> str:
    """A line for each data set and snapshot: the best layer of each pooling.

    Args:
        rows: see `probe_rows`.
    """
    poolings = list(dict.fromkeys(row["pooling"] for row in rows))
    joined = list(dict.fromkeys(r["layers"] for r in rows if "+" in r["layers"]))
    kinds = {row["probe"] for row in rows}
    header = ["data", "snapshot", *(["probe"] if len(kinds) > 1 else []), "majority"]
    header += [*poolings, *(f"{p} {text}" for text in joined for p in poolings)]
    extra = {"selectivity": "{:.1f}", "compression": "{:.2f}"}
    shown = [name for name in extra if any(row[name] is not None for row in rows)]
    header += [f"{name} {p}" for name in shown for p in poolings]
    lines = []
    for (dataset, kind, _, tag), found in by_snapshot(rows).items():
        line = [dataset, tag, *([kind] if len(kinds) > 1 else [])]
        line.append(f"{found[0]['majority']:.1f}")
        best = {r["pooling"]: r for r in found if r["best"]}
        line += [_cell(best.get(p), layer=True) for p in poolings]
        for text in joined:
            of = {r["pooling"]: r for r in found if r["layers"] == text}
            line += [_cell(of.get(p), layer=False) for p in poolings]
        for name in shown:
            line += [_maybe(best.get(p), name, extra[name]) for p in poolings]
        lines.append(line)
    return f"{format_table(header, lines)}\n\n{LEGEND}"


def _cell(row: Row | None, *, layer: bool) -> str:
    if row is None:
        return "-"
    gain = "" if row["difference"] is None else f" ({row['difference']:+.1f})"
    return f"{row['accuracy']:.1f}{gain}" + (f" @{row['layers']}" if layer else "")


def _maybe(row: Row | None, key: str, form: str) -> str:
    value: Any = None if row is None else row[key]
    return "-" if value is None else form.format(value)
