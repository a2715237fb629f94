"""Sections about what a score costs: parameters, time, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bertvision.errors import counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.finetuning.latency_record import (
    FILES,
    Latencies,
    read_latencies,
    system_name,
)
from bertvision.pipelines.plotting import Bars, Curves, Series
from bertvision.pipelines.report.section import (
    EVALUATE,
    HEADS,
    PERCENT,
    RETENTION,
    SPEED_UP,
    Figure,
    Reading,
    Section,
    Table,
    basis,
    counts,
    floor_of,
    pair,
    scored,
    tip,
)
from bertvision.pipelines.results.columns import Column, columns
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND

_BARS = 12
"""Systems whose time is drawn."""
_PARTS = {
    "fine-tuning": "fine_tuning_seconds",
    "extraction": "extraction_seconds",
    "training": "training_seconds",
}


def parameters(reading: Reading) -> Section:
    """Parameters against score."""
    ident, title, results = "parameters", "Parameters against score", reading.results
    rows = [
        r for r in results.full if r["trained_on"] == r["checkpoint"] and r["percent"] is not None
    ]
    if not rows:
        missing = (
            "No head was evaluated on the snapshot it was trained on: `bertvision evaluate "
            "HEAD…` does."
        )
        return Section(ident, title, missing=missing)
    caption = (
        f"{results.title} over the head's parameters in per cent of the encoder's "
        f"({counts(results, rows)}). Named, where "
        "there is room, are the heads that no smaller one beats; the dotted line is BERT. Marks to "
        "the left and above are better: the same score with fewer parameters."
    )
    name = f"{results.label} over parameters"
    source = f"heads/<trained on>/<head>/metrics.json, {HEADS}"
    command = f"bertvision train HEAD…; {EVALUATE}"
    charts = _parameter_charts(rows, results.bert, results.label)
    figure = Figure(ident, name, caption, source, command, charts)
    tags = sorted({SnapshotTag(r["checkpoint"]) for r in rows})
    metrics = {"score": results.score}
    if any(column.key == "exact" for column in results.metrics):
        metrics = {"exact": "EM", **metrics}
    shown = [*rows, *(r for r in results.bert if r["checkpoint"] in tags)]
    keys = {(tag, m): f"{tag}_{m}".removesuffix("_score") for tag in tags for m in metrics}
    merged: dict[str, Row] = {}
    for r in sorted(shown, key=lambda r: (r["percent"], r["name"])):
        row = merged.setdefault(r["name"], {k: r[k] for k in ("name", "parameters", "percent")})
        for metric in metrics:
            row |= scored(r, keys[SnapshotTag(r["checkpoint"]), metric], metric)
    table = Table(
        "parameters",
        f"Parameters, {' and '.join(metrics.values())} at the snapshot trained on",
        [
            Column("name", "head", "text"),
            Column("parameters", "parameters", "count"),
            PERCENT,
            *(
                Column(key, f"{metrics[metric]} at {tag}", sd=True, interval=metric == "score")
                for (tag, metric), key in keys.items()
            ),
        ],
        [
            *merged.values(),
            *(
                {"name": r["name"], **{key: r[metric] for (_, metric), key in keys.items()}}
                for r in results.trivial
            ),
        ],
        source,
        command,
        basis=basis(results, shown, shown=True),
    )
    return Section(ident, title, figures=[figure], tables=[table])


def _parameter_charts(rows: Sequence[Row], bert: Sequence[Row], label: str) -> list[Curves]:
    """A panel for each snapshot; heads that no smaller one beats are named."""
    by_tag = {r["checkpoint"]: r for r in bert}
    charts = []
    for tag in sorted({SnapshotTag(r["checkpoint"]) for r in rows})[-4:]:
        there = [r for r in rows if r["checkpoint"] == tag]
        best: list[Row] = []
        for r in sorted(there, key=lambda r: (r["percent"], -r["score"])):
            if not best or r["score"] > best[-1]["score"]:
                best.append(r)
        own = [by_tag[tag]] if tag in by_tag else []
        series = {
            "BERT": _by_size([r | {"percent": 100.0} for r in own]),
            "best of its size or smaller": _by_size(best),
            "other head": _by_size([r for r in there if r not in best])._replace(
                look="faint", labels=()
            ),
        }
        levels = {"BERT's score": by_tag[tag]["score"]} if own else {}
        title = f"trained and evaluated on {tag}"
        axis = "parameters (% of the encoder, log scale)"
        charts.append(Curves(axis, label, series, levels, title=title, log=True))
    return charts


def _by_size(rows: Sequence[Row]) -> Series:
    return Series(
        [r["percent"] for r in rows],
        [r["score"] for r in rows],
        look="points",
        tips=[tip(r) for r in rows],
        labels=[r["name"] for r in rows],
    )


def costs(reading: Reading) -> Section:
    """Time and bytes."""
    ident, title, results = "costs", "Time and bytes", reading.results
    rows = [*results.bert, *results.full]
    timed = [r for r in rows if any(r[key] for key in _PARTS.values())]
    if not timed:
        missing = (
            f"No times are recorded: `{BERT_COMMAND}`, `bertvision extract` and "
            "`bertvision train` record theirs."
        )
        return Section(ident, title, missing=missing)
    best: dict[tuple[str, str, str], Row] = {}
    for r in timed:
        key = (r["system"], r["trained_on"], r["checkpoint"])
        if key not in best or r["score"] > best[key]["score"]:
            best[key] = r
    bars = [r | {"title": _title(r)} for r in sorted(best.values(), key=pair)][-_BARS:]
    complete = all(r["seconds"] is not None for r in bars)
    caption = (
        "Wall time of what a system takes: fine-tuning BERT up to the snapshot it needs, "
        "extracting the activations it is trained on, training the head. Of heads, the best one of "
        "each pair of snapshots is drawn; heads trained together share the time of reading."
    )
    if not complete:
        caption += " “+ ?” where a part was not recorded."
    source = "snapshots/<tag>/snapshot.json, extraction/<tag>/<split>.json, heads/…/metrics.json"
    command = f"{BERT_COMMAND}; bertvision extract; bertvision train"
    name = "Wall time: fine-tuning, extraction, training"
    figure = Figure(ident, name, caption, source, command, [_time_bars(bars)])
    table = Table(
        "costs",
        "Seconds, bytes, retention and speed-up",
        [
            Column("title", "system", "text"),
            PERCENT,
            *(Column(key, f"{part} (s)") for part, key in _PARTS.items()),
            Column("seconds", "together (s)"),
            Column("bytes", "stored", "size"),
            Column("score", results.score, sd=True),
            RETENTION,
            SPEED_UP,
        ],
        [*bars, *({"title": r["name"], "score": r["score"]} for r in results.trivial)],
        source,
        command,
        trace=True,
        basis=basis(results, bars),
    )
    above = f" above {floor_of(results)}" if results.trivial else ""
    lead = (
        f"Retention is what the score is{above}, in per cent of what BERT's is at the last "
        "snapshot of the workspace, where BERT is above it; speed-up is BERT's fine-tuning time up "
        "to that snapshot over the system's time together. It is below 1 where the system takes "
        "longer, as every head of the last snapshot does: BERT's fine-tuning is in its time too. "
        "A dash: not recorded. The costs of all systems are in the files of the table of all "
        "results."
    )
    return Section(ident, title, lead, figures=[figure], tables=[table])


def _time_bars(rows: Sequence[Row]) -> Bars:
    """The wall time of each system: fine-tuning, extraction, training."""
    totals = [float(sum(r[key] or 0 for key in _PARTS.values())) for r in rows]
    unit, size = _time_unit(max(totals))
    return Bars(
        f"wall time ({unit})",
        [r["title"] for r in rows],
        {
            name: [math.nan if r[key] is None else r[key] / size for r in rows]
            for name, key in _PARTS.items()
        },
        [
            f"{total / size:.3g} {unit}{'' if r['seconds'] is not None else ' + ?'}"
            for r, total in zip(rows, totals, strict=True)
        ],
        {
            name: [f"{r['title']}: {name} {r[key] or 0:,.0f} s" for r in rows]
            for name, key in _PARTS.items()
        },
    )


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds >= 2 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if seconds >= 240 else ("s", 1.0)


def latency_section(reading: Reading) -> Section | None:
    """The latency of systems at each snapshot; None where nothing was measured."""
    measured = read_latencies(reading.workspace, reading.left_out)
    if not measured:
        return None
    table = Table(
        "latency",
        "Milliseconds for a window: medians over rounds",
        [
            Column("name", "system", "text"),
            Column("layers", "layers run", "count"),
            *columns(ms="ms", low_ms="fastest round", high_ms="slowest round"),
            Column("speed_up", "inference speed-up (×)", digits=2),
        ],
        [row for each in measured for row in _latency_rows(each)],
        FILES,
        "bertvision latency [HEAD…] --checkpoint TAG",
        group="group",
        more=["checkpoint", "windows", "batch_size", "rounds", "precision", "device", "threads"],
    )
    lead = (
        "Cost of an answer: the forward pass of as many layers as the system takes hidden "
        "states of, and its head. All systems of a snapshot answered the same windows, in turns; "
        "speed-up is BERT's time over the system's, the median of the ratios within a round. "
        "Reading and tokenising the text is not in it."
    )
    return Section("latency", "Inference", lead, tables=[table])


def _latency_rows(measured: Latencies) -> list[Row]:
    about = measured.model_dump(include={"windows", "batch_size", "rounds", "precision"})
    group = (
        f"{measured.tag}: {counted(measured.windows, 'window')} of {measured.tokens:.0f} tokens in "
        f"the mean, {measured.batch_size} at a time; {counted(measured.rounds, 'round')}; "
        f"{measured.device}, {counted(measured.threads, 'thread')}, precision {measured.precision}"
    )
    return [
        {
            **about,
            "group": group,
            "checkpoint": measured.tag,
            "device": measured.device,
            "threads": measured.threads,
            "name": system_name(system.name, system.trained_on, measured.tag),
            "layers": system.layers,
            "ms": 1e3 * system.seconds,
            "low_ms": 1e3 * system.low,
            "high_ms": 1e3 * system.high,
            "speed_up": system.speed_up,
        }
        for system in measured.systems
    ]


def _title(r: Row) -> str:
    if r["system"] == "bert":
        return f"BERT at {r['checkpoint']}"
    return f"{r['trained_on']} → {r['checkpoint']}: {r['name']}"
