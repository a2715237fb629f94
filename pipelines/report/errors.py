"""Error analysis, from the ``errors.json`` that ``bertvision errors`` writes beside a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.plotting import Curves, Series, points
from bertvision.pipelines.records import leaving_out, read_record
from bertvision.pipelines.report.section import Example, Figure, Reading, Section, Table
from bertvision.pipelines.results.columns import Column, columns
from bertvision.pipelines.results.error_analysis import CELLS, ErrorAnalysis
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.tasks.scores import kind_of_metrics

_SOURCE = "errors.json beside the metrics.json of a system"
_COMMAND = "bertvision errors SYSTEM"
_HEADINGS = {
    "both right": "Both right",
    "only the system": "Only the head right",
    "only BERT": "Only BERT right",
    "none": "Neither right",
    "right": "Right",
    "wrong": "Wrong",
}
_SYSTEMS = 4
"""Drawn side by side, BERT among them."""
_COLUMNS = 6
"""Systems side by side in a table; CSV and JSON have all."""


def error_analysis(reading: Reading) -> Section:
    """Groups of items, agreement with BERT, and examples to read."""
    ident, title, results = "errors", "Where they err", reading.results
    analyses = _read(reading)
    if not analyses:
        missing = (
            "No system's errors were analysed: `bertvision errors HEAD --checkpoint TAG` does, for "
            "BERT as `bert`."
        )
        if results.key in ("pearson", "spearman"):
            missing = (
                "Scores are near or far, neither right nor wrong: `bertvision compare` sets two "
                "systems side by side."
            )
        return Section(ident, title, missing=missing)
    # drawn and read are the best of the last snapshot
    last = max(SnapshotTag(a["checkpoint"]) for a in analyses)
    shown = sorted(
        (a for a in analyses if a["checkpoint"] == last and a["agreement"]), key=_by_score
    ) or [max(analyses, key=lambda a: SnapshotTag(a["checkpoint"]))]
    shown = shown[: _SYSTEMS - 1]
    spans = kind_of_metrics(shown[0]["metrics"]) == "span"
    metric, score = ("f1", "F1") if spans else ("accuracy", "Accuracy")
    rows = _grouped(shown, metric)
    systems = [name for name in ("BERT", *(a["system"] for a in shown)) if name in rows[0]]
    caption = (
        f"{score} by groups of {results.items}: {', '.join(shown[0]['groups'])}. The line between "
        f"the marks is the difference between the systems; groups of few {results.items} (n) move "
        "by chance."
    )
    name = f"{score} (%) by groups of {results.items}"
    charts = _group_charts(rows, systems, f"{score} (%)")
    figure = Figure(ident, name, caption, _SOURCE, _COMMAND, charts)
    tables = _agreement_table(analyses, results.items)
    tables += _groups_tables(analyses, metric, f"{score} by groups of {results.items}")
    tables += _confusions_table(shown[0])
    lead = (
        "Systems are written NAME:TRAINED ON:EVALUATED ON, as `bertvision errors` and `bertvision "
        f"compare` take them. The examples below are answers of {shown[0]['system']}, a seeded "
        "choice" + ("; the gold answer stands in [brackets]." if spans else ".")
    )
    return Section(
        ident, title, lead, figures=[figure], tables=tables, examples=_examples(shown[0])
    )


def _group_charts(rows: Sequence[Row], systems: Sequence[str], label: str) -> list[Curves]:
    """A chart for each grouping, with a row of points for each group; BERT is the first."""
    charts = []
    for grouping in dict.fromkeys(r["group"] for r in rows):
        named = [
            r | {"name": f"{r['value']} (n = {r['questions']:,})"}
            for r in rows
            if r["group"] == grouping
        ]
        chart = points(named, {s: s for s in systems}, label, name="name", title=grouping)
        series = {s: chart.series.get(s, Series([], [])) for s in systems}
        charts.append(replace(chart, series=series, span=(0, 100), joined=True))
    return charts


def _read(reading: Reading) -> list[Row]:
    rows = []
    for run in reading.results.runs:
        path = (reading.workspace.root / run["file"]).with_name("errors.json")
        if not path.is_file():
            continue
        command = f"bertvision errors {run['written']}"
        with leaving_out(reading.left_out):
            row: Row = read_record(path, ErrorAnalysis, command).to_json()
            row["score"], row["command"] = run["score"], command
            row["file"] = path.relative_to(reading.workspace.root).as_posix()
            rows.append(row)
    return rows


def _by_score(analysis: Mapping[str, Any]) -> tuple[float, str]:
    return -analysis["score"], analysis["system"]


def _grouped(analyses: Sequence[Row], metric: str) -> list[Row]:
    """A row for each group of questions, with the scores of BERT and of all the systems."""
    rows: dict[tuple[str, str], Row] = {}
    for analysis in analyses:
        for grouping, groups in analysis["groups"].items():
            for g in groups:
                new = {"group": grouping, "value": g["group"], "questions": g["n"]}
                row = rows.setdefault((grouping, g["group"]), new)
                row["trivial"] = g.get("trivial", row.get("trivial"))
                row[analysis["system"]] = g.get(metric)
                if g.get(f"bert_{metric}") is not None:
                    row["BERT"] = g[f"bert_{metric}"]
    return list(rows.values())


def _groups_tables(analyses: Sequence[Row], metric: str, title: str) -> list[Table]:
    """A table for each snapshot that was evaluated on: only there BERT is the same."""
    tables = []
    for tag in sorted({SnapshotTag(a["checkpoint"]) for a in analyses}, reverse=True):
        there = sorted((a for a in analyses if a["checkpoint"] == tag), key=_by_score)
        rows = _grouped(there, metric)
        systems = [a["system"] for a in there]
        bert = [] if "BERT" in systems or "BERT" not in rows[0] else [Column("BERT", "BERT")]
        if any(row["trivial"] for row in rows):
            name = "never answering" if metric == "f1" else "majority class"
            bert.append(Column("trivial", name))
        n = len(systems)
        best = f": the best {_COLUMNS} of {n} systems" if n > _COLUMNS else ""
        tables.append(
            Table(
                f"error_groups_{tag}",
                f"{title}, on {tag}{best}",
                [
                    Column("value", "group", "text"),
                    Column("questions", "n", "count"),
                    *bert,
                    *(Column(system, system) for system in systems[:_COLUMNS]),
                ],
                rows,
                "; ".join(a["file"] for a in there),
                "; ".join(a["command"] for a in there),
                group="group",
                more=systems[_COLUMNS:],
            )
        )
    return tables


def _confusions_table(analysis: Row) -> list[Table]:
    """The classes that a system takes for another."""
    if not analysis["confusions"]:
        return []
    return [
        Table(
            "confusions",
            f"The most frequent confusions of {analysis['system']}",
            [*columns("text", gold="class", answer="taken for"), *columns("count", n="n", of="of")],
            analysis["confusions"],
            analysis["file"],
            analysis["command"],
        )
    ]


def _agreement_table(analyses: Sequence[Row], items: str) -> list[Table]:
    rows = []
    for a in analyses:
        if a["agreement"]:
            counts = {cell.replace(" ", "_"): a["agreement"][cell] for cell in CELLS}
            percent = (a["second"] or {}).get("percent")
            rows.append({**a, **counts, "p": a["agreement"].get("p"), "second": percent})
    if not rows:
        return []
    second = Column("second", "second (%)")
    has_second = any(row["second"] is not None for row in rows)
    return [
        Table(
            "agreement",
            f"Agreement with BERT at the same snapshot, in {items} answered exactly right"
            + ("; second: of the wrong answers, those whose second choice is right" * has_second),
            [
                Column("system", "system", "text"),
                *(Column(cell.replace(" ", "_"), cell, "count") for cell in CELLS),
                Column("p", "p (McNemar)", digits=3),
                *([second] if has_second else []),
            ],
            rows,
            _SOURCE,
            _COMMAND,
            trace=True,
        )
    ]


def _examples(analysis: Row) -> list[Example]:
    examples = []
    for e in analysis["examples"]:
        answers = [("gold", answer_text(e["gold"])), (analysis["name"], answer_text(e["answer"]))]
        if "second" in e:
            answers.append(("its second answer", answer_text(e["second"])))
        if e["bert"] is not None:
            answers.append(("BERT", answer_text(e["bert"])))
        examples.append(
            Example(_HEADINGS.get(e["cell"], e["cell"]), e["question"], e["context"], answers)
        )
    return examples


def answer_text(value: Any) -> str:
    """An answer, a choice of gold answers, or a yes or no, as people read it."""
    if isinstance(value, bool):
        return "answerable" if value else "not answerable"
    if isinstance(value, list):
        return " / ".join(map(str, value)) or "no answer"
    return str(value) or "no answer"
