"""The report of a workspace: everything that it shows, in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import WorkspaceError
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
from bertvision.pipelines.report.page import Report, check_place, write_page
from bertvision.pipelines.report.pooling import pooling_section
from bertvision.pipelines.report.repeats.section import (
    check_same_data,
    methods_section,
    methods_sentence,
    read_compared,
)
from bertvision.pipelines.report.scores import cross_checkpoint, data_fractions, learning_curve
from bertvision.pipelines.report.section import Section
from bertvision.pipelines.results.rows import Results, read_rows, with_marks
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.workspace import Workspace

_ANALYSES_AT = 4
"""Behind the weights of the layers, which ask a similar question."""
_METHODS_AT = 1
"""Behind the learning curve, which is of one run."""


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
    return Contents(results, about, headline, found, left_out)


def write_report(
    workspace: Workspace, out: Path | None = None, methods: Sequence[str] = ()
) -> Report:
    """Write the report of everything that was scored on dev, and of probes.

    The same workspace gives the same bytes. An older report at the same place is replaced. Files
    that are damaged, or of other weights than there are now, are left out and named.

    Args:
        workspace: with results.
        out: folder; None is ``report/`` in the workspace.
        methods: folders of runs, as `repeats.section.read_compared` takes them, which get a section
            of their own.

    Raises:
        WorkspaceError: there are no results, or a file that many results need is damaged; or as of
            `repeats.section.read_compared`.
        UnknownNameError: as there.
        InputError: ``out`` is a file, or a folder that holds something else than a report; or the
            methods are of another task, or of other data.
    """
    target = (workspace.root / "report" if out is None else out).expanduser().resolve()
    check_place(target)
    compared = read_compared(methods) if methods else None
    if compared is not None:
        check_same_data(workspace, compared)
    results, about, headline, sections, left_out = read_contents(workspace)
    files = _files(workspace, results)
    if compared is not None:
        sections.insert(_METHODS_AT if results.runs else 0, methods_section(compared))
        headline.append(methods_sentence(compared.found))
        files += compared.files
    return write_page(
        target,
        name=workspace.root.name,
        subject="heads on BERT's activations",
        heading="The workspace",
        facts=about,
        headline=headline,
        sections=sections,
        files=files,
        results=len(results.runs),
        left_out=left_out,
    )


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


def _files(workspace: Workspace, results: Results) -> list[Path]:
    """Whatever the report shows."""
    files = [workspace.root / run["file"] for run in results.runs]
    rooms = probing, rankings, similarity, layers, latency_record
    for pattern in (room.FILES for room in rooms):
        files += workspace.root.glob(pattern)
    return files
