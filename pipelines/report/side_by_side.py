"""The tables of a report by name, and those of several workspaces as one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertvision.errors import UnknownNameError, did_you_mean
from bertvision.pipelines.report.build import read_contents
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
DIFFERENT = (
    "The workspaces have different data (the column says which): their scores are of other items "
    "and are not to be compared."
)
"""What stands below a table of workspaces whose data differ."""


def read_tables(workspace: Workspace, *, intervals: bool = True) -> dict[str, Table]:
    """The tables that a report has, by name; what they leave out is logged.

    Args:
        workspace: that they are of.
        intervals: see `read_contents`.

    Raises:
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    contents = read_contents(workspace, intervals=intervals)
    for message in contents.left_out:
        log.warning("left out: %s", message)
    sections = contents.sections
    return {table.name: table for section in sections for table in section.tables}


def find_table(workspace: Workspace, name: str, others: Sequence[Workspace] = ()) -> Table:
    """A table of the report, of one workspace or of several below each other.

    Rows of several workspaces say which one they are of, and of which data, by its digest: never
    are rows of different data taken for rows of the same. Those of one group (a data set, a pair
    of snapshots) stand together.

    Args:
        workspace: the first.
        name: of the table.
        others: the other ones.

    Raises:
        UnknownNameError: a workspace has no such table.
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    tables = [_found(space, name) for space in (workspace, *others)]
    if not others:
        return tables[0]
    labels = _labels([space.root for space in (workspace, *others)])
    rows = [
        {"workspace": label, "data": _data(space), **row}
        for space, label, table in zip((workspace, *others), labels, tables, strict=True)
        for row in table.rows
    ]
    first = tables[0]
    if first.group:
        groups = list(dict.fromkeys(row[first.group] for row in rows))
        rows.sort(key=lambda row: groups.index(row[first.group]))
    rows = rows if first.joined is None else [dict(row) for row in first.joined(rows)]
    differ = _differ(rows, first)
    own = [Column("workspace", "workspace", "text")] + [Column("data", "data", "text")] * differ
    return replace(
        first,
        title=f"{first.title}; of several workspaces",
        basis="",
        columns=[*own, *columns_of_all(tables)],
        rows=rows,
        more=list(dict.fromkeys(key for table in tables for key in table.more))
        + ["data"] * (not differ),
        remarks=[DIFFERENT] if differ else [],
    )


def columns_of_all(tables: Sequence[Table]) -> list[Column]:
    """The columns of several tables; one that is called otherwise in another has both names.

    So it is with the score, which is another metric where the task is another.
    """
    found: dict[str, list[Column]] = {}
    for table in tables:
        for column in table.columns:
            found.setdefault(column.key, []).append(column)
    return [
        replace(columns[0], label=" / ".join(dict.fromkeys(column.label for column in columns)))
        for columns in found.values()
    ]


def _differ(rows: Sequence[Mapping[str, Any]], table: Table) -> bool:
    """Whether rows that stand for the same in several workspaces are of different data.

    They are those of one group. A group that holds several data sets of a workspace (a snapshot's
    probes) is parted by its first column, which names them.
    """
    of_one: dict[tuple[Any, Any], set[Any]] = {}
    for row in rows:
        of_one.setdefault((row.get(table.group), row["workspace"]), set()).add(row["data"])
    several = {group for (group, _), data in of_one.items() if len(data) > 1}
    same: dict[tuple[Any, Any], set[Any]] = {}
    for row in rows:
        group = row.get(table.group)
        part = row.get(table.columns[0].key) if group in several else None
        same.setdefault((group, part), set()).add(row["data"])
    return any(len(data) > 1 for data in same.values())


def _found(workspace: Workspace, name: str) -> Table:
    tables = read_tables(workspace)
    if name not in tables:
        held = ", ".join(tables)
        raise UnknownNameError(
            f"{workspace.root} has no table {name!r}: {did_you_mean(name, tables)}there are {held}"
        )
    return tables[name]


def _data(workspace: Workspace) -> str:
    """What was scored: the task, and the first digits of the digest of the data."""
    split = workspace.config.data.get("dev")
    task = workspace.config.task.name
    return f"{task} {split.sha256[:12]}" if split else task


def _labels(roots: Sequence[Path]) -> list[str]:
    """Names of folders, with as much of the path as tells them apart."""
    names = [root.name for root in roots]
    return [
        name if names.count(name) == 1 else str(root)
        for name, root in zip(names, roots, strict=True)
    ]
