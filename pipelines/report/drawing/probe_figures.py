"""Figures of probes: layer × task heat maps, and accuracy over layers."""

from __future__ import annotations

from collections.abc import Sequence

from bertvision.pipelines.report.drawing.figures import Row, panels
from bertvision.pipelines.report.drawing.svg import (
    SERIES,
    SHAPES,
    Canvas,
    Plot,
    round_range,
    shortened,
    text_width,
)
from bertvision.pipelines.results.columns import signed

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
    for j, layer in enumerate(layers):
        if cell >= 15 or j % 2 == 0:
            c.text(left + cell * (j + 0.5), _TOP - 8, f"{layer}", anchor="middle", cls="tick")
    for i, task in enumerate(tasks):
        y = _TOP + _HIGH * i
        c.text(0, y + _HIGH / 2 + 4, shortened(task, left - 6))
        for r in rows:
            if r["dataset"] == task:
                _cell(c, r, left + cell * layers.index(int(r["layers"])), y, cell, most)
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

    def panel(c: Canvas, task: str, box: tuple[float, float, float, float]) -> None:
        found = [r for r in rows if r["dataset"] == task and r[by] in names]
        found = [r for r in found if r[value] is not None]
        guess = 0.0 if gains else found[0]["majority"]
        low, high = round_range([r[end] for r in found for end in (below, above)] + [guess])
        y_range = (low, high) if gains else (max(0.0, low), min(high, 100.0))
        p = Plot(c, *box, (layers[0] - 0.3, layers[-1] + 0.3), y_range)
        p.axes([(v, f"{v}") for v in layers], "layer (0 = embedding output)", label)
        c.line(p.left, p.y(guess), p.right, p.y(guess), "reference")
        for i, name in enumerate(names):
            line = sorted((r for r in found if r[by] == name), key=lambda r: int(r["layers"]))
            places = [(p.x(int(r["layers"])), p.y(r[value])) for r in line]
            if len(places) > 1:
                c.path(places, f"line {_class(i, name)}")
            for r, (x, y) in zip(line, places, strict=True):
                c.line(x, p.y(r[below]), x, p.y(r[above]), f"line s{i}")
                c.marker(SHAPES[i % len(SHAPES)], x, y, f"point s{i}", tip=probe_tip(r))

    entries = [
        (str(name), _class(i, name), SHAPES[i % len(SHAPES)]) for i, name in enumerate(names)
    ]
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


def _cell(c: Canvas, r: Row, x: float, y: float, cell: float, most: float) -> None:
    gain = gained(r)
    cls = "cell s1" if gain < 0 else "cell s0"
    strength = 0.06 + 0.5 * abs(gain) / (most or 1)
    c.rect(x + 1, y + 1, cell - 2, _HIGH - 2, cls, tip=probe_tip(r), opacity=strength)
    if r["best"]:
        corners = [(x + 2, y + 2), (x + cell - 2, y + 2), (x + cell - 2, y + _HIGH - 2)]
        corners += [(x + 2, y + _HIGH - 2), (x + 2, y + 2)]
        c.path(corners, "line s6")
    middle, two = x + cell / 2, cell >= 38
    if cell >= 27:
        score = f"{r['accuracy']:.1f}"
        c.text(middle, y + (14 if two else 21), score, anchor="middle", cls="small")
    if two:
        c.text(middle, y + 28, signed(gain), anchor="middle", cls="small")


def gained(r: Row) -> float:
    """Accuracy less the twin's, or the majority's where there is no twin."""
    gain = r["difference"]
    return float(r["accuracy"] - r["majority"] if gain is None else gain)


def _class(i: int, name: str) -> str:
    return f"s{i} dashed" if name == "untrained" else f"s{i}"
