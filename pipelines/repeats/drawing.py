"""The runs of methods as points, a row for each, with their mean and the trivial answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.drawing.figures import WIDE, Figure, legend, titled
from bertvision.pipelines.drawing.svg import (
    Canvas,
    Plot,
    round_range,
    shortened,
    text_width,
    ticks,
)
from bertvision.pipelines.repeats.numbered import curve, numbered
from bertvision.pipelines.repeats.table import axis_of, name_of

_RADIUS = 4.0
SEEN = (
    "A row for each method: a point for each run, a bar at their mean; runs that are not right of "
    "the dotted line learned nothing."
)
"""What the figure of the runs says."""
_BELOW = " Methods that are one variant with three numbers or more have a curve below."
_BETWEEN = 20.0


def spread_figure(found: Mapping[str, Any]) -> Figure:
    """The figure of what `spread.spread` gives.

    Args:
        found: its fields.
    """
    c = draw_runs(found, WIDE)
    for rows in numbered(found["rows"]).values():
        below = curve(found, rows, WIDE)
        c.put(below, 0, c.height + _BETWEEN)
        c.height += _BETWEEN + below.height
    return titled(title_of(found), SEEN + _BELOW, c)


def title_of(found: Mapping[str, Any]) -> str:
    """What the figure of the runs is.

    Args:
        found: fields of `spread.spread`.
    """
    runs = sum(row["runs"] for row in found["rows"])
    return f"{found['task']}, {name_of(found['metric'])} on dev of {runs:,} runs"


def draw_runs(found: Mapping[str, Any], width: float) -> Canvas:
    """A row for each method, a point for each of its runs.

    Args:
        found: fields of `spread.spread`.
        width: px.
    """
    rows, metric = found["rows"], found["metric"]
    baseline = found["baseline"] or 0.0
    scores = [[run for run in found["runs"] if run["method"] == row["method"]] for row in rows]
    written = [_mean(row) for row in rows]
    left = min(260.0, 0.4 * width, max(text_width(row["method"]) for row in rows) + 14)
    right = width - max(map(text_width, written)) - 14
    c = Canvas(width, 0)
    name = f"{found['baseline_name']} ({baseline:.1f})"
    entries = [("run", "s0", "circle"), ("mean", "s1", "bar"), (name, "reference", "")]
    top = legend(c, entries, 0, width, lines=False) + 10
    x_range = round_range([baseline, *(run["score"] for of in scores for run in of)])
    scale = Plot(c, left, 0, right, 1, x_range, (0, 1))
    places = [_apart([scale.x(run["score"]) for run in of]) for of in scores]
    heights = [30.0 + 2 * max(map(abs, of)) for of in places]
    bottom = top + sum(heights)
    c.height = bottom + 40
    for value in ticks(*x_range):
        c.line(scale.x(value), top, scale.x(value), bottom, "grid")
        c.text(scale.x(value), bottom + 16, f"{value:g}", anchor="middle", cls="tick")
    c.line(scale.x(baseline), top, scale.x(baseline), bottom, "reference")
    c.text((left + right) / 2, bottom + 34, axis_of(metric), anchor="middle")
    for row, of, offsets, text, height in zip(rows, scores, places, written, heights, strict=True):
        y = top + height / 2
        c.text(0, y + 4, shortened(row["method"], left - 8), cls="halo")
        c.rect(
            scale.x(row["score"]) - 1.5,
            y - height / 2 + 4,
            3,
            height - 8,
            "bar s1",
            tip=f"{row['method']}: {text}",
        )
        for run, offset in zip(of, offsets, strict=True):
            tip = f"{row['method']}, seed {run['seed']}: {run['score']:.2f}"
            at = scale.x(run["score"])
            c.marker("circle", at, y + offset, "point s0", r=_RADIUS, tip=tip)
        c.text(width, y + 4, text, anchor="end", cls="halo")
        top += height
    return c


def _mean(row: Mapping[str, Any]) -> str:
    sd = row["score_sd"]
    return f"{row['score']:.1f}".replace("-", "−") + ("" if sd is None else f" ± {sd:.1f}")


def _apart(places: Sequence[float]) -> list[float]:
    """Offsets, px, that keep points beside each other where one would lie on another.

    Args:
        places: along the scale, px.
    """
    step = 2 * _RADIUS
    taken: list[tuple[float, int]] = []
    for place in places:
        near = {level for other, level in taken if abs(other - place) < step}
        levels = (sign * n for n in range(len(near) + 1) for sign in (1, -1))
        taken.append((place, next(level for level in levels if level not in near)))
    return [level * step for _, level in taken]
