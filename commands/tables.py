"""Tables for a terminal: one per command, from what its function returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.tasks.scores import METRICS, headline
from bertvision.pipelines.text import format_table, size
from bertvision.pipelines.workspace.selection import StoredName

Row = Mapping[str, Any]


def heads_table(heads: Sequence[Row]) -> str:
    """Name, parameters, arithmetic and description of each head."""
    return format_table(
        ["head", "trainable", "total", "% BERT-large", "M mult./token", "description"],
        [
            [
                h["name"],
                f"{h['trainable']:,}",
                f"{h['total']:,}",
                f"{h['percent']:.4f}",
                _maybe(h["multiplications"] and h["multiplications"] / 1e6, "{:.3g}"),
                h["description"] + (" (costly)" if h["costly"] else ""),
            ]
            for h in heads
        ],
    )


def extracted_table(splits: Sequence[Row]) -> str:
    """What an extraction wrote."""
    return format_table(
        ["split", "examples", "shards written", "size", "examples/s", "encoder's share"],
        [
            [
                f"{s['tag']}/{s['split']}",
                f"{s['examples']:,}",
                str(s["shards_written"]),
                size(s["bytes"]),
                f"{s['examples_written'] / s['seconds']:.1f}" if s["shards_written"] else "-",
                f"{s['encoder_seconds'] / s['seconds']:.0%}" if s["shards_written"] else "-",
            ]
            for s in splits
        ],
    )


def repaired_table(splits: Sequence[Row]) -> str:
    """What a repair found and did."""
    if not splits:
        return "the store is empty"
    return "\n".join(
        line
        for s in splits
        for line in (
            [*s["damage"], f"{s['name']}: repaired, {len(s['shards'])} shards extracted again"]
            if s["damage"]
            else [f"{s['name']}: whole"]
        )
    )


def splits_table(splits: Sequence[Row]) -> str:
    """What a store holds."""
    if not splits:
        return "the store is empty"
    return format_table(
        ["split", "examples", "encoding", "layers", "size", "per example", "× smaller", "complete"],
        [
            [
                f"{s['tag']}/{s['split']}",
                f"{s['examples']:,}",
                s["encoding"],
                str(len(s["layers"])),
                size(s["bytes"]),
                size(s["bytes_per_example"] or 0),
                f"{s['times_smaller_than_dense_float32'] or 0:.1f}",
                "yes" if s["complete"] else f"{s['shards_committed']} of {s['shards']} shards",
            ]
            for s in splits
        ],
    )


def trained_table(heads: Sequence[Row]) -> str:
    """What a training made."""
    return format_table(
        ["head", "trained on", "data", "seed", "parameters", "loss", "seconds", "waiting for data"],
        [
            [
                h["head"],
                h["trained_on"],
                f"{h['fraction']:.4g}",
                str(h["seed"]),
                f"{h['total']:,}",
                "-" if h["loss"] is None else f"{h['loss']:.3f}",
                f"{h['own_seconds']:.1f}",
                f"{h['wait_seconds'] / h['seconds']:.1%}" if h["seconds"] else "-",
            ]
            for h in heads
        ],
    )


def evaluated_table(results: Sequence[Row]) -> str:
    """The scores of each system: of spans with the tuned threshold and by the paper's rule."""
    spans = [r for r in results if "n-best" in r["rules"]]
    classes = [r for r in results if r not in spans]
    tables = []
    for group, argmax in ((spans, ["argmax EM", "argmax F1"]), (classes, [])):
        metrics = [headline(r["rules"]) for r in group]
        keys = _keys(metrics)
        rows = [
            [
                *(r["head"], r["trained_on"], r["checkpoint"]),
                *_cells(found, keys),
                *(_cells(r["rules"]["argmax"]["metrics"], ["exact", "f1"]) if argmax else []),
            ]
            for r, found in zip(group, metrics, strict=True)
        ]
        header = ["head", "trained on", "evaluated on", *(METRICS[key] for key in keys), *argmax]
        if rows:
            tables.append(format_table(header, rows))
    return "\n\n".join(tables)


def sweep_table(rows: Sequence[Row]) -> str:
    """Scores of each head on each pair of snapshots, against BERT's at the second; then costs."""
    keys = _keys(rows)
    system = ["head", "data", "trained on", "evaluated on"]
    systems = [[r["name"], f"{r['fraction']:.4g}", r["trained_on"], r["checkpoint"]] for r in rows]
    scores = [
        [
            str(r["seeds"]),
            *[_with_deviation(r, key) for key in keys],
            _maybe(r["difference"], "{:+.1f}"),
        ]
        for r in rows
    ]
    costs = [
        [
            _maybe(r.get("percent"), "{:.3f}"),
            *[_maybe(r.get(f"{part}_seconds"), "{:.1f}") for part in _PARTS],
            "-" if r.get("bytes") is None else size(r["bytes"]),
            _maybe(r.get("retention"), "{:.1f}%"),
            _maybe(r.get("speed_up"), "{:.2f}"),
        ]
        for r in rows
    ]
    names = ["% of encoder", *(f"{part.replace('_', '-')} s" for part in _PARTS)]
    return "\n\n".join(
        format_table([*system, *header], [a + b for a, b in zip(systems, cells, strict=True)])
        for header, cells in (
            (["seeds", *(METRICS[key] for key in keys), f"{_compared(rows, keys)} − BERT"], scores),
            ([*names, "stored", "retention", "speed-up"], costs),
        )
    )


def _compared(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """Name of the metric that is the rows' score."""
    first = rows[0] if rows else {}
    key = next((key for key in keys if first.get(key) == first.get("score")), None)
    return METRICS[key] if key else "score"


_PARTS = ("fine_tuning", "extraction", "training")


def _with_deviation(row: Row, key: str) -> str:
    """Mean over seeds, with the standard deviation where there is one."""
    deviation = row.get(f"{key}_sd")
    return _maybe(row.get(key), "{:.1f}") + ("" if deviation is None else f" ± {deviation:.1f}")


def _maybe(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _keys(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that occur, in the order in which they are listed."""
    return [key for key in METRICS if any(key in metrics for metrics in found)]


def _cells(metrics: Mapping[str, float], keys: Sequence[str]) -> list[str]:
    return [_maybe(metrics.get(key), "{:.1f}") for key in keys]


def status_table(status: Row) -> str:
    """What a workspace holds and what can be run next."""
    items = ", ".join(f"{split} {n:,}" for split, n in status["items"].items())
    stored = {tag: list(splits) for tag, splits in status["stored"].items()}
    for tag, splits in status["unfinished"].items():
        stored.setdefault(tag, []).extend(f"{split} (unfinished)" for split in splits)
    scored = (list(s["bert"]) for s in status["snapshots"] if s["bert"])
    scores = next(scored, [])
    lines = [
        f"workspace  {status['workspace']}",
        f"model      {status['model']}",
        f"task       {status['task']} ({items or 'hidden states alone'})",
        "",
        format_table(
            ["snapshot", "made", *(f"BERT {METRICS[key]}" for key in scores), "activations"],
            [
                [
                    s["tag"],
                    "yes" if s["made"] else "no",
                    *_cells(s["bert"] or {}, scores),
                    _stored(stored.get(s["tag"], [])),
                ]
                for s in status["snapshots"]
            ],
        ),
    ]
    if status["heads"]:
        heads = (f"{h['name']} ({h['trained_on']})" for h in status["heads"])
        lines += ["", "heads      " + ", ".join(heads)]
    if status["next"]:
        lines += ["", "next:", *(f"  {command}" for command in status["next"])]
    return "\n".join(lines)


def _stored(splits: Sequence[str]) -> str:
    """The stored splits of the own data, and the names of other data sets that are stored."""
    parsed = {split: StoredName.parse(split.partition(" ")[0]).dataset for split in splits}
    own = [split for split, dataset in parsed.items() if dataset is None]
    added = sorted({dataset for dataset in parsed.values() if dataset is not None})
    return ", ".join([*own, *(f"{dataset}-…" for dataset in added)]) or "-"


def quickstart_table(result: Row) -> str:
    """The one table of the quickstart, with where the time went."""
    keys = _keys([r["metrics"] for r in result["rows"]])
    rows = [
        [r["system"], r["trained_on"], r["evaluated_on"], f"{r['percent_of_encoder']:.3f}"]
        + _cells(r["metrics"], keys)
        for r in result["rows"]
    ]
    header = ["system", "trained on", "evaluated on", "% of encoder"]
    table = format_table([*header, *(METRICS[key] for key in keys)], rows)
    seconds = "   ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items())
    return f"{table}\n\nseconds: {seconds}\n\n{result['remark']}"


def mapping_table(values: Row) -> str:
    """Names and values, nested names joined by dots."""
    return format_table(["name", "value"], [[k, _text(v)] for k, v in _flat("", values)])


def _flat(prefix: str, values: Row) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _flat(f"{name}.", value) if isinstance(value, Mapping) else [(name, value)]
    return found


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
