"""The report of a workspace, or of methods alone: its sections in order, its tables by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import UnknownNameError, WorkspaceError, did_you_mean
from bertvision.pipelines import analysis
from bertvision.pipelines.finetuning import latency_record
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.repeats.folder import require_seeds
from bertvision.pipelines.report import analyses, probing
from bertvision.pipelines.report.analyses import (
    analysis_section,
    rankings_section,
    similarity_section,
)
from bertvision.pipelines.report.compression import compression_section
from bertvision.pipelines.report.costs import costs, latency_section, parameters
from bertvision.pipelines.report.errors import error_analysis
from bertvision.pipelines.report.headline import facts, sentences
from bertvision.pipelines.report.listing import (
    all_results,
    control,
    ensembles,
    other_checkpoints,
    other_task,
    sources,
    waiting_section,
)
from bertvision.pipelines.report.methods import (
    Compared,
    check_same_data,
    methods_section,
    methods_sentence,
    read_compared,
)
from bertvision.pipelines.report.page import Page, Report, check_place, write_page
from bertvision.pipelines.report.probing import probing_section, probing_sentence, score_section
from bertvision.pipelines.report.scores import (
    cross_checkpoint,
    data_fractions,
    learning_curve,
    pooling_section,
)
from bertvision.pipelines.report.section import Reading, Section, Table, beside
from bertvision.pipelines.results.intervals import add_intervals
from bertvision.pipelines.results.rows import Results, read_rows, with_marks
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)

Maker = Callable[[Reading], Section | None]

# what was measured without a head, and stands in a report where nothing was scored
_MEASURED: tuple[Maker, ...] = (
    probing_section,
    score_section,
    rankings_section,
    similarity_section,
    *(partial(analysis_section, kind) for kind in analysis.results()),
)


def _methods(reading: Reading) -> Section | None:
    return reading.methods


_ALWAYS: tuple[Maker, ...] = (_methods, *_MEASURED, waiting_section)
SECTIONS: tuple[Maker, ...] = (
    learning_curve,
    _methods,
    cross_checkpoint,
    data_fractions,
    pooling_section,
    *_MEASURED,
    parameters,
    costs,
    latency_section,
    compression_section,
    ensembles,
    control,
    other_checkpoints,
    other_task,
    error_analysis,
    all_results,
    sources,
    waiting_section,
)
"""The sections of a report in order; those that need scores are left out where there are none."""
_OF_SPLIT: tuple[Maker, ...] = (
    learning_curve,
    cross_checkpoint,
    data_fractions,
    ensembles,
    control,
    other_checkpoints,
    other_task,
    error_analysis,
    all_results,
    sources,
)
"""The sections that are of scores alone, of any split."""
_FILES = (*probing.FILES, *analyses.FILES, latency_record.FILES)


class Contents(NamedTuple):
    """The contents of a report, before it is written."""

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


def read_contents(
    workspace: Workspace,
    *,
    split: str = "dev",
    intervals: bool = True,
    compared: Compared | None = None,
) -> Contents:
    """Read everything that was scored on a split, and with dev probes and all else.

    What is damaged, or of other weights than there are now, is left out with what follows from it,
    and named.

    Args:
        workspace: Workspace with results.
        split: Split that was scored.
        intervals: Whether scores get theirs, which every answer is read and drawn for.
        compared: Methods that get a section of their own.

    Raises:
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    left_out: list[str] = []
    results = with_marks(read_rows(workspace, split, left_out))
    if split != "dev" and not results.runs:
        raise WorkspaceError(
            left_out[0]
            if left_out
            else f"{workspace.root} has no results on {split}: `bertvision evaluate HEAD --split "
            f"{split}` scores a head there"
        )
    if intervals:
        scored = [results.bert, results.quantised, results.heads, results.ensembles, results.others]
        rows = [row for rows in scored for row in rows]
        add_intervals(workspace, rows, left_out, split=split)
    reading = Reading(workspace, results, left_out, compared and methods_section(compared))
    made = {
        make: section
        for make in (SECTIONS if split == "dev" else _OF_SPLIT)
        if (results.runs or make in _ALWAYS) and (section := make(reading)) is not None
    }
    measured = [section for make, section in made.items() if make in _MEASURED]
    if not results.runs and not measured:
        if left_out:
            raise WorkspaceError(left_out[0])
        raise WorkspaceError(
            f"{workspace.root} has no results to report: `{BERT_COMMAND}` scores BERT at its "
            "snapshots; `bertvision status` says what can be run next"
        )
    headline = sentences(results)
    if not results.runs:
        titles = ", ".join(section.title.lower() for section in measured)
        headline = [f"No head and no snapshot was scored yet; below: {titles}."]
        if probing_section in made:
            headline = [probing_sentence(workspace, left_out)]
    if compared is not None:
        headline.append(methods_sentence(compared.found))
    about = facts(workspace, results, left_out)
    return Contents(results, about, headline, list(made.values()), left_out)


def write_report(
    workspace: Workspace, out: Path | None = None, methods: Sequence[str] = ()
) -> Report:
    """Write the report of everything that was scored on dev, and of probes.

    The same workspace gives the same bytes. An older report at the same place is replaced. Files
    that are damaged, or of other weights than there are now, are left out and named.

    Args:
        workspace: Workspace with results.
        out: Folder of the report; None is ``report/`` in the workspace.
        methods: Folders of runs, as `methods.read_compared` takes them, which get a section of
            their own.

    Raises:
        WorkspaceError: there are no results, or a file that many results need is damaged; or as of
            `methods.read_compared`.
        UnknownNameError: as there.
        InputError: ``out`` is a file, or a folder that holds something else than a report; or the
            methods are of another task, or of other data.
    """
    target = (workspace.root / "report" if out is None else out).expanduser().resolve()
    check_place(target)
    compared = read_compared(methods) if methods else None
    if compared is not None:
        check_same_data(workspace, compared)
    results, about, headline, sections, left_out = read_contents(workspace, compared=compared)
    files = [workspace.root / run["file"] for run in results.runs]
    files += [path for pattern in _FILES for path in workspace.root.glob(pattern)]
    files += compared.files if compared else []
    subject = "heads on BERT's activations" if results.runs else "analyses of hidden states"
    top = workspace.root.name, subject, "The workspace", about, headline
    return write_page(target, Page(*top, sections, files, len(results.runs), left_out))


def write_methods(folders: Sequence[str], out: Path) -> Report:
    """Write a report of methods with several seeds, as `bertvision spread` compares them.

    An older report at the same place is replaced.

    Args:
        folders: Folders as `methods.read_method` takes them, one at least.
        out: Folder of the report.

    Raises:
        WorkspaceError: a folder holds no runs, they differ in more than the seed, none of them is
            scored, or they are of another task, data or metric than those of the first.
        UnknownNameError: no run of a folder has such a system, or several are meant.
        InputError: a folder is a file, a method is named twice, or ``out`` is a file, or a folder
            that holds something else than a report.
    """
    target = out.expanduser().resolve()
    check_place(target)
    compared = read_compared(folders)
    first = require_seeds(compared.methods[0].root)[0]
    left_out: list[str] = []
    about = facts(first, read_rows(first, left_out=left_out), left_out)
    folder = Path(os.path.commonpath([method.root for method in compared.methods]))
    name, subject = folder.name or compared.methods[0].name, "fine-tuning with several seeds"
    heading = f"The first run: {first.root.parent.name}, seed {first.config.finetune.seed}"
    top = name, subject, heading, about, [methods_sentence(compared.found)]
    files, sections = compared.files, [methods_section(compared)]
    return write_page(target, Page(*top, sections, files, len(files), left_out))


def read_tables(
    workspace: Workspace, *, split: str = "dev", intervals: bool = True
) -> dict[str, Table]:
    """The tables that a report has, by name; what they leave out is logged.

    Args:
        workspace: Workspace with results.
        split: See `read_contents`, likewise ``intervals``.
        intervals: Whether scores get theirs.

    Raises:
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    contents = read_contents(workspace, split=split, intervals=intervals)
    for message in contents.left_out:
        log.warning("left out: %s", message)
    return {table.name: table for section in contents.sections for table in section.tables}


def find_table(
    workspace: Workspace, name: str, others: Sequence[Workspace] = (), split: str = "dev"
) -> Table:
    """A table of the report, of one workspace or of several below each other.

    Rows of several workspaces say which one they are of, and of which data, by its digest: never
    are rows of different data taken for rows of the same.

    Args:
        workspace: The first workspace.
        name: Name of the table.
        others: The other workspaces.
        split: Split that was scored.

    Raises:
        UnknownNameError: a workspace has no such table.
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    spaces = (workspace, *others)
    tables = [_find(space, name, split) for space in spaces]
    if not others:
        return tables[0]
    return beside(
        [
            (space.root, _data(space, split), table)
            for space, table in zip(spaces, tables, strict=True)
        ]
    )


def _find(workspace: Workspace, name: str, split: str) -> Table:
    tables = read_tables(workspace, split=split)
    if name not in tables:
        names = ", ".join(tables)
        raise UnknownNameError(
            f"{workspace.root} has no table {name!r}: {did_you_mean(name, tables)}there are {names}"
        )
    return tables[name]


def _data(workspace: Workspace, split: str) -> str:
    """The task that was scored, and the first digits of the digest of the data."""
    name = StoredName.parse(split)
    data = workspace.dataset(name.dataset)
    scored = data.data.get(name.split)
    return f"{data.config.name} {scored.sha256[:12]}" if scored else data.config.name
