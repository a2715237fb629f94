"""Methods that are one variant with ever other numbers, such as freeze:1 and freeze:2: a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.drawing.figures import legend, sample, series
from bertvision.pipelines.drawing.svg import Canvas, Plot, round_range, ticks

FEWEST = 3
"""Numbers that make a curve."""
_HEIGHT = 260.0


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


def draw_curves(c: Canvas, found: Mapping[str, Any], y_label: str) -> None:
    """Add a plot for each variant with numbers below what a canvas has; see `numbered`.

    Args:
        c: becomes higher.
        found: fields of `spread.spread`.
        y_label: name of the score with its unit.
    """
    trivial = found["baseline"] or 0.0
    plain = [
        row for row in found["rows"] if not row["variant"] and row["system"].startswith("bert:")
    ]
    for name, rows in numbered(found["rows"]).items():
        ends = (rows[0]["number"] - 0.3, rows[-1]["number"] + 0.3)
        of = {row["method"]: row["number"] for row in rows}
        runs = [run for run in found["runs"] if run["method"] in of]
        shown = [trivial, *(run["score"] for run in runs), *(row["score"] for row in plain)]
        top = c.height + 44
        p = Plot(c, 44, top, c.width - 10, top + _HEIGHT, ends, round_range(shown))
        places = [value for value in ticks(*ends, most=12) if value == int(value)]
        p.axes([(value, f"{value:g}") for value in places], f"K of {name}:K", y_label)
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
        c.height = legend(c, entries, top + _HEIGHT + 46, c.width)
