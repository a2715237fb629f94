"""Sections about scores: over fine-tuning, across snapshots, with less data; pooling weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.plotting import (
    MOST_PANELS,
    SERIES,
    Curves,
    HeatMap,
    Look,
    curves,
)
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.report.section import (
    BERT,
    EVALUATE,
    HEADS,
    NO_SYSTEM,
    SEEDS,
    Figure,
    Reading,
    Section,
    Table,
    basis,
    counts,
    heading,
    of_bert,
    pair,
    scored,
    tip,
)
from bertvision.pipelines.results.columns import Column, columns
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.text import signed
from bertvision.pipelines.workspace.heads import trained_heads
from bertvision.pipelines.workspace.records import read_run_config
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND, training_command
from bertvision.pipelines.workspace.workspace import Workspace

_MAPS = 6
"""Heads with a heat map."""
_MOST_LINES = 6
"""Series in one panel: more could not be told apart."""


def learning_curve(reading: Reading) -> Section:
    """BERT over epochs, with the heads; ``untrained`` is at no epoch."""
    ident, title, results = "learning-curve", "Learning curve", reading.results
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
    origin = f"{BERT}, {HEADS}", f"{BERT_COMMAND}; {EVALUATE}"
    figure = Figure(ident, name, caption, *origin, [_learning_chart(bert, heads, results.label)])
    rows = [_best_at(tag, bert, heads) | {"baseline": results.baseline} for tag in tags]
    shown = [
        Column("checkpoint", "snapshot", "text"),
        Column("bert", f"BERT {results.score}", sd=True),
    ]
    shown += [Column("baseline", r["name"].strip("()")) for r in results.trivial]
    for prefix, label in (
        ("", "best head of the same snapshot"),
        ("earlier_", "best head trained earlier"),
    ):
        if any(f"{prefix}head" in r for r in rows):
            shown += [
                Column(f"{prefix}head", label, "text"),
                *([Column("earlier_on", "on", "text")] if prefix else []),
                Column(f"{prefix}score", results.score, sd=True),
                Column(f"{prefix}difference", "vs BERT", "signed"),
            ]
    table = Table(
        "learning_curve",
        "BERT and the best head at each snapshot",
        shown,
        rows,
        *origin,
        basis=basis(results, [*bert, *heads]),
    )
    return Section(ident, title, figures=[figure], tables=[table])


def _learning_chart(bert: Sequence[Row], heads: Sequence[Row], label: str) -> Curves:
    """BERT's scores over epochs; heads as points where they were evaluated."""
    own = [r for r in heads if r["trained_on"] == r["checkpoint"]]
    lines = {"BERT": _by_epoch(bert), "best head of the same snapshot": _by_epoch(own)}
    looks: dict[str, Look] = {"any other head": "faint"}
    for tag in sorted({SnapshotTag(r["trained_on"]) for r in heads if r not in own})[:3]:
        name = f"best head trained on {tag}"
        lines[name] = _by_epoch([r for r in heads if r["trained_on"] == tag])
        looks[name] = "dashed"
    named = {id(r) for rows in lines.values() for r in rows}
    lines["any other head"] = [r for r in heads if id(r) not in named]
    points = [
        r | {"line": name, "epoch": SnapshotTag(r["checkpoint"]).fraction}
        for name, rows in lines.items()
        for r in rows
    ]
    axis = {"places": "epoch", "of_places": "epochs of fine-tuning at the snapshot"}
    return _score_curves(points, label, by=["line"], names=list(lines), looks=looks, **axis)


def _score_curves(rows: Sequence[Row], label: str, **options: Any) -> Curves:
    """Scores with their deviation over seeds; intervals are in the tables alone."""
    plain = [{k: v for k, v in r.items() if k not in ("score_low", "score_high")} for r in rows]
    return curves(plain, "score", label, over="seeds", tip=tip, **options)


def cross_checkpoint(reading: Reading) -> Section:
    """Heads by the snapshot trained on and the one evaluated on."""
    ident, title, results = "cross-checkpoint", "Across snapshots", reading.results
    heads = [r for r in results.heads if r["fraction"] == 1]
    if all(r["trained_on"] == r["checkpoint"] for r in heads):
        missing = (
            "No head was evaluated on another snapshot than its own: `bertvision extract "
            "--checkpoint TAG --split tune,dev`, then `bertvision evaluate HEAD… --trained-on TAG "
            "--checkpoint TAG`."
        )
        return Section(ident, title, missing=missing)
    names = _best_names(heads, _MAPS)
    n = len({r["name"] for r in heads})
    shown = f"The best {len(names)} of {n} heads" if n > len(names) else "Each head"
    caption = (
        f"{shown}: {results.score} by the snapshot that a head was trained on (rows) and the one "
        "whose activations it is evaluated on (columns), with the difference from BERT at the "
        f"latter below ({counts(results, heads)}). Blue cells score above BERT, orange ones below "
        "it; deeper means further."
    )
    name = f"Heat maps: {results.label} by snapshot trained on and evaluated on"
    figure = Figure(ident, name, caption, HEADS, EVALUATE, _snapshot_maps(heads, names))
    pairs = sorted({pair(r) for r in heads})
    rows: list[Row] = []
    for head in _best_names(heads, n):
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


def _snapshot_maps(heads: Sequence[Row], names: Sequence[str]) -> list[HeatMap]:
    """A map for each head: the score, and the difference from BERT, which is also the colour."""
    rows = [r for r in heads if r["name"] in names]
    on = sorted({SnapshotTag(r["trained_on"]) for r in rows})
    at = sorted({SnapshotTag(r["checkpoint"]) for r in rows})
    most = max((abs(r["difference"]) for r in rows if r["difference"] is not None), default=1) or 1
    charts = []
    for name in names:
        values = np.full((len(on), len(at)), np.nan)
        texts, tips = ([[""] * len(at) for _ in on] for _ in range(2))
        for r in (r for r in rows if r["name"] == name):
            i, j = on.index(SnapshotTag(r["trained_on"])), at.index(SnapshotTag(r["checkpoint"]))
            texts[i][j], tips[i][j] = f"{r['score']:.1f}", tip(r)
            if r["difference"] is not None:
                values[i, j] = r["difference"]
                texts[i][j] += f"\n{signed(r['difference'])}"
        charts.append(
            HeatMap(
                "trained on",
                [str(tag) for tag in on],
                "evaluated on",
                [str(tag) for tag in at],
                "difference from BERT",
                values,
                signed=True,
                title=name,
                missing="not scored, or BERT was not",
                texts=texts,
                tips=tips,
                largest=most,
                cell=(56.0, 40.0),
            )
        )
    return charts


def _pair_key(on: SnapshotTag, at: SnapshotTag) -> str:
    """Key of a pair of snapshots, as systems are written."""
    return f"{on}:{at}"


def data_fractions(reading: Reading) -> Section:
    """Scores over the part of the training data."""
    ident, title, results = "data-fractions", "Less training data", reading.results
    swept = {(r["name"], r["trained_on"]) for r in results.heads if r["fraction"] != 1}
    rows = [r for r in results.heads if (r["name"], r["trained_on"]) in swept]
    if not rows:
        missing = (
            "No head was trained on a part of the data: `bertvision sweep HEAD… "
            "--fractions 0.1,0.3,1` does."
        )
        return Section(ident, title, missing=missing)
    caption = (
        f"{results.title} over the part of the training examples that a head was trained on "
        f"({counts(results, rows)}); the dotted line is BERT at the evaluated snapshot. A curve "
        "that is flat on the right says that more examples did not help this head; parts are "
        "nested, smaller in larger."
    )
    name = f"{results.label} over the part of the training examples"
    source = HEADS.replace("<head>", "<head>@f<fraction>")
    command = "bertvision sweep HEAD… --fractions LIST"
    charts = _fraction_charts(rows, results.label)
    figure = Figure(ident, name, caption, source, command, charts)
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


def _fraction_charts(rows: Sequence[Row], label: str) -> list[Curves]:
    """A panel for each pair of snapshots: those of one, and those evaluated on the last one."""
    names = _best_names(rows, _MOST_LINES)
    last = max(SnapshotTag(r["checkpoint"]) for r in rows)
    pairs = {(r["trained_on"], r["checkpoint"]): None for r in rows}
    drawn = [places for places in pairs if places[0] == places[1] or places[1] == last]
    charts = []
    for on, at in drawn[-MOST_PANELS:]:
        there = [r for r in rows if (r["trained_on"], r["checkpoint"]) == (on, at)]
        bert = next((r["bert"] for r in there if r["bert"] is not None), None)
        charts.append(
            _score_curves(
                [r | {"percent": 100 * r["fraction"]} for r in there],
                label,
                by=["name"],
                names=names,
                places="percent",
                of_places="training examples (%)",
                levels={"BERT at the snapshot": bert},
                title=f"trained on {on}, evaluated on {at}",
            )
        )
    return charts


def _at_epochs(rows: Iterable[Row]) -> list[Row]:
    """Rows of points of the fine-tuning, on both sides: no twin, mean or named checkpoint."""

    def is_point(tag: str) -> bool:
        at = SnapshotTag(tag)
        return not (at.is_untrained or at.is_mean or at.is_named)

    return [r for r in rows if is_point(r["trained_on"]) and is_point(r["checkpoint"])]


def _by_epoch(rows: Sequence[Row]) -> list[Row]:
    """The best row of each checkpoint, ordered as numbers."""
    best: dict[SnapshotTag, Row] = {}
    for r in rows:
        tag = SnapshotTag(r["checkpoint"])
        if tag not in best or r["score"] > best[tag]["score"]:
            best[tag] = r
    return [best[tag] for tag in sorted(best)]


def _best_names(rows: Sequence[Row], most: int) -> list[str]:
    """Names of at most so many systems, by their highest score."""
    best: dict[str, float] = {}
    for r in rows:
        best[r["name"]] = max(best.get(r["name"], -math.inf), r["score"])
    return sorted(best, key=lambda name: (-best[name], name))[:most]


def _best_at(tag: SnapshotTag, bert: Sequence[Row], heads: Sequence[Row]) -> Row:
    """BERT at a snapshot, the best head trained on it, and the best one trained earlier."""
    row: Row = {"checkpoint": str(tag)}
    row |= scored(next((r for r in bert if r["checkpoint"] == tag), {}), "bert")
    there = [r for r in heads if r["checkpoint"] == tag]
    there = [r for r in there if r["difference"] is not None] or there  # the best that compares
    own = [r for r in there if r["trained_on"] == tag]
    earlier = [r for r in there if SnapshotTag(r["trained_on"]) < tag]
    for prefix, candidates in (("", own), ("earlier_", earlier)):
        if candidates:
            best = max(candidates, key=lambda r: r["score"])
            row |= {f"{prefix}difference": best["difference"], **scored(best, f"{prefix}score")}
            row |= {f"{prefix}head": best["name"], f"{prefix}on": best["trained_on"]}
    return row


def pooling_section(reading: Reading) -> Section:
    """Learned weights of the layers."""
    workspace, left_out = reading.workspace, reading.left_out
    rows, layers = pooling_rows(workspace, left_out), workspace.config.model.num_hidden_layers
    ident, title = "pooling-weights", "Pooling weights by layer"
    if not rows:
        missing = (
            "No head with learned pooling was trained: `bertvision train learned-pooling "
            "--checkpoint TAG`."
        )
        return Section(ident, title, missing=missing)
    caption = (
        "Weight of each layer in the learned sum (softmax, so that they add up to 100 %); dotted: "
        "all layers alike. Peaks say which layers the head reads, a flat line that it does not "
        "care. The weights are those of the sum, not a measure of what a layer knows."
    )
    if any(max(r["layers"]) > layers for r in rows):
        caption += f" Of [CLS] heads, {layers + 1} is the pooler's output."
    source, command = "heads/<trained on>/<head>/model.safetensors", "bertvision train HEAD…"
    name = "Learned pooling weights by layer"
    figure = Figure(ident, name, caption, source, command, _pooling_charts(rows))
    flat = [
        {**r, **{f"layer_{i}": 100 * w for i, w in zip(r["layers"], r["weights"], strict=True)}}
        for r in rows
    ]
    indices = sorted({i for r in rows for i in r["layers"]})
    table = Table(
        "pooling_weights",
        "Learned pooling: weights of the layers in per cent, and the factor γ",
        [
            *columns("text", name="head", trained_on="trained on"),
            SEEDS,
            Column("gamma", "γ", digits=3),
            *(Column(f"layer_{i}", str(i)) for i in indices),
        ],
        flat,
        source,
        command,
        trace=True,
    )
    return Section(ident, title, figures=[figure], tables=[table])


def _pooling_charts(rows: Sequence[Row]) -> list[Curves]:
    """A panel for each head, a line for each snapshot."""
    tags = sorted({SnapshotTag(r["trained_on"]) for r in rows})[-SERIES:]
    charts = []
    for name in list(dict.fromkeys(r["name"] for r in rows))[:MOST_PANELS]:
        own = [r for r in rows if r["name"] == name]
        weights = [
            {"line": f"trained on {r['trained_on']}", "layer": layer, "weight": 100 * weight}
            for r in own
            for layer, weight in zip(r["layers"], r["weights"], strict=True)
        ]
        charts.append(
            curves(
                weights,
                "weight",
                "weight (%)",
                by=["line"],
                names=[f"trained on {tag}" for tag in tags],
                levels={"all layers alike": 100 / len(own[0]["weights"])},
                tip=lambda r: f"{r['line']}: layer {r['layer']}, {r['weight']:.1f} %",
                title=name,
            )
        )
    return charts


def pooling_rows(workspace: Workspace, left_out: list[str]) -> list[Row]:
    """Weights of every learned pooling of runs on all examples, seeds together.

    A pooling is a pair of tensors ``….scalars`` (one for each hidden state) and ``….gamma``, as
    `LearnedPooling` keeps them; its weights are the softmax of the scalars.

    Args:
        workspace: Workspace with the heads.
        left_out: List that gets a message for each head that is left out for its damaged files.

    Returns:
        By head and snapshot: ``name`` (with the pooling's own name where a head has several),
        ``trained_on``, ``seeds``, ``gamma``, ``weights`` (one for each hidden state, they sum
        to 1; means over seeds), ``layers`` (which hidden states), ``file`` and ``command``.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for tag, run in trained_heads(workspace):
        with leaving_out(left_out):
            for part, row in _poolings(workspace, workspace.root / "heads" / tag / run):
                groups.setdefault((row.pop("name"), part, tag), []).append(row)
    return [
        _mean(name, tag, rows)
        for (name, _, tag), rows in sorted(
            groups.items(), key=lambda item: (item[0][0], SnapshotTag(item[0][2]))
        )
    ]


def _poolings(workspace: Workspace, folder: Path) -> list[tuple[str, Row]]:
    """The names of a run's poolings in it, where it has several, and their rows."""
    config, path = read_run_config(folder), folder / "model.safetensors"
    if config.training.fraction != 1:
        return []
    try:
        with safe_open(path, "pt") as file:
            names = sorted(name for name in file.keys() if _is_scalars(name))  # noqa: SIM118
            learned = {name: file.get_tensor(name).flatten().tolist() for name in names}
            gammas = {name: _gamma(file, name) for name in names}
    except (OSError, SafetensorError) as error:
        raise WorkspaceError(
            f"{path} is damaged ({error}): run `{training_command(config)} --overwrite` again"
        ) from error
    rows: list[tuple[str, Row]] = []
    for name, scalars in learned.items():
        if len(scalars) != len(config.layers):
            continue  # of a head of one's own, which pools something else
        part = "" if len(learned) == 1 else f" ({name.rpartition('.')[0]})"
        row: Row = {
            "name": config.head + config.variant + part,
            "weights": softmax(scalars),
            "gamma": gammas[name],
            "layers": config.layers,
            "file": path.relative_to(workspace.root).as_posix(),
            "command": training_command(config, workspace.config.model.num_hidden_layers + 1),
        }
        rows.append((part, row))
    return rows


def softmax(scalars: Sequence[float]) -> list[float]:
    """exp(w) / Σ exp(w)."""
    top = max(scalars)
    powers = [math.exp(w - top) for w in scalars]
    return [power / sum(powers) for power in powers]


def _mean(name: str, tag: str, rows: Sequence[Row]) -> Row:
    gammas = [r["gamma"] for r in rows if r["gamma"] is not None]
    return {
        "name": name,
        "trained_on": tag,
        "seeds": len(rows),
        "gamma": sum(gammas) / len(gammas) if gammas else None,
        "weights": [sum(w) / len(rows) for w in zip(*(r["weights"] for r in rows), strict=True)],
        "layers": rows[0]["layers"],
        "file": "; ".join(r["file"] for r in rows),
        "command": "; ".join(dict.fromkeys(r["command"] for r in rows)),
    }


def _is_scalars(name: str) -> bool:
    return name == "scalars" or name.endswith(".scalars")


def _gamma(file: Any, scalars: str) -> float | None:
    name = scalars.removesuffix("scalars") + "gamma"
    return float(file.get_tensor(name)) if name in file.keys() else None  # noqa: SIM118
