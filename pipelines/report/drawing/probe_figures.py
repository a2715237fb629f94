"""Figures of probes: layer × task heat maps, and accuracy over layers."""

from __future__ import annotations

from collections.abc import Sequence

from bertvision.pipelines.drawing.figures import Box, panels, sample, series
from bertvision.pipelines.drawing.heat import Cell, heat_map
from bertvision.pipelines.drawing.layers import layer_plot
from bertvision.pipelines.drawing.svg import (
    SERIES,
    Canvas,
    round_range,
    shortened,
    text_width,
)
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.text import signed

_TOP, _HIGH = 24.0, 34.0


def layer_map(rows: Sequence[Row], tasks: Sequence[str], most: float, width: float) -> Canvas:
    """Task × layer of one snapshot, coloured by what was gained.

    Cells carry the accuracy and below it, where there is room, the difference from the untrained
    twin, or where there is none from the majority, which is also their colour. The best layer is
    framed.

    Args:
        rows: of single layers, one pooling and one kind of probe.
        tasks: the data sets, from top to bottom.
        most: difference that has the full colour, the same for all snapshots.
        width: px.
    """
    layers = sorted({int(r["layers"]) for r in rows})
    longest = max(text_width(task) for task in tasks) + 10
    left = min(longest, 160.0 if width > 500 else 96.0)
    cell = min(74.0, (width - left - 6) / len(layers))  # the last label is wider than its cell
    c = Canvas(width, _TOP + _HIGH * len(tasks))
    c.text(0, _TOP - 8, "layer →", cls="tick")
    found = {
        (tasks.index(r["dataset"]), layers.index(int(r["layers"]))): r
        for r in rows
        if r["dataset"] in tasks
    }
    cells = {at: _cell(r, most, cell) for at, r in found.items()}
    titles = [shortened(task, left - 6) for task in tasks], [str(layer) for layer in layers]
    heat_map(c, (left, _TOP), (cell, _HIGH), *titles, cells)
    for (i, j), r in found.items():
        if r["best"]:
            x, y, far, low = left + cell * j + 2, _TOP + _HIGH * i + 2, cell - 4, _HIGH - 4
            corners = [(0.0, 0.0), (far, 0.0), (far, low), (0.0, low), (0.0, 0.0)]
            c.path([(x + dx, y + dy) for dx, dy in corners], "line s6")
    return c


def layer_curves(
    rows: Sequence[Row],
    tasks: Sequence[str],
    by: str,
    names: Sequence[str],
    value: str,
    width: float,
) -> Canvas:
    """A panel for each task: a score over layers with its interval, a line for each of some names.

    Args:
        rows: of single layers and one kind of probe; of one pooling, or of one snapshot.
        tasks: the data sets, a panel each.
        by: what lines differ in, ``tag`` or ``pooling``.
        names: of the lines, in order; at most `SERIES`. Every task has a row of one of them.
        value: ``accuracy``, with the majority as reference, or ``difference``, with zero.
        width: px.
    """
    layers = sorted({int(r["layers"]) for r in rows})
    gains = value == "difference"
    below, above = ("difference_low", "difference_high") if gains else ("low", "high")
    label = "difference from untrained (points)" if gains else "accuracy (%)"

    def panel(c: Canvas, task: str, box: Box) -> None:
        found = [r for r in rows if r["dataset"] == task and r[by] in names]
        found = [r for r in found if r[value] is not None]
        guess = 0.0 if gains else found[0]["majority"]
        low, high = round_range([r[end] for r in found for end in (below, above)] + [guess])
        y_range = (low, high) if gains else (max(0.0, low), min(high, 100.0))
        p = layer_plot(c, box, layers, y_range, label)
        c.line(p.left, p.y(guess), p.right, p.y(guess), "reference")
        for i, name in enumerate(names):
            line = sorted((r for r in found if r[by] == name), key=lambda r: int(r["layers"]))
            points = [(int(r["layers"]), r[value]) for r in line]
            for r, (layer, _) in zip(line, points, strict=True):
                c.line(p.x(layer), p.y(r[below]), p.x(layer), p.y(r[above]), f"line s{i}")
            series(p, i, points, [probe_tip(r) for r in line], cls=_dashed(name))

    entries = [sample(i, str(name), _dashed(name)) for i, name in enumerate(names)]
    reference = ("as the untrained twin" if gains else "majority", "reference", "")
    return panels([(task, task) for task in tasks], panel, [*entries, reference], width)


def shown_lines(names: Sequence[str]) -> list[str]:
    """As many names as a figure has lines for: the untrained twin, and the last of the others."""
    twin = [name for name in names if name == "untrained"]
    others = [name for name in names if name not in twin]
    return [*others[-(SERIES - len(twin)) :], *twin]


def probe_tip(r: Row) -> str:
    """What shows where the pointer rests on a probe's mark."""
    gain = ""
    if r["difference"] is not None:
        low, high = signed(r["difference_low"]), signed(r["difference_high"])
        gain = f", {signed(r['difference'])} [{low}, {high}] against untrained"
    return (
        f"{r['dataset']}, {r['tag']}, {r['pooling']}, layer {r['layers']}: {r['accuracy']:.1f} "
        f"[{r['low']:.1f}, {r['high']:.1f}]{gain}"
    )


def _cell(r: Row, most: float, width: float) -> Cell:
    gain = gained(r)
    texts = [f"{r['accuracy']:.1f}", signed(gain)][: (width >= 27) + (width >= 38)]
    cls = "s1" if gain < 0 else "s0"
    return Cell(cls, 0.06 + 0.5 * abs(gain) / (most or 1), texts, probe_tip(r))


def gained(r: Row) -> float:
    """Accuracy less the twin's, or the majority's where there is no twin."""
    gain = r["difference"]
    return float(r["accuracy"] - r["majority"] if gain is None else gain)


def _dashed(name: str) -> str:
    return "dashed" if name == "untrained" else ""
