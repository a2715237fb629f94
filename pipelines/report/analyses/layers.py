"""A section for each kind of analysis: the table and the figures of its results, as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertvision.pipelines.analysis.kinds import ANALYSES
from bertvision.pipelines.analysis.records import FOLDER, Analysis, read_analyses
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.report.section import Figure, Section, make_figure
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.workspace.workspace import Workspace

FILES = f"{FOLDER}/*.json"
"""Where they are, in a workspace."""
_FIGURES = 6
"""In a section at most; its table has all results."""
_GROUP, _TRACE = "of", ("file", "command")

Found = dict[str, Analysis[AnalysisResult]]


def analysis_sections(workspace: Workspace, left_out: list[str]) -> list[Section]:
    """A section for every kind of analysis that was measured in the workspace.

    Args:
        workspace: that they are of.
        left_out: gets a message for each file that is damaged and left out.
    """
    sections = []
    for kind in ANALYSES:
        if found := read_analyses(workspace, kind, left_out):
            figures = [_figure(file, analysis) for file, analysis in list(found.items())[:_FIGURES]]
            tables = [_table(kind, found)]
            section = Section(kind.kind, kind.heading, kind.reading, figures=figures, tables=tables)
            sections.append(section)
    return sections


def _figure(file: str, analysis: Analysis[AnalysisResult]) -> Figure:
    """As the command draws it."""
    result = analysis.result
    ident, caption = Path(file).stem.replace(".", "-"), f"{result.title()}. {result.seen}"
    return make_figure(ident, result.title(), caption, file, analysis.command, result.drawing)


def _table(kind: type[AnalysisResult], found: Found) -> Table:
    """The rows of all results, each under its title; what no column shows is in the files."""
    lines: list[dict[str, Any]] = []
    columns: dict[str, Column] = {}
    remarks: dict[str, None] = {}
    for file, analysis in found.items():
        result = analysis.result
        columns |= {column.key: column for column in result.columns() if column.key not in columns}
        remarks |= dict.fromkeys(result.footnotes())
        trace = {_GROUP: result.title(), "file": file, "command": analysis.command}
        lines += [row | trace for row in result.shown()]
    told = [_GROUP, *_TRACE, *columns]
    told += [f"{key}_sd" for key, column in columns.items() if column.sd]
    return Table(
        kind.kind,
        kind.caption,
        list(columns.values()),
        lines,
        f"{FOLDER}/{kind.kind}-*.json",
        f"bertvision {kind.kind}",
        group=_GROUP,
        more=list(dict.fromkeys(key for line in lines for key in line if key not in told)),
        trace=True,
        remarks=list(remarks),
    )
