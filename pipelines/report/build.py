"""Write the report of a workspace: `index.html`, `tables/` and `figures/`, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.pipelines.files import new_folder
from bertvision.pipelines.finetuning import latency_record
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.report.analyses import layers, probing, rankings, similarity
from bertvision.pipelines.report.analyses.layers import analysis_sections
from bertvision.pipelines.report.analyses.probing import probing_section, probing_sentence
from bertvision.pipelines.report.analyses.rankings import rankings_section
from bertvision.pipelines.report.analyses.similarity import similarity_section
from bertvision.pipelines.report.costs.budget import costs, latency_section, parameters
from bertvision.pipelines.report.costs.compression import compression_section
from bertvision.pipelines.report.errors import error_analysis
from bertvision.pipelines.report.facts import facts
from bertvision.pipelines.report.headline import sentences
from bertvision.pipelines.report.intervals import add_intervals
from bertvision.pipelines.report.listing import (
    all_results,
    control,
    ensembles,
    other_task,
    sources,
    waiting_section,
)
from bertvision.pipelines.report.page import GENERATOR, render
from bertvision.pipelines.report.pooling import pooling_section
from bertvision.pipelines.report.scores import cross_checkpoint, data_fractions, learning_curve
from bertvision.pipelines.report.section import Section
from bertvision.pipelines.results.rows import Results, read_rows, with_marks
from bertvision.pipelines.text import fill, size
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.workspace import Workspace

PAGE, TABLES, FIGURES = "index.html", "tables", "figures"
_ANALYSES_AT = 4
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
    left_out: list[str]
    """Each file that is left out: whether it is damaged or of other weights than there are now, and
    what makes it again."""

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
        lines += [fill(f"left out: {message}", 10) for message in self.left_out]
        return "\n".join(lines)


class Contents(NamedTuple):
    """What a report says, before it is written."""

    results: Results
    """The rows of all results."""
    facts: list[tuple[str, list[str]]]
    """Names and lines of the header."""
    headline: list[str]
    """Sentences."""
    sections: list[Section]
    """In order."""
    left_out: list[str]
    """See `Report`."""


def read_contents(workspace: Workspace, *, intervals: bool = True) -> Contents:
    """Read everything that was scored on dev, and probes.

    What is damaged, or of other weights than there are now, is left out with what follows from it,
    and named.

    Args:
        workspace: with results.
        intervals: whether scores get theirs, which every answer is read and drawn for.

    Raises:
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    left_out: list[str] = []
    results = with_marks(read_rows(workspace, left_out=left_out))
    if intervals:
        rows = [
            *results.bert,
            *results.quantised,
            *results.heads,
            *results.ensembles,
            *results.others,
        ]
        add_intervals(workspace, rows, left_out)
    found = _sections(workspace, results, left_out) if results.runs else []
    analyses = [
        section
        for make in (probing_section, rankings_section, similarity_section)
        if (section := make(workspace, left_out)) is not None
    ]
    analyses += analysis_sections(workspace, left_out)
    if not results.runs and not analyses:
        if left_out:
            raise WorkspaceError(left_out[0])
        raise WorkspaceError(
            f"{workspace.root} has no results to report: `{BERT_COMMAND}` scores BERT at its "
            "snapshots; `bertvision status` says what can be run next"
        )
    at = _ANALYSES_AT if found else 0
    found[at:at] = analyses
    about = facts(workspace, results, left_out)
    headline = sentences(results)
    if not results.runs:
        titles = ", ".join(section.title.lower() for section in analyses)
        headline = [f"No head and no snapshot was scored yet; below: {titles}."]
        if analyses[0].ident == "probing":
            headline = [probing_sentence(workspace, left_out)]
    with leaving_out(left_out):
        found += waiting_section(workspace)
    if left_out:
        found.append(_left_out_section(left_out))
        count = counted(len(left_out), "file") + (" is" if len(left_out) == 1 else " are")
        headline.insert(0, f"{count} left out of all that follows; the last section says why.")
    return Contents(results, about, headline, found, left_out)


def write_report(workspace: Workspace, out: Path | None = None) -> Report:
    """Write the report of everything that was scored on dev, and of probes.

    The same workspace gives the same bytes. An older report at the same place is replaced. Files
    that are damaged, or of other weights than there are now, are left out and named.

    Args:
        workspace: with results.
        out: folder; None is ``report/`` in the workspace.

    Raises:
        WorkspaceError: there are no results, or a file that many results need is damaged.
        InputError: ``out`` is a file, or a folder that holds something else than a report.
    """
    target = (workspace.root / "report" if out is None else out).expanduser().resolve()
    check_place(target)
    results, about, headline, found, left_out = read_contents(workspace)
    page = render(
        name=workspace.root.name,
        facts=about,
        headline=headline,
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
        left_out=left_out,
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


def _sections(workspace: Workspace, results: Results, left_out: list[str]) -> list[Section]:
    return [
        learning_curve(results),
        cross_checkpoint(results),
        data_fractions(results),
        pooling_section(workspace, left_out),
        parameters(results),
        costs(results),
        *latency_section(workspace, left_out),
        *compression_section(workspace, results, left_out),
        ensembles(results),
        control(results),
        *other_task(results),
        error_analysis(workspace, results, left_out),
        all_results(results),
        sources(results),
    ]


def _left_out_section(left_out: Sequence[str]) -> Section:
    lead = (
        "These files are not as they were written, or of other weights than there are now. What "
        "follows from them is not in this report."
    )
    return Section("left-out", "Left out", lead, notes=left_out)


def _newest(workspace: Workspace, results: Results) -> str:
    """When the newest result was written, the only time that the report knows."""
    files = [workspace.root / run["file"] for run in results.runs]
    rooms = probing, rankings, similarity, layers, latency_record
    for pattern in (room.FILES for room in rooms):
        files += workspace.root.glob(pattern)
    seconds = max(path.stat().st_mtime for path in files)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
