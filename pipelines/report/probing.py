"""The section about probes of each layer: figures, and a sentence for the headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.plotting import MOST_PANELS, SERIES, Curves, HeatMap, curves
from bertvision.pipelines.poolings import pooling_order
from bertvision.pipelines.readouts.probe_results import DOUBTFUL, ProbeFile, Row, probe_rows
from bertvision.pipelines.readouts.ridge import RidgeFile, score_rows
from bertvision.pipelines.report.probe_tables import COMMAND, SOURCE, by_registry, probe_tables
from bertvision.pipelines.report.section import Figure, Reading, Section, Table
from bertvision.pipelines.results.columns import Column, columns
from bertvision.pipelines.text import signed
from bertvision.pipelines.workspace.workspace import Workspace

FILES = (f"{ProbeFile.folder}/*/*.json", f"{RidgeFile.folder}/*/*.json")
"""The files of probes of classes, and of scores, in a workspace."""
_WRITTEN = 14
"""Layers whose cells have room for numbers."""


def probing_section(reading: Reading) -> Section | None:
    """Probes of every data set; None where there are none.

    Figures show the settings that most probes were trained with, and of poolings the one with the
    highest mean of its best layers; tables show all.
    """
    rows = probe_rows(ProbeFile.read_all(reading.workspace, reading.left_out))
    if not rows:
        return None
    single = _usual(rows)
    tasks = by_registry({r["dataset"] for r in single})
    pooling = _best_pooling(single)
    of_pooling = [r for r in single if r["pooling"] == pooling]
    lead = (
        "A probe is a small classifier on frozen hidden states, linear or with one hidden layer. "
        "Read a score beside the untrained twin, the same architecture with random weights: "
        "what the twin reaches, the words and their positions give. Layers are chosen on held-out "
        "examples and scored on others; intervals are of resampled examples (95 %), "
        "not of other trainings."
    )
    notes = [
        f"{DOUBTFUL} {task} says little and stays out of means: {text}."
        for task, text in {r["dataset"]: r["doubts"] for r in rows if r["doubts"]}.items()
    ]
    figures = [*_maps(of_pooling, tasks, pooling), *_curves(single, tasks, pooling)]
    tables = probe_tables(rows)
    return Section("probing", "What each layer knows", lead, notes, figures, tables)


def score_section(reading: Reading) -> Section | None:
    """Probes of scores of every data set; None where there are none."""
    rows = score_rows(RidgeFile.read_all(reading.workspace, reading.left_out))
    if not rows:
        return None
    single = [r for r in rows if "+" not in r["layers"]]
    command = "bertvision probe DATA… --solver ridge --checkpoint TAG,TAG"
    source = f"{RidgeFile.folder}/<data set>/<snapshot>-<pooling>-<settings>.json"
    charts = [
        curves(
            [r for r in single if r["dataset"] == task],
            "pearson",
            "Pearson (×100)",
            by=["tag", "pooling", "settings"],
            places="layers",
            title=task,
        )
        for task in by_registry({r["dataset"] for r in single})
    ]
    caption = (
        "Correlation of a probe's scores with the real ones over layers, with 95 % intervals, a "
        "line for each snapshot and pooling."
    )
    shown = [
        *columns("text", tag="snapshot", pooling="pooling", layers="layer"),
        Column("pearson", "Pearson"),
        Column("spearman", "Spearman"),
        *(Column(key, label, digits=3) for key, label in _ERRORS.items()),
        Column("examples", "examples", "count"),
    ]
    table = Table(
        "score_probes",
        "Probes of scores: the best layer by held-out examples, and layers end to end",
        shown,
        [r for r in rows if r["best"] or "+" in r["layers"]],
        source,
        command,
        group="dataset",
        more=[
            *(f"{name}_{end}" for name in ("pearson", "spearman") for end in ("low", "high")),
            *("settings", "held_out", "weight_decay", "doubts"),
        ],
    )
    lead = (
        "A probe of scores is a ridge regression on frozen hidden states. Correlations are × 100; "
        "the error beside that of always giving the mean of the training examples says what the "
        "states add."
    )
    doubts = {r["dataset"]: r["doubts"] for r in rows if r["doubts"]}
    notes = [f"{task}: {text}." for task, text in doubts.items()]
    figures = [
        Figure("score-probes", "Probes of scores over layers", caption, source, command, charts)
    ]
    return Section("scores", "Scores that each layer knows", lead, notes, figures, [table])


_ERRORS = {"rmse": "rmse", "mean_rmse": "rmse of the mean"}


def probing_sentence(workspace: Workspace, left_out: list[str]) -> str:
    """A sentence on the best pooling of the last snapshot, averaged over data sets.

    Args:
        workspace: Workspace with the probes.
        left_out: List that gets a message for each file that is damaged and left out.
    """
    rows = _usual(probe_rows(ProbeFile.read_all(workspace, left_out)))
    pooling = _best_pooling(rows)
    best = [r for r in rows if r["best"] and r["pooling"] == pooling]
    best = _sound(best)
    tag = max(SnapshotTag(r["tag"]) for r in best)
    best = [r for r in best if r["tag"] == tag]
    score = sum(r["accuracy"] for r in best) / len(best)
    what = best[0]["dataset"] if len(best) == 1 else f"the mean of {len(best)} data sets"
    text = f"Probes of the best layer of {tag}, {pooling}-pooled, score {score:.1f} % on {what}"
    gains = [r["difference"] for r in best]
    if all(gain is not None for gain in gains):
        text += f", {signed(sum(gains) / len(gains))} against the untrained twin"
    return f"{text}."


def _maps(rows: Sequence[Row], tasks: Sequence[str], pooling: str) -> list[Figure]:
    """A heat map for each snapshot but the twin, all on one scale of colours."""
    shown = [r for r in rows if not SnapshotTag(r["tag"]).is_untrained] or list(rows)
    most = max(abs(gained(r)) for r in shown)
    figures = []
    for tag in sorted({SnapshotTag(r["tag"]) for r in shown}):
        own = [r for r in shown if r["tag"] == tag]
        caption = (
            f"Snapshot {tag}: accuracy of probes on {pooling}-pooled hidden states, and the "
            f"difference from {_reference(own)}, which is also the colour: blue above, orange "
            "below. Framed: the best layer on held-out examples."
        )
        ident, name = f"probe-map-{tag.replace('.', '-')}", f"Accuracy by task and layer at {tag}"
        chart = _layer_map(own, [task for task in tasks if _has(own, task)], most)
        figures.append(Figure(ident, name, caption, SOURCE, COMMAND, [chart]))
    return figures


def _reference(rows: Sequence[Row]) -> str:
    """The reference of the differences that `gained` takes in these rows."""
    twin = [r["difference"] is not None for r in rows]
    if not any(twin):
        return "the most frequent class"
    return "the untrained twin" + (
        "" if all(twin) else " (where none fits, the most frequent class)"
    )


def _curves(single: Sequence[Row], tasks: Sequence[str], pooling: str) -> list[Figure]:
    """Snapshots side by side, what they gained over the twin, and the poolings of the first."""
    tags = [str(tag) for tag in sorted({SnapshotTag(r["tag"]) for r in single})]
    trained = [tag for tag in tags if not SnapshotTag(tag).is_untrained] or tags
    poolings = sorted({r["pooling"] for r in single}, key=pooling_order)
    of_pooling = [r for r in single if r["pooling"] == pooling]
    figures = []
    if len(tags) > 1:
        caption = (
            f"Accuracy over layers, {pooling}-pooled, a line for each snapshot, with 95 % "
            "intervals; dotted: the most frequent class, dashed: the untrained twin. Of more than "
            f"{SERIES} the twin and the last are shown."
        )
        names = [*trained, *(tag for tag in tags if tag not in trained)]
        figures += _panels("snapshots", caption, of_pooling, tasks, "tag", names, "accuracy")
    if gains := [r for r in of_pooling if r["difference"] is not None]:
        caption = (
            f"Gain by training: accuracy less that of the untrained twin, {pooling}-pooled, "
            "with 95 % intervals over the same resampled examples."
        )
        figures += _panels("gains", caption, gains, tasks, "tag", trained, "difference")
    if len(poolings) > 1:
        caption = (
            f"Accuracy over layers of snapshot {trained[0]}, a line for each pooling; dotted: the "
            "most frequent class."
        )
        rows = [r for r in single if r["tag"] == trained[0]]
        figures += _panels("poolings", caption, rows, tasks, "pooling", poolings, "accuracy")
    return figures


def _panels(
    kind: str,
    caption: str,
    rows: Sequence[Row],
    tasks: Sequence[str],
    by: str,
    names: Sequence[str],
    value: str,
) -> list[Figure]:
    """At most `MOST_PANELS` tasks to a figure, and of lines those that `shown_lines` takes."""
    names = shown_lines(names)
    rows = [r for r in rows if r[by] in names and r[value] is not None]
    drawn = [task for task in tasks if _has(rows, task)]
    parts = [drawn[i : i + MOST_PANELS] for i in range(0, len(drawn), MOST_PANELS)]
    return [
        Figure(
            f"probe-{kind}" + (f"-{i + 1}" if len(parts) > 1 else ""),
            f"Probes over layers: {kind}",
            caption,
            SOURCE,
            COMMAND,
            [_layer_chart(rows, task, by, names, value) for task in part],
        )
        for i, part in enumerate(parts)
    ]


def _layer_map(rows: Sequence[Row], tasks: Sequence[str], most: float) -> HeatMap:
    """Task × layer of one snapshot: accuracy and what was gained, which is also the colour.

    Args:
        rows: Rows of single layers, one pooling and one kind of probe; the best ones are framed.
        tasks: Data sets from top to bottom.
        most: Difference with the full colour, the same for all snapshots.
    """
    layers = sorted({int(r["layers"]) for r in rows})
    values = np.full((len(tasks), len(layers)), np.nan)
    texts, tips = ([[""] * len(layers) for _ in tasks] for _ in range(2))
    framed = []
    for r in (r for r in rows if r["dataset"] in tasks):
        i, j = tasks.index(r["dataset"]), layers.index(int(r["layers"]))
        values[i, j], tips[i][j] = gained(r), probe_tip(r)
        if len(layers) <= _WRITTEN:
            texts[i][j] = f"{r['accuracy']:.1f}\n{signed(gained(r))}"
        framed += [(i, j)] * bool(r["best"])
    return HeatMap(
        "",
        list(tasks),
        "layer (0: embedding output)",
        [str(layer) for layer in layers],
        "difference (points)",
        values,
        signed=True,
        missing="not probed",
        texts=texts,
        tips=tips,
        framed=framed,
        largest=most or 1.0,
        cell=(56.0, 36.0),
    )


def _layer_chart(
    rows: Sequence[Row], task: str, by: str, names: Sequence[str], value: str
) -> Curves:
    """A score of one task over layers with its interval, a line for each of some names.

    Args:
        rows: Rows of single layers and one kind of probe; of one pooling, or of one snapshot.
        task: Name of the data set.
        by: Column in which lines differ, ``tag`` or ``pooling``.
        names: Names of the lines in order, of which the task has one at least.
        value: ``accuracy``, beside the majority, or ``difference``, beside zero.
    """
    there = [
        r | {"accuracy_low": r["low"], "accuracy_high": r["high"]}
        for r in rows
        if r["dataset"] == task and r[by] in names and r[value] is not None
    ]
    gains = value == "difference"
    return curves(
        there,
        value,
        "difference from untrained (points)" if gains else "accuracy (%)",
        by=[by],
        names=names,
        looks={"untrained": "dashed"},
        places="layers",
        levels={"as the untrained twin": 0.0} if gains else {"majority": there[0]["majority"]},
        tip=probe_tip,
        title=task,
    )


def shown_lines(names: Sequence[str]) -> list[str]:
    """As many names as a figure has lines for: the untrained twin, and the last of the others."""
    twin = [name for name in names if name == "untrained"]
    others = [name for name in names if name not in twin]
    return [*others[-(SERIES - len(twin)) :], *twin]


def probe_tip(r: Mapping[str, Any]) -> str:
    """The text where the pointer rests on a probe's mark."""
    gain = ""
    if r["difference"] is not None:
        low, high = signed(r["difference_low"]), signed(r["difference_high"])
        gain = f", {signed(r['difference'])} [{low}, {high}] against untrained"
    return (
        f"{r['dataset']}, {r['tag']}, {r['pooling']}, layer {r['layers']}: {r['accuracy']:.1f} "
        f"[{r['low']:.1f}, {r['high']:.1f}]{gain}"
    )


def gained(r: Row) -> float:
    """Accuracy less the twin's, or the majority's where there is no twin."""
    gain = r["difference"]
    return float(r["accuracy"] - r["majority"] if gain is None else gain)


def _usual(rows: Sequence[Row]) -> list[Row]:
    """Single layers with the settings that most probes were trained with."""
    usual = Counter(r["settings"] for r in rows).most_common(1)[0][0]
    return [r for r in rows if r["settings"] == usual and "+" not in r["layers"]]


def _best_pooling(rows: Sequence[Row]) -> str:
    """The pooling with the highest mean of held-out accuracies over its best layers.

    The mean is over the data sets and snapshots that all poolings share, without the untrained
    twin and without doubtful data; where they share none, the pooling with most of them comes
    first.
    """
    best = _sound([r for r in rows if r["best"]])
    best = [r for r in best if not SnapshotTag(r["tag"]).is_untrained] or best
    scores: dict[str, dict[tuple[str, str], float]] = {}
    for r in best:
        scores.setdefault(r["pooling"], {})[r["dataset"], r["tag"]] = r["held_out"]
    shared = set.intersection(*(set(scored) for scored in scores.values()))

    def rank(pooling: str) -> tuple[int, float]:
        scored = scores[pooling]
        shown = [scored[pair] for pair in shared or scored]
        return len(shown), sum(shown) / len(shown)

    return max(scores, key=rank)


def _sound(rows: Sequence[Row]) -> list[Row]:
    """Rows of data that are not doubtful; where there is nothing else, all."""
    return [r for r in rows if not r["doubts"]] or list(rows)


def _has(rows: Sequence[Row], task: str) -> bool:
    return any(r["dataset"] == task for r in rows)
