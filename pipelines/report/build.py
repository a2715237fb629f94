"""Write the report of a workspace: `index.html`, `tables/` and `figures/`, or nothing at all."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.files import new_folder
from bertvision.pipelines.report.budget import costs, parameters
from bertvision.pipelines.report.errors import error_analysis
from bertvision.pipelines.report.facts import facts
from bertvision.pipelines.report.headline import sentences
from bertvision.pipelines.report.listing import (
    all_results,
    control,
    ensembles,
    other_task,
    sources,
)
from bertvision.pipelines.report.page import GENERATOR, render
from bertvision.pipelines.report.pooling import pooling_section
from bertvision.pipelines.report.probing import FILES, probing_section, probing_sentence
from bertvision.pipelines.report.scores import cross_checkpoint, data_fractions, learning_curve
from bertvision.pipelines.report.section import Section
from bertvision.pipelines.results.rows import Results, read_rows, with_marks
from bertvision.pipelines.text import fill, size
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.workspace import Workspace

PAGE, TABLES, FIGURES = "index.html", "tables", "figures"
_PROBES_AT = 4
"""Behind the weights of the layers, which ask a similar question."""
_KINDS = {TABLES: (".csv", ".json"), FIGURES: (".svg",)}


class Report(NamedTuple):
    """What was written."""

    page: Path
    """The HTML file."""
    tables: list[str]
    """Names of the tables; each is there as CSV and JSON."""
    figures: list[str]
    """Names of the figures; each is also there as SVG."""
    bytes: int
    """Size of the page."""
    results: int
    """Results that it shows."""
    missing: list[str]
    """Titles of the sections whose data are not in the workspace."""

    def to_json(self) -> dict[str, Any]:
        """Values by name, the page as text."""
        return {**self._asdict(), "page": str(self.page)}

    def __repr__(self) -> str:
        lines = [
            f"page    {self.page} ({size(self.bytes)}, {self.results} results)",
            fill(f"tables  {', '.join(self.tables)}", 8),
            fill(f"figures {', '.join(self.figures)}", 8),
        ]
        if self.missing:
            missing = ", ".join(self.missing)
            lines.append(fill(f"no data for: {missing}; the page says what makes them"))
        return "\n".join(lines)


def write_report(workspace: Workspace, out: Path | None = None) -> Report:
    """Write the report of everything that was scored on dev, and of probes.

    The same workspace gives the same bytes. An older report at the same place is replaced.

    Args:
        workspace: with results.
        out: folder; None is ``report/`` in the workspace.

    Raises:
        WorkspaceError: there are no results, or a file is damaged.
        InputError: ``out`` is a file, or a folder that holds something else than a report.
    """
    target = (workspace.root / "report" if out is None else out).expanduser().resolve()
    check_place(target)
    results, probes = with_marks(read_rows(workspace)), probing_section(workspace)
    if not results.runs and probes is None:
        raise WorkspaceError(
            f"{workspace.root} has no results to report: `{BERT_COMMAND}` scores BERT at its "
            "snapshots; `bertvision status` says what can be run next"
        )
    found = _sections(workspace, results) if results.runs else []
    if probes is not None:
        found.insert(len(found) and _PROBES_AT, probes)
    page = render(
        name=workspace.root.name,
        facts=facts(workspace, results),
        headline=sentences(results) if results.runs else [probing_sentence(workspace)],
        sections=found,
        newest=_newest(workspace, results),
    ).encode("utf-8")
    figures = [figure for section in found for figure in section.figures]
    tables = [table for section in found for table in section.tables]
    with new_folder(target) as folder:
        (folder / TABLES).mkdir()
        for table in tables:
            (folder / TABLES / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
            (folder / TABLES / f"{table.name}.json").write_text(table.json(), encoding="utf-8")
        (folder / FIGURES).mkdir()
        for figure in figures:
            path = folder / FIGURES / f"{figure.ident}.svg"
            path.write_text(figure.file, encoding="utf-8")
        (folder / PAGE).write_bytes(page)
    return Report(
        page=target / PAGE,
        tables=[table.name for table in tables],
        figures=[figure.ident for figure in figures],
        bytes=len(page),
        results=len(results.runs),
        missing=[section.title for section in found if section.missing],
    )


def check_place(target: Path) -> None:
    """Refuse to replace anything but a report.

    Raises:
        InputError: ``target`` is a file, or a folder that holds something else.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"--out {target} is a file: give a folder, new or of an older report")
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return
    foreign = [name for name in names if name not in (PAGE, *_KINDS)]
    for name, kinds in _KINDS.items():
        if (target / name).is_dir():
            inside = sorted(path.name for path in (target / name).iterdir())
            foreign += [f"{name}/{n}" for n in inside if not n.endswith(kinds)]
    mark = f'<meta name="generator" content="{GENERATOR}">'
    if not foreign and not _holds(target / PAGE, mark):
        foreign = [PAGE]
    if foreign:
        raise InputError(
            f"--out {target} is a folder that holds {foreign[0]}, which is no part of a report: "
            "give a new folder, or one of an older report"
        )


def _holds(path: Path, mark: str) -> bool:
    try:
        return mark in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _sections(workspace: Workspace, results: Results) -> list[Section]:
    return [
        learning_curve(results),
        cross_checkpoint(results),
        data_fractions(results),
        pooling_section(workspace),
        parameters(results),
        costs(results),
        ensembles(results),
        control(results),
        *other_task(results),
        error_analysis(workspace, results),
        all_results(results),
        sources(results),
    ]


def _newest(workspace: Workspace, results: Results) -> str:
    """When the newest result was written, the only time that the report knows."""
    files = [workspace.root / run["file"] for run in results.runs]
    seconds = max(path.stat().st_mtime for path in (*files, *workspace.root.glob(FILES)))
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
