"""Methods that are one variant with ever other numbers, such as freeze:1 and freeze:2: a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.drawing.figures import legend, sample, series
from bertvision.pipelines.drawing.svg import Canvas, Plot, round_range, ticks
from bertvision.pipelines.repeats.table import axis_of

FEWEST = 3
"""Numbers that make a curve."""
_TOP, _HEIGHT = 24.0, 260.0


def numbered(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By name of a variant the methods that are it with a number, and nothing else.

    Args:
        rows: of methods, as `spread.spread` gives them.

    Returns:
        The rows with ``kind``, the name, and ``number``, in its order; of variants with three whole
        numbers at least, each once, so that nothing else tells the rows apart.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name, _, number = row["variant"][0].partition(":") if row["variant"] else ("", "", "")
        own = len(row["variant"]) == 1 and row["system"].startswith("bert:")
        if own and number.isdecimal():
            found.setdefault(name, []).append({**row, "kind": name, "number": int(number)})
    return {
        name: sorted(of, key=lambda row: row["number"])
        for name, of in found.items()
        if len({row["number"] for row in of}) == len(of) >= FEWEST
    }


def curve(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], width: float) -> Canvas:
    """A variant with ever other numbers: its runs and their means over the number.

    Args:
        found: fields of `spread.spread`.
        rows: of the variant, as `numbered` gives them.
        width: px.
    """
    trivial, name = found["baseline"] or 0.0, rows[0]["kind"]
    plain = [
        row for row in found["rows"] if not row["variant"] and row["system"].startswith("bert:")
    ]
    c = Canvas(width, 0)
    ends = (rows[0]["number"] - 0.3, rows[-1]["number"] + 0.3)
    of = {row["method"]: row["number"] for row in rows}
    runs = [run for run in found["runs"] if run["method"] in of]
    shown = [trivial, *(run["score"] for run in runs), *(row["score"] for row in plain)]
    p = Plot(c, 44, _TOP, width - 10, _TOP + _HEIGHT, ends, round_range(shown))
    places = [value for value in ticks(*ends, most=12) if value == int(value)]
    p.axes([(value, f"{value:g}") for value in places], f"K of {name}:K", axis_of(found["metric"]))
    c.line(p.left, p.y(trivial), p.right, p.y(trivial), "reference")
    entries = [("run", "faint", "circle"), sample(1, "mean")]
    for i, row in enumerate(plain, 2):
        tip = f"{row['method']}: {row['score']:.1f}"
        series(p, i, [(x, row["score"]) for x in ends], [tip, tip], cls="dashed")
        entries.append(sample(i, tip, "dashed"))
    for run in runs:
        tip = f"{run['method']}, seed {run['seed']}: {run['score']:.2f}"
        c.marker("circle", p.x(of[run["method"]]), p.y(run["score"]), "faint", r=3, tip=tip)
    means = [(row["number"], row["score"]) for row in rows]
    series(p, 1, means, [f"{row['method']}: {row['score']:.1f}" for row in rows])
    entries.append((f"{found['baseline_name']} ({trivial:.1f})", "reference", ""))
    c.height = legend(c, entries, p.bottom + 46, width)
    return c
