"""The section of methods with several seeds, as `bertvision spread` compares them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.repeats.charts import SEEN, number_chart, numbered, runs_chart, title_of
from bertvision.pipelines.repeats.spread import (
    LEGEND,
    Method,
    basis,
    columns,
    compare_methods,
    name_of,
    read_method,
    remarks,
    shown,
)
from bertvision.pipelines.report.section import Figure, Section
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.text import signed
from bertvision.pipelines.workspace.workspace import Workspace

_SOURCE = "FOLDER/seed-*/**/metrics.json"
_PICKED = " The highest mean was picked by these same scores, so that it looks better than it is."


class Compared(NamedTuple):
    """Methods that were read and compared."""

    methods: list[Method]
    """Methods in the order in which they were named."""
    found: dict[str, Any]
    """Fields of `spread.spread`."""
    command: str
    """The command that prints the same."""

    @property
    def files(self) -> list[Path]:
        """The scores of all runs."""
        return [Path(run["folder"]) / "metrics.json" for run in self.found["runs"]]


def read_compared(folders: Sequence[str]) -> Compared:
    """Read methods, and compare each with the first.

    Args:
        folders: Folders as `methods.read_method` takes them, one at least.

    Raises:
        WorkspaceError: a folder holds no runs, they differ in more than the seed, none of them is
            scored, or they are of another task, data or metric than those of the first.
        UnknownNameError: no run of a folder has such a system, or several are meant.
        InputError: a folder is a file, or a method is named twice.
    """
    methods = [read_method(text) for text in folders]
    comparison = compare_methods(methods)
    return Compared(methods, comparison, shlex.join(["bertvision", "spread", *folders]))


def check_same_data(workspace: Workspace, compared: Compared) -> None:
    """Refuse methods that were scored on something else than the workspace of the report.

    Raises:
        InputError: their task is another, its settings, their dev, or what was left out of it.
    """
    first, dev = compared.methods[0], workspace.config.data.get("dev")
    task, runs = workspace.config.task.model_dump(mode="json"), first.compared
    own = {
        "task": workspace.config.task.name,
        "dev": dev.sha256 if dev else None,
        "misfits": dev.misfits if dev else (),
        **{name: task[name] for name in runs["task"]},
    }
    of_runs = {
        "task": first.task,
        "dev": runs["data"]["dev"],
        "misfits": runs["misfits"],
        **runs["task"],
    }
    if difference := first_difference(own, of_runs):
        name, there, here = difference
        raise InputError(
            f"{first.root} does not belong in the report of {workspace.root}: its {name} is "
            f"{here!r}, there it is {there!r}; `{compared.command.replace('spread', 'report', 1)} "
            f"--workspace {shlex.quote(str(first.root))}` writes a page of the methods alone"
        )


def methods_section(compared: Compared) -> Section:
    """The runs as points, a curve for each variant with numbers, methods and runs as tables.

    Args:
        compared: Methods to show.
    """
    spread, tables = compared.found, [_methods(compared), _runs(compared)]
    lead = LEGEND + (_PICKED if len(spread["rows"]) > 1 else "")
    title = "Fine-tuned with several seeds"
    return Section("methods", title, lead, figures=_figures(compared), tables=tables)


def methods_sentence(spread: Mapping[str, Any]) -> str:
    """The method that scores highest in the mean, how it differs from the first, and failed runs.

    Args:
        spread: Fields of `spread.spread`.
    """
    rows = spread["rows"]
    best, several = max(rows, key=lambda row: row["score"]), len(rows) > 1
    sd = "" if best["score_sd"] is None else f" ± {best['score_sd']:.1f}"
    who = f"Of {len(rows)} methods of fine-tuning {best['method']}" if several else best["method"]
    text = f"{who} scores {'highest in the mean, ' if several else ''}{best['score']:.1f}{sd} "
    text += f"{name_of(spread['metric'])} over {counted(best['runs'], 'run')}"
    if best["difference"] is not None:
        text += f", {signed(best['difference'])} from {rows[0]['method']}"
    if best["difference_low"] is not None:
        ends = (signed(best[f"difference_{end}"]) for end in ("low", "high"))
        text += f" (95 % interval {' to '.join(ends)})"
    elif several and best is rows[0]:
        told = sum((row["difference_high"] or 0) < 0 for row in rows)
        text += f"; of {told} of the {len(rows) - 1} others the 95 % interval is wholly below it"
    if failed := sum(run["failed"] for run in spread["runs"]):
        text += f". {failed} of {len(spread['runs'])} runs are not above the trivial answer"
    return f"{text}."


def _methods(compared: Compared) -> Table:
    spread = compared.found
    return Table(
        "methods",
        "Methods",
        columns(spread),
        shown(spread),
        _SOURCE,
        compared.command,
        more=("system", "unfinished", "difference_low", "difference_high", "no_interval"),
        basis=basis(spread),
        remarks=remarks(spread),
    )


def _runs(compared: Compared) -> Table:
    """A row for each method, a column for each seed."""
    spread = compared.found
    rows: dict[str, dict[str, Any]] = {}
    for run in spread["runs"]:
        row = rows.setdefault(run["method"], {"method": run["method"]})
        row[f"seed_{run['seed']}"] = run["score"]
    seeds = sorted({run["seed"] for run in spread["runs"]})
    return Table(
        "method_runs",
        f"Each run: {name_of(spread['metric'])}",
        [
            Column("method", "method", "text"),
            *(Column(f"seed_{seed}", f"seed {seed}", digits=2) for seed in seeds),
        ],
        list(rows.values()),
        _SOURCE,
        compared.command,
        basis=basis(spread),
    )


def _figures(compared: Compared) -> list[Figure]:
    spread, origin = compared.found, (_SOURCE, f"{compared.command} --plot FILE.svg")
    title = title_of(spread)
    figures = [Figure("methods", title, f"{title}. {SEEN}", *origin, [runs_chart(spread)])]
    for name, rows in numbered(spread["rows"]).items():
        title = f"{name_of(spread['metric'])} over the number of {name}"
        seen = "Points are runs, the line is their mean; dashed is fine-tuning without a variant."
        ident = f"methods-{name.replace('.', '-')}"
        chart = number_chart(spread, rows)
        figures.append(Figure(ident, title, f"{title}. {seen}", *origin, [chart]))
    return figures
