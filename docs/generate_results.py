"""Writes the tables of the pages of results from the rows in docs/results/.

Usage: python docs/generate_results.py

A page such as docs/results.md has its tables described in ``docs/results/views/results.toml``:
each, between the comments ``<!-- table: NAME -->`` and ``<!-- end -->`` of the page, is some rows
and columns of a table of a run's report. Between
``<!-- claims: RUN RUN -->`` and ``<!-- end -->`` stand the claims of the runs' ``claims.toml``,
with the verdicts that follow from the intervals in their ``comparisons.json``: a column for each
run, or of one run for each snapshot. Between
``<!-- patterns: RUNS -->`` and ``<!-- end -->`` those of `patterns` on the runs of a folder;
between ``<!-- frozen: REPORTS -->`` and ``<!-- end -->`` what reports of benchmarks/frozen.py say;
between ``<!-- spread: TASK -->`` and ``<!-- end -->`` what methods of fine-tuning come to
over seeds; between ``<!-- weights: RUNS -->`` and ``<!-- end -->`` how much more the upper third of
the layers weighs than the others, in runs whose names begin so (``all``: in every run); between
``<!-- hours: RUN -->`` and ``<!-- end -->`` what the runs of docs/results/not_run.toml would take.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patterns import judged

from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.text import signed

RESULTS = Path(__file__).parent / "results"
VIEWS = {path.stem: path for path in sorted((RESULTS / "views").glob("*.toml"))}
PAGES = {name: Path(__file__).parent / f"{name}.md" for name in VIEWS}
MARGIN = 1.0
"""Points within which two scores count as the same."""
MARKS = {"holds": "✓", "does not": "✗", "cannot be told": "?"}
"""A verdict in a table of claims."""
_PLACE = re.compile(
    r"(<!-- (table|claims|patterns|frozen|spread|weights|hours): ([\w -]+) -->\n).*?(<!-- end -->)",
    re.DOTALL,
)


def render(page: str, text: str) -> str:
    """A page with all tables as the committed rows have them.

    Args:
        page: one of `PAGES`.
        text: Text of the page.
    """
    views = tomllib.loads(VIEWS[page].read_text(encoding="utf-8"))

    def fill(match: re.Match[str]) -> str:
        name = match[3]
        make = {"claims": claims, "patterns": patterns_of, "frozen": frozen}
        make |= {"spread": spread, "weights": weights, "hours": hours}
        made = view(views[name]) if match[2] == "table" else make[match[2]](name)
        return f"{match[1]}{made}\n{match[4]}"

    return _PLACE.sub(fill, text)


def view(asked: Mapping[str, Any]) -> str:
    """Rows of a table of a report, as Markdown, with what they rest on below.

    Args:
        asked: ``run`` and ``table``; ``columns``, each a key, a label and optionally ``count``,
            ``signed``, ``text``, ``size``, ``interval``, ``gain`` or a number of digits, which may
            also stand behind ``interval``; ``where``, values that rows have. With ``parts``, each
            of which says some of these and ``as``, rows with the same value of ``by`` become one,
            whose keys are those of the first part, and KEY of a part is ``AS KEY``.
    """
    columns = [_column(*spec) for spec in asked["columns"]]
    basis = asked.get("basis")
    if "parts" not in asked:
        rows, values = _rows(asked)
        basis = values if basis is None else basis
    else:
        joined: dict[Any, dict[str, Any]] = {}
        for part in asked["parts"]:
            for row in _rows({**asked, **part})[0]:
                to = joined.setdefault(row[asked["by"]], dict(row))
                to.update({f"{part['as']} {key}": value for key, value in row.items()})
        rows = list(joined.values())
    if asked.get("sort"):
        rows.sort(key=lambda row: row[asked["sort"]] or 0.0)
    lines = [[column.text(row) for column in columns] for row in rows]
    lines = [list(line) for line in dict.fromkeys(map(tuple, lines))]  # baselines of each snapshot
    table = _markdown(columns, lines)
    shown = "in brackets" if any(column.interval for column in columns) else "in the rows"
    basis = re.sub("in (the files|brackets) 95 %", f"{shown} 95 %", basis or "")
    return f"{table}\n\n{basis}\n" if basis else f"{table}\n"


def _rows(asked: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows of a table that have what is asked for, and what the table rests on."""
    path = RESULTS / asked["run"] / "tables" / f"{asked['table']}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    where: Mapping[str, Any] = asked.get("where", {})
    rows = [
        row
        for row in (
            content if isinstance(content, list) else content["rows"]
        )  # a list of `table --json`
        if all(row.get(key) in (v if isinstance(v, list) else [v]) for key, v in where.items())
    ]
    if not rows:
        raise SystemExit(f"{path} has no row with {where}")
    return rows, "" if isinstance(content, list) else content.get("basis", "")


def claims(names: str) -> str:
    """The claims of runs, a row for each comparison, with differences and verdicts.

    Args:
        names: folders of docs/results/: of one, a column for each snapshot; of several, one each,
            headed by the ``title`` of its claims.
    """
    runs = names.split()
    cells: dict[tuple[str, str], dict[str, str]] = {}
    basis: dict[str, list[str]] = {}
    for run in runs:
        folder = RESULTS / run
        asked = tomllib.loads((folder / "claims.toml").read_text(encoding="utf-8"))
        sides, title = asked.get("beside", {}).get("as", ("", "")), asked.get("title", run)
        comparisons = json.loads((folder / "comparisons.json").read_text(encoding="utf-8"))
        by_pair = {(c["first"], c["second"]): c for c in comparisons}
        for claim in asked["claim"]:
            for first, second in claim["pairs"]:
                tag = second.rpartition(":")[2]
                end = "" if runs[1:] else f":{tag}"
                pair = f"{first.removesuffix(end)}{sides[0]} − {second.removesuffix(end)}{sides[1]}"
                row = claim["text"], pair
                if claim.get("untested"):
                    said = f"{signed(_gain(run, first))}, not tested"
                else:
                    c = by_pair[first, second]
                    said = MARKS[verdict(claim["kind"], c["low"], c["high"])]
                    said = f"{_interval(c['difference'], c['low'], c['high'])} {said}"
                cells.setdefault(row, {})[title if runs[1:] else f"at {tag}"] = said
        basis.setdefault(_compared(comparisons[0]), []).append(title)
    heads = list(dict.fromkeys(head for row in cells.values() for head in row))
    lines, last = [], ""
    for (text, pair), said_in in cells.items():
        said_by_head = (said_in.get(head, "") for head in heads)
        lines.append([text if text != last else "", pair, *said_by_head])
        last = text
    columns = [Column("", name, "text") for name in ("claim", "compared", *heads)]
    several = len(basis) > 1
    told = [f"{text} ({', '.join(of)})" if several else text for text, of in basis.items()]
    return f"{_markdown(columns, lines)}\n\nDifferences in {'; '.join(told)}.\n"


def _interval(value: float, low: float, high: float) -> str:
    """A difference and its interval."""
    return f"{signed(value)} [{signed(low)}, {signed(high)}]"


def _compared(first: Mapping[str, Any]) -> str:
    """The units of a run's comparisons, and what was drawn."""
    metric, drawn, items = METRICS[first["metric"]].label, first["clusters"], first["questions"]
    clusters, name = first["words"]
    over = f"{drawn:,} {clusters} with {items:,} {name}" if drawn < items else f"{items:,} {name}"
    if "fine-tunings, each of which" in first["sentence"]:
        runs = f"{first['seeds'][0]} fine-tunings and {over}"
        return f"points of {metric}, over {runs}"
    return f"points of {metric}, bootstrap over {over}"


def _gain(run: str, head: str) -> float:
    """The lead of a head over the encoder on a part of the data, in points, by the run's results.

    Args:
        run: folder of docs/results/.
        head: NAME@fPART:TRAINED_ON, evaluated on the snapshot that it was trained on.
    """
    name, part, tag = re.fullmatch(r"(.+)@f([\d.]+):(.+)", head).groups()  # type: ignore[union-attr]
    rows = json.loads((RESULTS / run / "tables" / "results.json").read_text())["rows"]
    asked = (name, float(part), tag, tag)
    keys = ("name", "fraction", "trained_on", "checkpoint")
    [row] = [row for row in rows if tuple(row.get(key) for key in keys) == asked]
    return float(row["difference"])


def patterns_of(runs: str) -> str:
    """The published patterns, and what runs of a folder say of each: effects by seed, verdicts."""
    read = [json.loads(path.read_text()) for path in sorted((RESULTS / runs).glob("*.json"))]
    cells: dict[str, dict[str, str]] = {}
    text = ""
    for named, encoder, task, effects, said in judged(read, verdict):
        text = named or text
        effects = re.sub(r" \((\+\S+ to \+|−\S+ to −)\S+\)", "", effects)  # shown if it holds 0
        cells.setdefault(text, {})[f"{encoder}, {task}"] = f"{effects} {MARKS[said]}"
    heads = sorted({head for row in cells.values() for head in row})
    columns = [Column("", name, "text") for name in ("pattern", *heads)]
    lines = [[text, *(row.get(head, "") for head in heads)] for text, row in cells.items()]
    return f"{_markdown(columns, lines)}\n"


def frozen(reports: str) -> str:
    """Seconds of a step with frozen layers, a row for each report, medians of its repetitions."""
    lines = []
    for path in sorted((RESULTS / reports).glob("*.json")):
        runs = json.loads(path.read_text())
        settings, medians, ratios = runs["settings"], runs["medians"], runs["ratios"]
        seconds = [f"{medians[name]:.3f}" for name in ("all layers", "freeze", "freeze-stored")]
        faster = [f"{ratios[name]:.2f}" for name in ("all layers", "freeze")]
        after = f"{settings['epochs_to_break_even']:.1f}"
        lines.append([settings["model"], str(settings["frozen_layers"]), *seconds, *faster, after])
    names = ("encoder", "frozen", "all layers (s)", "freeze (s)", "freeze-stored (s)")
    ends = ("× faster than all layers", "× faster than freeze", "paid for after (epochs)")
    columns = [Column("", name, "text" if name == "encoder" else "count") for name in names + ends]
    return f"{_markdown(columns, lines)}\n"


def spread(task: str) -> str:
    """Methods of fine-tuning on a task, a row for each, and their difference from the first."""
    content = json.loads((RESULTS / "variants" / f"{task}.json").read_text(encoding="utf-8"))
    names = (f"failed of {content['rows'][0]['runs']}", "difference (95 %)", "trained weights")
    columns = [Column("", "method", "text"), Column("", METRICS[content["metric"]].label)]
    costs = ("fine_tuning_seconds", "extraction_seconds", "training_seconds")
    timed = costs[0] in content["rows"][0]
    columns += [Column("", name) for name in (*names, *["seconds"][:timed])]
    lines = []
    for row in content["rows"]:
        failed, trained = round(row["failed"] * row["runs"]), row["trained_parameters"]
        line = [row["method"], f"{row['score']:.1f} ± {row['score_sd']:.1f}", str(failed)]
        ends = [row[key] for key in ("difference", "difference_low", "difference_high")]
        line += ["–" if None in ends else _interval(*ends), f"{trained:,}"]
        if timed:
            line.append(f"{sum(row[key] for key in costs):.1f}")
        lines.append([cell.replace("-", "−") if cell[:1] in "-+" else cell for cell in line])
    baseline = f"Baseline, {content['baseline_name']}: {content['baseline'] or 0:.1f}."
    return f"{_markdown(columns, lines)}\n\n{baseline}\n"


def weights(runs: str) -> str:
    """Mean learned weight of the upper third of the layers less that of the next heaviest third.

    Args:
        runs: beginning of the names of folders of docs/results/, or ``all``.
    """
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for path in sorted(RESULTS.glob("*/tables/pooling_weights.json")):
        run = path.parents[1].name
        if runs != "all" and not run.startswith(runs):
            continue
        for row in json.loads(path.read_text())["rows"]:
            layers = [row[f"layer_{i}"] for i in range(1, 1 + sum("layer_" in k for k in row) - 1)]
            size = len(layers) // 3
            means = [sum(layers[i * size : (i + 1) * size]) / size for i in range(3)]
            ahead = means[2] - max(means[:2])
            cells.setdefault((run, row["name"]), {})[row["trained_on"]] = ahead
    tags = sorted({tag for row in cells.values() for tag in row}, key=lambda tag: float(tag[:-1]))
    columns = [Column("", name, "text") for name in ("run", "head")]
    columns += [Column("", tag, "signed") for tag in tags]
    lines = [
        [*which, *(f"{row[tag]:+.2f}".replace("-", "−") if tag in row else "–" for tag in tags)]
        for which, row in cells.items()
    ]
    gains = [ahead for row in cells.values() for ahead in row.values()]
    basis = (
        "Mean weight of a layer of the upper third, in per cent, less that of the heavier of the "
        f"other two thirds, by the snapshot trained on; above 0 in {sum(a > 0 for a in gains)} of "
        f"{len(gains)}."
    )
    return f"{_markdown(columns, lines)}\n\n{basis}\n"


def hours(run: str) -> str:
    """Hours and bytes that runs would take at the rates of another one, a row for each.

    Fine-tuning and extraction grow with the questions and with layers × width², a store with the
    questions and with states × width.

    Args:
        run: folder of docs/results/ whose costs are known: ``measured`` of not_run.toml.
    """
    asked = tomllib.loads((RESULTS / "not_run.toml").read_text(encoding="utf-8"))
    rows = json.loads((RESULTS / run / "tables" / "costs.json").read_text(encoding="utf-8"))["rows"]
    [cost] = [row for row in rows if row["title"].startswith("1e → 1e: ")]

    def sizes(row: Mapping[str, Any]) -> tuple[float, float, float]:
        """Fine-tuning, extraction and the store of a snapshot, each in a unit of its own."""
        weights, questions = row["layers"] * row["width"] ** 2, row["train"] + row["dev"]
        trained = row["fine_tunings"] * row["epochs"] * row["train"] * weights
        extracted = row["fine_tunings"] * row["snapshots"] * questions * weights
        return trained, extracted, row["train"] * (row["layers"] + 1) * row["width"]

    keys = ("fine_tuning_seconds", "extraction_seconds", "bytes")
    units = [cost[key] / size for key, size in zip(keys, sizes(asked["measured"]), strict=True)]
    lines = []
    for row in asked["run"]:
        train, read, stored = (x * unit for x, unit in zip(sizes(row), units, strict=True))
        times = [f"{seconds / 3600:.1f}" for seconds in (train, read)]
        lines.append([row["title"], str(row["fine_tunings"]), str(row["snapshots"]), *times])
        lines[-1].append(f"{stored / 1e9:,.0f}")
    names = ("fine-tunings", "snapshots stored of each", "fine-tuning (h)", "extraction (h)")
    columns = [Column("", "run", "text")]
    columns += [Column("", name) for name in (*names, "GB of a snapshot")]
    return f"{_markdown(columns, lines)}\n"


def verdict(kind: str, low: float, high: float) -> str:
    """The verdict of an interval of a difference on a claim.

    Args:
        kind: ``better``: the first is better; ``match``: it is not worse by more than `MARGIN`;
            ``alike``: the two are within `MARGIN` of each other.
        low: lower end of the 95 % interval, points.
        high: upper end.
    """
    holds, fails = {
        "better": (low > 0, high < 0),
        "match": (low > -MARGIN, high <= -MARGIN),
        "alike": (low > -MARGIN and high < MARGIN, low >= MARGIN or high <= -MARGIN),
    }[kind]
    return "holds" if holds else "does not" if fails else "cannot be told"


def _column(key: str, label: str, form: str | int = 1, digits: int = 1) -> Column:
    if isinstance(form, int):
        return Column(key, label, digits=form, sd=True)
    if form == "interval":
        return Column(key, label, digits=digits, sd=True, interval=True)
    if form == "gain":
        return Column(key, label, gain=True)
    return Column(key, label, form)  # type: ignore[arg-type]


def _markdown(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> str:
    marks = ["---:" if column.is_number else "---" for column in columns]
    rows = [[column.label for column in columns], marks, *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    for name, path in PAGES.items():
        path.write_text(render(name, path.read_text(encoding="utf-8")), encoding="utf-8")
