"""Figures with lines: scores over epochs and over training data, weights over layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.drawing.figures import MOST_PANELS, Box, legend, panels, sample, series
from bertvision.pipelines.drawing.layers import layer_plot
from bertvision.pipelines.drawing.svg import SERIES, SHAPES, Canvas, Plot, round_range
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.text import signed

MOST_LINES = 6
"""Series in one panel: more could not be told apart."""


def learning_curve(bert: Sequence[Row], heads: Sequence[Row], label: str, width: float) -> Canvas:
    """BERT's scores over epochs; heads as points where they were evaluated.

    Args:
        bert: rows of BERT, a snapshot each; of those at an epoch, as all rows here.
        heads: rows of heads trained on all examples.
        label: of the score, with its unit.
        width: px.
    """
    epochs = sorted({SnapshotTag(r["checkpoint"]).fraction for r in (*bert, *heads)})
    own = [r for r in heads if r["trained_on"] == r["checkpoint"]]
    lines = [("BERT", "s0", "circle", _by_epoch(bert))]
    if own:
        lines.append(("best head of the same snapshot", "s1", "square", _by_epoch(own)))
    sources = sorted({SnapshotTag(r["trained_on"]) for r in heads if r not in own})
    for i, tag in enumerate(sources[:3]):
        found = _by_epoch([r for r in heads if r["trained_on"] == tag])
        name = f"best head trained on {tag}"
        lines.append((name, f"s{i + 2} dashed", SHAPES[i + 2], found))
    entries = [(name, cls, shape) for name, cls, shape, _ in lines]
    if heads:
        entries.append(("any other head", "faint", "circle"))
    c = Canvas(width, 0)
    bottom = 340.0 if width > 500 else 280.0
    c.height = legend(c, entries, bottom + 44, width)
    low, high = min(epochs), max(epochs)
    air = max((high - low) * 0.03, 0.01)
    p = Plot(
        c, 40, 26, width - 12, bottom, (low - air, high + air), round_range(_ends([*bert, *heads]))
    )
    p.axes([(e, f"{e:g}") for e in epochs], "epochs of fine-tuning at the snapshot", label)
    best = {id(r) for *_, found in lines for r in found}
    for r in heads:
        if id(r) not in best:
            place = p.x(SnapshotTag(r["checkpoint"]).fraction), p.y(r["score"])
            c.marker("circle", *place, "faint", r=3, tip=tip(r))
    for _, cls, shape, found in lines:
        places = [(p.x(SnapshotTag(r["checkpoint"]).fraction), p.y(r["score"])) for r in found]
        if len(places) > 1:
            c.path(places, f"line {cls}")
        for r, (x, y) in zip(found, places, strict=True):
            if "dashed" in cls and r["trained_on"] == r["checkpoint"]:
                continue  # where it begins it is one of the heads of the same snapshot
            _whisker(p, x, r, cls.split()[0])
            c.marker(shape, x, y, f"point {cls.split()[0]}", tip=tip(r))
    return c


def fraction_curves(rows: Sequence[Row], label: str, width: float) -> Canvas:
    """Scores over the part of the training examples, a panel for each pair of snapshots.

    Of the pairs, those of one snapshot and those evaluated on the last one are drawn.

    Args:
        rows: rows of heads with several fractions.
        label: of the score, with its unit.
        width: px.
    """
    names = best_names(rows, MOST_LINES)
    last = max(SnapshotTag(r["checkpoint"]) for r in rows)
    pairs = {(r["trained_on"], r["checkpoint"]): None for r in rows}
    shown = [pair for pair in pairs if pair[0] == pair[1] or pair[1] == last][-MOST_PANELS:]
    drawn = [r for r in rows if (r["trained_on"], r["checkpoint"]) in shown]
    y_range = round_range(_ends(drawn) + [r["bert"] for r in drawn if r["bert"]])

    def panel(c: Canvas, pair: tuple[str, str], box: Box) -> None:
        p = Plot(c, *box, (0, 103), y_range)
        p.axes([(v, f"{v}") for v in (0, 20, 40, 60, 80, 100)], "training examples (%)", label)
        found = [r for r in rows if (r["trained_on"], r["checkpoint"]) == pair]
        bert = next((r["bert"] for r in found if r["bert"] is not None), None)
        if bert is not None:
            c.line(p.left, p.y(bert), p.right, p.y(bert), "reference")
        for i, name in enumerate(names):
            line = sorted((r for r in found if r["name"] == name), key=lambda r: r["fraction"])
            for r in line:
                _whisker(p, p.x(100 * r["fraction"]), r, f"s{i}")
            points = [(100 * r["fraction"], r["score"]) for r in line]
            series(p, i, points, [tip(r) for r in line])

    titles = [(pair, f"trained on {pair[0]}, evaluated on {pair[1]}") for pair in shown]
    entries = [sample(i, name) for i, name in enumerate(names)]
    return panels(titles, panel, [*entries, ("BERT at the snapshot", "reference", "")], width)


def pooling_weights(rows: Sequence[Row], width: float) -> Canvas:
    """Learned weights of the layers, a panel for each head, a line for each snapshot.

    Args:
        rows: with ``name``, ``trained_on``, ``layers`` and ``weights``.
        width: px.
    """
    names = list(dict.fromkeys(r["name"] for r in rows))[:MOST_PANELS]
    tags = sorted({SnapshotTag(r["trained_on"]) for r in rows})[-SERIES:]
    last = max(max(r["layers"]) for r in rows)
    y_range = (0.0, round_range([0, 100 * max(max(r["weights"]) for r in rows)])[1])

    def panel(c: Canvas, name: str, box: Box) -> None:
        p = layer_plot(c, box, range(last + 1), y_range, "weight (%)")
        found = [r for r in rows if r["name"] == name]
        even = p.y(100 / len(found[0]["weights"]))
        c.line(p.left, even, p.right, even, "reference")
        for i, tag in enumerate(tags):
            for r in (r for r in found if r["trained_on"] == tag):
                points = list(zip(r["layers"], (100 * w for w in r["weights"]), strict=True))
                where = f"{name} trained on {tag}: layer"
                series(
                    p, i, points, [f"{where} {at}, {weight:.1f} %" for at, weight in points], r=3.2
                )

    entries = [sample(i, f"trained on {tag}") for i, tag in enumerate(tags)]
    entries.append(("all layers alike", "reference", ""))
    return panels([(name, name) for name in names], panel, entries, width)


def best_names(rows: Sequence[Row], most: int) -> list[str]:
    """Names of at most so many systems, by their highest score."""
    best: dict[str, float] = {}
    for r in rows:
        best[r["name"]] = max(best.get(r["name"], -math.inf), r["score"])
    return sorted(best, key=lambda name: (-best[name], name))[:most]


def tip(r: Row) -> str:
    """What shows where the pointer rests on a system's mark."""
    where = r["checkpoint"]
    if r["trained_on"] != where:
        where = f"{where}, trained on {r['trained_on']}"
    sd = f" ± {r['score_sd']:.1f} (n = {r['seeds']})" if r["score_sd"] else ""
    against = "" if r["difference"] is None else f", {signed(r['difference'])} against BERT"
    return f"{r['name']} at {where}: {r['score']:.1f}{sd}{against}"


def _whisker(p: Plot, x: float, r: Row, cls: str) -> None:
    """One standard deviation up and down."""
    if sd := r["score_sd"]:
        p.canvas.line(x, p.y(r["score"] - sd), x, p.y(r["score"] + sd), f"line {cls}")


def _ends(rows: Sequence[Row]) -> list[float]:
    """All that is drawn of scores: one standard deviation below to one above."""
    return [r["score"] + side * (r["score_sd"] or 0) for r in rows for side in (-1, 1)]


def _by_epoch(rows: Sequence[Row]) -> list[Row]:
    """The best row of each checkpoint, ordered as numbers."""
    best: dict[SnapshotTag, Row] = {}
    for r in rows:
        tag = SnapshotTag(r["checkpoint"])
        if tag not in best or r["score"] > best[tag]["score"]:
            best[tag] = r
    return [best[tag] for tag in sorted(best)]
