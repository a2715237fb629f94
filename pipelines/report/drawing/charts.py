"""Figures without lines: heat maps of snapshots, points, bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.drawing.dots import Dot, DotRow, dot_rows
from bertvision.pipelines.drawing.figures import Box, legend, panels
from bertvision.pipelines.drawing.heat import Cell, heat_map
from bertvision.pipelines.drawing.svg import (
    Canvas,
    Labels,
    Plot,
    round_range,
    shortened,
    text_width,
    ticks,
)
from bertvision.pipelines.report.drawing.curves import tip
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.text import signed

PARTS = (
    ("fine-tuning", "fine_tuning_seconds"),
    ("extraction", "extraction_seconds"),
    ("training", "training_seconds"),
)


def snapshot_map(heads: Sequence[Row], names: Sequence[str], width: float) -> Canvas:
    """A panel for each head: snapshot trained on × snapshot evaluated on.

    Cells carry the score and below it the difference from BERT, which is also their colour.

    Args:
        heads: rows of heads trained on all examples.
        names: the heads to draw.
        width: px.
    """
    rows = [r for r in heads if r["name"] in names]
    on = sorted({SnapshotTag(r["trained_on"]) for r in rows})
    at = sorted({SnapshotTag(r["checkpoint"]) for r in rows})
    most = max((abs(r["difference"]) for r in rows if r["difference"] is not None), default=1) or 1
    left, gap = 46.0, 24.0
    room = width / 2 if width > 500 else width
    cell = min(76.0, (room - left - gap) / len(at))
    columns = max(1, int((width + gap) // (left + cell * len(at) + gap)))
    high = 40.0 if cell >= 44 else 26.0
    panel_w, panel_h = (width + gap) / columns, 58 + high * len(on) + 40
    c = Canvas(width, panel_h * math.ceil(len(names) / columns))
    for k, name in enumerate(names):
        x0, y0 = left + panel_w * (k % columns), 58 + panel_h * (k // columns)
        c.text(x0 - left, y0 - 42, shortened(name, panel_w - gap, bold=True), cls="strong")
        c.text(x0 - left, y0 - 24, "evaluated on →")
        c.text(x0 - left, y0 + high * len(on) + 16, "↑ trained on")
        cells = {
            (on.index(SnapshotTag(r["trained_on"])), at.index(SnapshotTag(r["checkpoint"]))): _cell(
                r, most, two=high > 30
            )
            for r in rows
            if r["name"] == name
        }
        heat_map(c, (x0, y0), (cell, high), list(map(str, on)), list(map(str, at)), cells)
    return c


def parameters(rows: Sequence[Row], bert: Sequence[Row], label: str, width: float) -> Canvas:
    """Score over parameters on a log scale, a panel for each snapshot.

    Args:
        rows: rows of heads evaluated on the snapshot they were trained on, with ``percent``.
        bert: rows of BERT.
        label: of the score, with its unit.
        width: px.
    """
    tags = sorted({SnapshotTag(r["checkpoint"]) for r in rows})[-4:]
    rows = [r for r in rows if r["checkpoint"] in tags]
    by_tag = {r["checkpoint"]: r for r in bert}
    low = 10.0 ** math.floor(math.log10(min(r["percent"] for r in rows)))
    decades = [10.0**e for e in range(round(math.log10(low)), 3)]
    y_range = round_range(
        [r["score"] for r in rows] + [by_tag[t]["score"] for t in tags if t in by_tag]
    )

    def panel(c: Canvas, tag: str, box: Box) -> None:
        p = Plot(c, *box, (low * 0.7, 190), y_range, log_x=True)
        p.axes([(v, f"{v:g}") for v in decades], "parameters (% of the encoder, log scale)", label)
        found = sorted(
            (r for r in rows if r["checkpoint"] == tag), key=lambda r: (r["percent"], -r["score"])
        )
        places = [(p.x(r["percent"]), p.y(r["score"])) for r in found]
        reference = by_tag.get(tag)
        if reference:
            at = p.x(100), p.y(reference["score"])
            c.line(p.left, at[1], p.right, at[1], "reference")
            places.append(at)
        labels = Labels(p, places)
        if reference:
            labels.add(*at, "BERT", cls="strong halo")
            c.marker("square", *at, "point s0", tip=tip(reference))
        front = -math.inf
        for r, (x, y) in zip(found, places, strict=False):
            best = r["score"] > front
            front = max(front, r["score"])
            c.marker("circle", x, y, "point s1" if best else "faint", tip=tip(r))
            if best:
                labels.add(x, y, r["name"], cls="halo")

    entries = [
        ("best of its size or smaller", "s1", "circle"),
        ("other head", "faint", "circle"),
        ("BERT", "s0", "square"),
    ]
    titles = [(str(tag), f"trained and evaluated on {tag}") for tag in tags]
    return panels(titles, panel, entries, width, lines=False)


def stacked_time(rows: Sequence[Row], width: float) -> Canvas:
    """Seconds of each system, stacked: fine-tuning, extraction, training.

    Args:
        rows: with the keys of `PARTS` and ``title``.
        width: px.
    """
    unit, size = _time_unit(max(_total(r) for r in rows))
    wide = width > 500
    left = min(330.0, max(text_width(r["title"]) for r in rows) + 10) if wide else 4.0
    step = 28.0 if wide else 42.0
    c = Canvas(width, 0)
    bottom = 10 + step * len(rows)
    entries = [(name, f"s{i}", "bar") for i, (name, _) in enumerate(PARTS)]
    c.height = legend(c, entries, bottom + 44, width)
    high = max(_total(r) for r in rows) / size
    p = Plot(c, left, 0, width - 80, bottom, (0, high), (0, 1))
    for value in ticks(0, high, 6 if wide else 4):
        c.line(p.x(value), 4, p.x(value), bottom, "grid")
        c.text(p.x(value), bottom + 16, f"{value:g}", anchor="middle", cls="tick")
    c.line(left, 4, left, bottom, "axis")
    c.text((left + p.right) / 2, bottom + 34, f"wall time ({unit})", anchor="middle")
    for k, r in enumerate(rows):
        y = 8 + step * k + (0 if wide else 15)
        if wide:
            c.text(left - 8, y + 14, shortened(r["title"], left - 8), anchor="end")
        else:
            c.text(8, y - 3, shortened(r["title"], width - 8), cls="halo")
        x = left
        for i, (name, key) in enumerate(PARTS):
            if part := r[key]:
                w = p.x(part / size) - left
                text = f"{r['title']}: {name} {part:,.0f} s"
                c.rect(x, y, max(w, 0.5), 20, f"bar s{i}", tip=text)
                x += w
        more = "" if r["seconds"] is not None else " + ?"
        c.text(x + 6, y + 14, f"{_total(r) / size:.3g} {unit}{more}", cls="tick")
    return c


def group_dots(rows: Sequence[Row], systems: Sequence[str], label: str, width: float) -> Canvas:
    """Scores of systems in groups of questions, a row of points for each group.

    Args:
        rows: with ``group`` (the heading), ``value``, ``questions`` and a score for each system.
        systems: keys of the scores; the first is BERT.
        label: of the score, with its unit.
        width: px.
    """
    found: dict[str, list[DotRow]] = {}
    for r in rows:
        dots = [Dot(i, r[s]) for i, s in enumerate(systems) if r.get(s) is not None]
        row = DotRow(f"{r['value']} (n = {r['questions']:,})", dots)
        found.setdefault(r["group"], []).append(row)
    return dot_rows(found, systems, label, width)


def _cell(r: Row, most: float, *, two: bool) -> Cell:
    difference = r["difference"]
    texts = [f"{r['score']:.1f}"]
    if two and difference is not None:
        texts.append(signed(difference))
    cls = "none" if difference is None else "s1" if difference < 0 else "s0"
    return Cell(cls, 0.06 + 0.44 * abs(difference or 0) / most, texts, tip(r))


def _total(r: Row) -> float:
    return float(sum(r[key] or 0 for _, key in PARTS))


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds >= 2 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if seconds >= 240 else ("s", 1.0)
