"""Figures and tables of docs/performance.md, from the JSON reports beside it.

    python docs/generate_figures.py
    python docs/generate_figures.py --page docs/analyses.md

Every report docs/performance/NAME.json becomes NAME.png, bars of its ratios on a log scale, and the
table between the comments `<!-- table: NAME -->` and `<!-- end -->` of the page. Sides of a report
whose names end in ` | CONDITION`, and of `compression` in `, CONDITION`, are listed by condition.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

PAGE = Path(__file__).with_name("performance.md")
_TABLE = re.compile(r"(<!-- table: ([a-z0-9_-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_ENCODINGS = ("int8", "int4")
_COLOURS = ("#1f77b4", "#d62728", "#111111", "#ff7f0e", "#888888", "#2ca02c", "#9467bd")
_KEEPS = ((0.01, "values"), (0.1, "course"), (float("inf"), "–"))
"""Accuracy where the largest deviation is no more than this part of the range in float32."""

Report = Mapping[str, Any]


def main() -> None:
    """Draw all reports and write their tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    page: Path = parser.parse_args().page
    for path in sorted(page.with_suffix("").glob("*.json")):
        report = json.loads(path.read_text())
        if "curves" in report:
            draw_curves(report, path.with_suffix(".png"))
        elif "ratios" in report:
            draw(report, path.with_suffix(".png"))
    page.write_text(with_tables(page.read_text(), page.with_suffix("")))


def with_tables(text: str, folder: Path) -> str:
    """The page with the tables of all reports it names, as they are in the folder."""

    def fill(match: re.Match[str]) -> str:
        name, make = _PARTS.get(match[2], (match[2], table))
        path = folder / f"{name}.json"
        filled = make(json.loads(path.read_text())) + "\n" if path.is_file() else ""
        return f"{match[1]}{filled}{match[3]}"

    return _TABLE.sub(fill, text)


def table(report: Report) -> str:
    """Medians of a report as Markdown: a row for each side, a column for each condition.

    What stands in brackets is the ratio: how many times better ours was in the same repetition.
    """
    if "statistics" in report:
        return _deviations(report)
    if "curves" in report:
        return _curves(report)
    if report.get("benchmark") == "compression":
        report = {**report, **{key: _by_condition(report[key]) for key in ("medians", "ratios")}}
    conditions = _conditions(report["medians"])
    sides = list(dict.fromkeys(_side(name) for name in report["medians"]))
    readers = report["settings"].get("readers", {})
    header = [report["unit"], *(["MB/example"] if readers else []), *conditions]
    if conditions == [""]:
        header[-1] = "median"
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for side in sides:
        cells = [side]
        if readers:
            cells.append(f"{readers[side]['bytes_per_example'] / 1e6:.2f}")
        for condition in conditions:
            name = f"{side} | {condition}" if condition else side
            median, ratio = report["medians"].get(name), report["ratios"].get(name)
            cells.append(
                ("" if median is None else _digits(median))
                + ("" if ratio is None else f" ({_digits(ratio)}×)")
            )
        lines.append(cells)
    for name, ratio in report["ratios"].items():
        if not {name, name.rpartition(": ")[2]} & report["medians"].keys():
            lines.append([f"*{name}*", _digits(ratio), *[""] * (len(header) - 2)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _deviations(report: Report) -> str:
    """The report of `deviation.py`, with its caption and what each encoding is good for."""
    settings = report["settings"]
    groups = f"; groups: the classes of `{settings['groups']}`" if settings["groups"] else ""
    caption = (
        f"{settings['encoder']}, fine-tuned on {settings['task']}, {settings['layers']} × "
        f"{settings['hidden']}; snapshots {' and '.join(settings['snapshots'])}, "
        f"`{settings['split']}`: {settings['windows']:,} windows, n = {settings['tokens']:,} "
        f"tokens{groups}. `{report['command']}`"
    )
    header = ["statistic", "float32"]
    for encoding in _ENCODINGS:
        header += [f"{encoding}: largest", "keeps"]
    lines = [header, ["---", "---", *["---:", "---"] * len(_ENCODINGS)]]
    for name, measured in report["statistics"].items():
        cells = [
            name,
            f"{_digits(measured['least'])} to {_digits(measured['most'])}".replace("-", "−"),
        ]
        for encoding in _ENCODINGS:
            of_encoding = measured[encoding]
            if of_encoding["lost"]:
                cells += ["", "–"]
                continue
            off = of_encoding["absolute"]["largest"]
            share = off / max(measured["most"] - measured["least"], 1e-300)
            cells += [_short(off), next(word for limit, word in _KEEPS if share <= limit)]
        lines.append(cells)
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{caption}\n\n{rows}"


def _curves(report: Report) -> str:
    """The report of `rate.py`: what each codec takes and loses, a column for each encoder."""
    curves = report["curves"]
    header = ["codec", *(f"{name}: bits | error | worst layer" for name in curves)]
    rows: dict[str, dict[str, str]] = {}
    for name, curve in curves.items():
        for codec, points in curve["points"].items():
            for p in points:
                cells = f"{p['bits']:.2f} | {p['error']:.3g} | {p['worst_layer']:.3g}"
                rows.setdefault(f"{codec}, {p['setting']}", {})[name] = cells
    lines = [header, ["---", *["---: | ---: | ---:"] * len(curves)]]
    lines += [[row, *(cells.get(name, " |  | ") for name in curves)] for row, cells in rows.items()]
    sizes = [
        f"{name}: {c['layers']} × {c['hidden']}, fitted on {c['fitted_tokens']:,} tokens, "
        f"measured on {c['measured_tokens']:,}, {c['massive_tokens']:,} massive ones left out, "
        f"matrices of {c['matrices_mb']:.0f} MB a split"
        for name, c in curves.items()
    ]
    table_of = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table_of}\n\n{'. '.join(sizes)}."


def _errors(report: Report) -> str:
    """The errors of `size.py` on real hidden states, a row for each encoding that has some."""
    measured = {name: e for name, e in report["errors"].items() if " | real" in name}
    header = ["encoding", "relative error (Frobenius)", "worst layer", "nrmse"]
    lines = [header, ["---", *["---:"] * 3]]
    for name, errors in measured.items():
        if any(errors.values()):
            lines.append(
                [_side(name), *(f"{error:.1e}".replace("e-0", "e-") for error in errors.values())]
            )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _head_scores(report: Report) -> str:
    """The heads of `size.py`: scores on float32, and what other encodings differ from them."""
    compared = report["heads"]["compared"]
    metrics = list(dict.fromkeys(row["metric"] for row in compared))
    lines = [["", *metrics], ["---", *["---:"] * len(metrics)]]
    for encoding in dict.fromkeys(row["encoding"] for row in compared):
        cells = [encoding]
        for row in (row for row in compared if row["encoding"] == encoding):
            gap = f"{row['difference']:+.2f} ± {row['standard error']:.2f}".replace("-", "−")
            cells.append(f"{row['mean']:.2f}" if encoding == "float32" else gap)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_PARTS = {"size-errors": ("size", _errors), "size-heads": ("size", _head_scores)}
"""Further tables of a report, by the name that a page has for them."""


def draw_curves(report: Report, path: Path) -> None:
    """Bits a value against error, both on a log scale, a panel for each encoder, as a PNG."""
    curves = report["curves"]
    figure = Figure(figsize=(4.2 * len(curves), 4.2), layout="compressed")
    panels = np.atleast_1d(figure.subplots(1, len(curves), sharex=True, sharey=True))
    codecs = dict.fromkeys(codec for curve in curves.values() for codec in curve["points"])
    markers = dict(zip(codecs, "osD^vPX", strict=False))
    colours = dict(zip(codecs, _COLOURS, strict=False))
    for ax, (name, curve) in zip(panels, curves.items(), strict=True):
        for codec, points in curve["points"].items():
            ordered = sorted(points, key=lambda p: p["bits"])
            ax.plot(
                [p["error"] for p in ordered],
                [p["bits"] for p in ordered],
                marker=markers[codec],
                markersize=5,
                color=colours[codec],
                linewidth=2.2 if codec == "transform" else 1,
                label=codec,
            )
        ax.set_xscale("log")
        ax.set_yscale("log", base=2)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("error, in deviations of the channel", fontsize=9)
        ax.grid(alpha=0.3, which="both")
    panels[0].set_yticks([0.5, 1, 2, 4, 8, 16], ["½", "1", "2", "4", "8", "16"])
    panels[0].set_ylabel("bits a value", fontsize=9)
    panels[0].legend(fontsize=7)  # it has all codecs
    _save(figure, path, 96)


def draw(report: Report, path: Path) -> None:
    """Bars of the ratios to other sides on a log scale, a panel for each condition, as a PNG.

    Other ratios of a report, such as a share of time, are in its table alone.
    """
    ratios = {name: r for name, r in report["ratios"].items() if name in report["medians"]}
    if not ratios:
        return
    conditions = _conditions(ratios)
    by_condition = {
        c: {_side(name): ratio for name, ratio in ratios.items() if _condition(name) == c}
        for c in conditions
    }
    # one order for all panels, from the first one, so that rows can be compared
    first = by_condition[conditions[0]]
    sides = sorted(
        dict.fromkeys(map(_side, ratios)), key=lambda side: first.get(side, float("inf"))
    )
    width, height = 3.6 + 3.2 * len(conditions), 1.4 + 0.27 * len(sides)
    figure = Figure(figsize=(width, height), layout="compressed")
    figure.suptitle(f"{report['benchmark']}: ratio to each side", fontsize=13)
    panels = figure.subplots(1, len(conditions), sharey=True, squeeze=False)[0]
    for ax, condition in zip(panels, conditions, strict=True):
        _bars(ax, sides, by_condition[condition])
        ax.set_title(condition, fontsize=10)
        ax.set_xlabel(f"ratio of {report['unit']} (log scale)", fontsize=9)
    panels[0].set_yticks(range(len(sides)), sides, fontsize=8)
    _save(figure, path)


def _save(figure: Figure, path: Path, colours: int = 48) -> None:
    """Write a figure as PNG; few colours are enough for it, and keep the file small."""
    canvas = FigureCanvasAgg(figure)  # without pyplot, no display is needed
    figure.set_dpi(130)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(colours).save(path, optimize=True)


def _bars(ax: Axes, sides: Sequence[str], ratios: Mapping[str, float]) -> None:
    places = [i for i, side in enumerate(sides) if side in ratios]
    values = [ratios[sides[i]] for i in places]
    colours = [
        "#999999" if sides[i].startswith("limit") else "#0072B2" if value >= 1 else "#D55E00"
        for i, value in zip(places, values, strict=True)
    ]
    # bars begin at 1, where both are equally good
    ax.barh(places, [v - 1 for v in values], left=1, color=colours, height=0.75)
    ax.set_xscale("log")
    low, high = min(1.0, *values), max(1.0, *values)
    ax.set_xlim(low / 5, high * 5)  # room for the numbers
    for i, value in zip(places, values, strict=True):
        ax.annotate(
            f"{_digits(value)}×",
            (value, i),
            xytext=(3 if value >= 1 else -3, 0),
            textcoords="offset points",
            ha="left" if value >= 1 else "right",
            va="center",
            fontsize=7.5,
        )
    ax.set_ylim(-0.6, len(sides) - 0.4)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.xaxis.set_major_locator(LogLocator(numticks=6))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="x", labelsize=8)
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    for edge in ("top", "right"):
        ax.spines[edge].set_visible(False)


def _by_condition(report: Mapping[str, Any]) -> dict[str, Any]:
    """Values of sides that are named ``SIDE, CONDITION``."""
    return {name.replace(", ", " | "): value for name, value in report.items()}


def _conditions(names: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(map(_condition, names)))


def _condition(name: str) -> str:
    return name.partition(" | ")[2]


def _side(name: str) -> str:
    return name.partition(" | ")[0]


def _short(value: float) -> str:
    """One significant digit, or a whole number."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1g}"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
