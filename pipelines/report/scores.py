"""Sections about scores: over fine-tuning, across snapshots, with less training data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.report.captions import basis, counts, of_bert, scored
from bertvision.pipelines.report.drawing import charts, curves
from bertvision.pipelines.report.drawing.curves import best_names
from bertvision.pipelines.report.section import (
    BERT,
    EVALUATE,
    HEADS,
    NO_SYSTEM,
    Section,
    heading,
    make_figure,
    pair,
)
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.rows import Results, Row
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND

_MAPS = 6

"""Heads with a heat map."""


def learning_curve(results: Results) -> Section:
    """BERT over epochs, with the heads; ``untrained`` is at no epoch."""
    ident, title = "learning-curve", "Learning curve"
    bert = _at_epochs(results.bert)
    heads = _at_epochs(r for r in results.heads if r["fraction"] == 1)
    if not bert and not heads:
        return Section(ident, title, missing=f"BERT was not scored yet: `{BERT_COMMAND}` does.")
    tags = sorted({SnapshotTag(r["checkpoint"]) for r in (*bert, *heads)})
    caption = f"{results.title} of BERT at its snapshots"
    if heads:
        caption += (
            ", and of heads on the activations of those snapshots. Where a head's mark is above "
            "BERT's line, the head scores higher than the encoder that it reads"
        )
    if any(r["trained_on"] != r["checkpoint"] for r in heads):
        caption += ". Dashed: the best of the heads that were trained on another snapshot"
    caption += f" ({counts(results, [*bert, *heads])})."
    name = f"Learning curve: {results.label} over epochs of fine-tuning"
    figure = make_figure(
        ident,
        name,
        caption,
        f"{BERT}, {HEADS}",
        f"{BERT_COMMAND}; {EVALUATE}",
        lambda width: curves.learning_curve(bert, heads, results.label, width),
    )
    rows = [_best_at(tag, bert, heads) | {"baseline": results.baseline} for tag in tags]
    columns = [
        Column("checkpoint", "snapshot", "text"),
        Column("bert", f"BERT {results.score}", sd=True),
    ]
    columns += [Column("baseline", r["name"].strip("()")) for r in results.trivial]
    for prefix, label in (
        ("", "best head of the same snapshot"),
        ("earlier_", "best head trained earlier"),
    ):
        if any(f"{prefix}head" in r for r in rows):
            columns += [
                Column(f"{prefix}head", label, "text"),
                *([Column("earlier_on", "on", "text")] if prefix else []),
                Column(f"{prefix}score", results.score, sd=True),
                Column(f"{prefix}difference", "vs BERT", "signed"),
            ]
    table = Table(
        "learning_curve",
        "BERT and the best head at each snapshot",
        columns,
        rows,
        f"{BERT}, {HEADS}",
        f"{BERT_COMMAND}; {EVALUATE}",
        basis=basis(results, [*bert, *heads]),
    )
    return Section(ident, title, figures=[figure], tables=[table])


def cross_checkpoint(results: Results) -> Section:
    """Trained on × evaluated on."""
    ident, title = "cross-checkpoint", "Across snapshots"
    heads = [r for r in results.heads if r["fraction"] == 1]
    if all(r["trained_on"] == r["checkpoint"] for r in heads):
        return Section(
            ident,
            title,
            missing="No head was evaluated on another snapshot than its own: `bertvision extract "
            "--checkpoint TAG --split tune,dev`, then `bertvision evaluate HEAD… --trained-on TAG "
            "--checkpoint TAG`.",
        )
    names = best_names(heads, _MAPS)
    n = len({r["name"] for r in heads})
    shown = f"The best {len(names)} of {n} heads" if n > len(names) else "Each head"
    caption = (
        f"{shown}: {results.score} by the snapshot that a head was trained on (rows) and the one "
        "whose activations it is evaluated on (columns), with the difference from BERT at the "
        f"latter below ({counts(results, heads)}). Blue cells score above BERT, orange ones below "
        "it; deeper means further."
    )
    name = f"Heat maps: {results.label} by snapshot trained on and evaluated on"
    figure = make_figure(
        ident,
        name,
        caption,
        HEADS,
        EVALUATE,
        lambda width: charts.snapshot_map(heads, names, width),
    )
    pairs = sorted({pair(r) for r in heads})
    rows: list[Row] = []
    for head in best_names(heads, n):
        row: Row = {"name": head}
        for r in (r for r in heads if r["name"] == head):
            row |= scored(r, _pair_key(*pair(r)))
        rows.append(row)
    bert = {r["checkpoint"]: r for r in results.bert}
    itself: Row = {"name": "BERT itself"}
    for on, at in pairs:
        itself |= scored(bert.get(at, {}), _pair_key(on, at))
    rows.append(itself)
    rows += (
        {"name": r["name"]} | {_pair_key(*places): r["score"] for places in pairs}
        for r in results.trivial
    )
    table = Table(
        "cross_checkpoint",
        f"{results.title} of each head, trained on → evaluated on; of BERT, at the latter",
        [
            Column("name", "head", "text"),
            *(Column(_pair_key(on, at), f"{on} → {at}", sd=True) for on, at in pairs),
        ],
        rows,
        f"{HEADS}, {BERT}",
        EVALUATE,
        basis=basis(results, heads),
    )
    return Section(ident, title, figures=[figure], tables=[table])


def _pair_key(on: SnapshotTag, at: SnapshotTag) -> str:
    """Key of a pair of snapshots, as systems are written."""
    return f"{on}:{at}"


def data_fractions(results: Results) -> Section:
    """Scores over the part of the training data."""
    ident, title = "data-fractions", "Less training data"
    swept = {(r["name"], r["trained_on"]) for r in results.heads if r["fraction"] != 1}
    rows = [r for r in results.heads if (r["name"], r["trained_on"]) in swept]
    if not rows:
        return Section(
            ident,
            title,
            missing="No head was trained on a part of the data: `bertvision sweep HEAD… "
            "--fractions 0.1,0.3,1` does.",
        )
    caption = (
        f"{results.title} over the part of the training examples that a head was trained on "
        f"({counts(results, rows)}); the dotted line is BERT at the evaluated snapshot. A curve "
        "that is flat on the right says that more examples did not help this head; parts are "
        "nested, smaller in larger."
    )
    name = f"{results.label} over the part of the training examples"
    source = HEADS.replace("<head>", "<head>@f<fraction>")
    command = "bertvision sweep HEAD… --fractions LIST"
    figure = make_figure(
        ident,
        name,
        caption,
        source,
        command,
        lambda width: curves.fraction_curves(rows, results.label, width),
    )
    parts = sorted({r["fraction"] for r in rows})
    pivot: dict[tuple[Any, ...], Row] = {}
    for r in sorted(rows, key=lambda r: (pair(r), r["name"])):
        new = {"pair": heading(r), "name": r["name"], **of_bert(results, r)}
        pivot.setdefault((pair(r), r["name"]), new).update(scored(r, f"part_{r['fraction']:g}"))
    for trivial in results.trivial:
        scores = {f"part_{f:g}": trivial["score"] for f in parts}
        pivot[None, trivial["name"]] = {"pair": NO_SYSTEM, "name": trivial["name"], **scores}
    table = Table(
        "data_fractions",
        f"{results.title} by the part of the training examples",
        [
            Column("name", "head", "text"),
            *(Column(f"part_{f:g}", f"{100 * f:g} %", sd=True, interval=True) for f in parts),
            Column("bert", "BERT", sd=True, interval=True),
        ],
        list(pivot.values()),
        source,
        command,
        group="pair",
        basis=basis(results, rows, shown=True),
    )
    return Section(ident, title, figures=[figure], tables=[table])


def _at_epochs(rows: Iterable[Row]) -> list[Row]:
    """Rows of points of the fine-tuning, on both sides; the untrained twin and means are none."""

    def is_point(tag: str) -> bool:
        return not (SnapshotTag(tag).is_untrained or SnapshotTag(tag).is_mean)

    return [r for r in rows if is_point(r["trained_on"]) and is_point(r["checkpoint"])]


def _best_at(tag: SnapshotTag, bert: Sequence[Row], heads: Sequence[Row]) -> Row:
    """BERT at a snapshot, the best head trained on it, and the best one trained earlier."""
    row: Row = {"checkpoint": str(tag)}
    row |= scored(next((r for r in bert if r["checkpoint"] == tag), {}), "bert")
    there = [r for r in heads if r["checkpoint"] == tag]
    there = [r for r in there if r["difference"] is not None] or there  # the best that compares
    own = [r for r in there if r["trained_on"] == tag]
    earlier = [r for r in there if SnapshotTag(r["trained_on"]) < tag]
    for prefix, found in (("", own), ("earlier_", earlier)):
        if found:
            best = max(found, key=lambda r: r["score"])
            row |= {f"{prefix}difference": best["difference"], **scored(best, f"{prefix}score")}
            row |= {f"{prefix}head": best["name"], f"{prefix}on": best["trained_on"]}
    return row
