"""Writes the tables of the pages of results from the rows in docs/results/.

Usage: python docs/generate_results.py

A page such as docs/results.md has its tables described in ``docs/results/views/results.toml``:
each, between the comments ``<!-- table: NAME -->`` and ``<!-- end -->`` of the page, is some rows
and columns of a table of a run's report. Between
``<!-- claims: RUN -->`` and ``<!-- end -->`` stand the claims of the run's ``claims.toml``, with
the verdict that follows from the intervals in its ``comparisons.json``; between
``<!-- patterns: RUNS -->`` and ``<!-- end -->`` those of `patterns` on the runs of a folder;
between ``<!-- frozen: REPORTS -->`` and ``<!-- end -->`` what reports of benchmarks/frozen.py say;
between ``<!-- spread: TASK -->`` and ``<!-- end -->`` what methods of fine-tuning come to
over seeds; between ``<!-- weights: RUNS -->`` and ``<!-- end -->`` which third of the layers has
the largest learned weights, in runs whose names begin so (``all``: in every run).
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
from bertvision.pipelines.tasks.scores import METRICS
from bertvision.pipelines.text import signed

RESULTS = Path(__file__).parent / "results"
VIEWS = {path.stem: path for path in sorted((RESULTS / "views").glob("*.toml"))}
PAGES = {name: Path(__file__).parent / f"{name}.md" for name in VIEWS}
MARGIN = 1.0
"""Points within which two scores count as the same."""
_PLACE = re.compile(
    r"(<!-- (table|claims|patterns|frozen|spread|weights): ([\w-]+) -->\n).*?(<!-- end -->)",
    re.DOTALL,
)


def render(page: str, text: str) -> str:
    """A page with all tables as the committed rows have them.

    Args:
        page: one of `PAGES`.
        text: of the page.
    """
    views = tomllib.loads(VIEWS[page].read_text(encoding="utf-8"))

    def fill(match: re.Match[str]) -> str:
        name = match[3]
        make = {"claims": claims, "patterns": patterns_of, "frozen": frozen}
        make |= {"spread": spread, "weights": weights}
        made = view(views[name]) if match[2] == "table" else make[match[2]](name)
        return f"{match[1]}{made}\n{match[4]}"

    return _PLACE.sub(fill, text)


def view(asked: Mapping[str, Any]) -> str:
    """Rows of a table of a report, as Markdown, with what they rest on below.

    Args:
        asked: ``run`` and ``table``; ``columns``, each a key, a label and optionally ``count``,
            ``signed``, ``text``, ``size``, ``interval``, ``gain`` or a number of digits, which may
            also stand behind ``interval``; ``where``, values that rows have.
    """
    path = RESULTS / asked["run"] / "tables" / f"{asked['table']}.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    columns = [_column(*spec) for spec in asked["columns"]]
    where: Mapping[str, Any] = asked.get("where", {})
    rows = [
        row
        for row in (held if isinstance(held, list) else held["rows"])  # a list of `table --json`
        if all(row.get(key) in (v if isinstance(v, list) else [v]) for key, v in where.items())
    ]
    if not rows:
        raise SystemExit(f"{path} has no row with {where}")
    if asked.get("sort"):
        rows.sort(key=lambda row: row[asked["sort"]] or 0.0)
    lines = [[column.text(row) for column in columns] for row in rows]
    lines = [list(line) for line in dict.fromkeys(map(tuple, lines))]  # baselines of each snapshot
    table = _markdown(columns, lines)
    basis = asked["basis"] if "basis" in asked else held["basis"]
    shown = "in brackets" if any(column.interval for column in columns) else "in the rows"
    basis = re.sub("in (the files|brackets) 95 %", f"{shown} 95 %", basis)
    return f"{table}\n\n{basis}\n" if basis else f"{table}\n"


def claims(run: str) -> str:
    """The claims of a run, a row for each comparison, with its verdict."""
    folder = RESULTS / run
    told = tomllib.loads((folder / "claims.toml").read_text(encoding="utf-8"))
    asked, sides = told["claim"], told.get("beside", {}).get("as", ("", ""))
    held = json.loads((folder / "comparisons.json").read_text(encoding="utf-8"))
    found = {(c["first"], c["second"]): c for c in held}
    lines = []
    for claim in asked:
        for first, second in claim["pairs"]:
            if claim.get("untested"):
                mean = f"{signed(_gain(run, first), 1).replace('-', '−')} (no interval)"
                compared = f"{first}{sides[0]} − {second}{sides[1]}"
                text = claim["text"] if (first, second) == tuple(claim["pairs"][0]) else ""
                lines.append([text, compared, mean, "–", "not tested"])
                continue
            c = found[first, second]
            low, high = (signed(c[end], 1).replace("-", "−") for end in ("low", "high"))
            shown = f"{signed(c['difference'], 1).replace('-', '−')} ({low} to {high})"
            lines.append(
                [
                    claim["text"] if (first, second) == tuple(claim["pairs"][0]) else "",
                    f"{first}{sides[0]} − {second}{sides[1]}",
                    shown,
                    f"{c['seeds'][0]}, {c['seeds'][1]}",
                    verdict(claim["kind"], c["low"], c["high"]),
                ]
            )
    columns = [Column("", name, "text") for name in ("claim", "compared")]
    columns += [Column("", "difference (95 %)"), Column("", "seeds"), Column("", "verdict", "text")]
    first = held[0]
    of, drawn, items = METRICS[first["metric"]], first["clusters"], first["questions"]
    clusters, name = first["words"]
    over = f"{drawn:,} {clusters} with {items:,} {name}" if drawn < items else f"{items:,} {name}"
    basis = (
        f"Differences in points of {of}; paired bootstrap over {over}, and over seeds where there "
        "are several; the intervals are of one comparison each, not of all together."
    )
    return f"{_markdown(columns, lines)}\n\n{basis}\n"


def _gain(run: str, head: str) -> float:
    """What a head on a part of the data has above the encoder, in points, by the run's results.

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
    """The published patterns, and what runs of a folder say of each."""
    read = [json.loads(path.read_text()) for path in sorted((RESULTS / runs).glob("*.json"))]
    columns = [Column("", name, "text") for name in ("pattern", "encoder", "task")]
    columns += [Column("", "effect by seed", "text"), Column("", "verdict", "text")]
    return f"{_markdown(columns, judged(read, verdict))}\n"


def frozen(reports: str) -> str:
    """Seconds of a step with frozen layers, a row for each report, medians of its repetitions."""
    lines = []
    for path in sorted((RESULTS / reports).glob("*.json")):
        of = json.loads(path.read_text())
        settings, medians, ratios = of["settings"], of["medians"], of["ratios"]
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
    held = json.loads((RESULTS / "variants" / f"{task}.json").read_text(encoding="utf-8"))
    names = ("failed", "difference (95 %)", "trained weights", "kept (MB)")
    columns = [Column("", "method", "text"), Column("", METRICS[held["metric"]])]
    costs = ("fine_tuning_seconds", "extraction_seconds", "training_seconds")
    timed = costs[0] in held["rows"][0]
    columns += [Column("", name) for name in ("lowest", "highest", *names, *["seconds"][:timed])]
    lines = []
    for row in held["rows"]:
        failed, trained = round(row["failed"] * row["runs"]), row["trained_parameters"]
        line = [row["method"], f"{row['score']:.1f} ± {row['score_sd']:.1f}"]
        line += [f"{row['lowest']:.1f}", f"{row['highest']:.1f}", f"{failed} of {row['runs']}"]
        ends = [row[key] for key in ("difference", "difference_low", "difference_high")]
        of, low, high = ("" if end is None else signed(end, 1) for end in ends)
        line += [f"{of} ({low} to {high})" if low else of or "–", f"{trained:,}"]
        line.append(f"{row['kept_bytes'] / 1e6:.3g}")
        if timed:
            line.append(f"{sum(row[key] for key in costs):.1f}")
        lines.append([cell.replace("-", "−") if cell[:1] in "-+" else cell for cell in line])
    trivial = f"{held['baseline'] or 0:.1f}"
    basis = (
        f"Scores on dev; {held['baseline_name']}: {trivial}. Mean ± standard "
        "deviation over seeds; the interval of the difference (Welch's t) is over seeds alone, on "
        "these examples."
    )
    return f"{_markdown(columns, lines)}\n\n{basis}\n"


def weights(runs: str) -> str:
    """Mean learned weight of the layers of each third, and whether the upper third has the most.

    Args:
        runs: beginning of the names of folders of docs/results/, or ``all``.
    """
    names = ("run", "head", "trained on", "seeds", "lower", "middle", "upper", "verdict")
    columns = [Column("", n, "text" if n in names[:3] + names[-1:] else "count") for n in names]
    lines, said = [], []
    for path in sorted(RESULTS.glob("*/tables/pooling_weights.json")):
        run = path.parents[1].name
        if runs != "all" and not run.startswith(runs):
            continue
        for row in json.loads(path.read_text())["rows"]:
            layers = [row[f"layer_{i}"] for i in range(1, 1 + sum("layer_" in k for k in row) - 1)]
            size = len(layers) // 3
            means = [sum(layers[i * size : (i + 1) * size]) / size for i in range(3)]
            said.append("holds" if means[2] > max(means[:2]) else "does not")
            shown = [f"{mean:.2f}" for mean in means]
            which = [run, row["name"], row["trained_on"], str(row["seeds"])]
            lines.append([*which, *shown, said[-1]])
    basis = (
        f"Mean weight of a layer in per cent, means over seeds; thirds of the transformer layers, "
        f"without the embeddings. *Holds*: the upper third has the most, which is so in "
        f"{said.count('holds')} of {len(said)} rows. Verdicts are signs of differences of one row "
        "each: the rows have no interval."
    )
    return f"{_markdown(columns, lines)}\n\n{basis}\n"


def verdict(kind: str, low: float, high: float) -> str:
    """What an interval of a difference says of a claim.

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
