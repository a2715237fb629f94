"""Results: every score of a workspace, a system's answers, the tables of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from bertvision.errors import InputError
from bertvision.jobs.show import (
    Row,
    Rows,
    Values,
    baseline_cells,
    metric_cells,
    metric_names,
    score_charts,
    with_footnote,
)
from bertvision.pipelines.declare import WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import StrPath, Tag, parse_tag
from bertvision.pipelines.text import format_table, number
from bertvision.pipelines.workspace.checks import find_workspace
from bertvision.pipelines.workspace.workspace import Workspace


def results(*, split: str = "dev", workspace: StrPath | None = None) -> Rows[Row]:
    """Every score of a workspace: BERT, heads and ensembles, seeds apart, as in the report.

    Examples:
        >>> import bertvision
        >>> frame = bertvision.results().to_pandas()
        >>> list(frame.name + " " + frame.checkpoint)
        ['BERT 0.5e', 'BERT 1e']

    Args:
        split: that was scored.
        workspace: folder of the experiment; by default the one you stand in.

    Returns:
        A row for each result: ``system`` (bert, quantised, head or ensemble), ``name``, ``run``,
        ``trained_on``, ``checkpoint``, ``fraction``, ``seed``, the task's ``score`` and every
        metric in per cent, ``difference`` from BERT at the snapshot scored on, costs, ``file`` and
        ``command``.

    Raises:
        WorkspaceError: a file is damaged; the message names it.
    """
    space = find_workspace(workspace)
    from bertvision.pipelines.results.rows import read_rows

    return Rows(map(Row, read_rows(space, split).runs), results_table, score_charts)


def predictions(
    system: str,
    *,
    trained_on: Tag | None = None,
    checkpoint: Tag | None = None,
    split: str = "dev",
    workspace: StrPath | None = None,
) -> Rows[Row]:
    """A scored system's answer to every item of a split, with the gold answer and the score.

    Examples:
        >>> import bertvision
        >>> answers = bertvision.predictions("bert:1e")
        >>> answers[0].question, answers[0].gold
        ('when was david born ?', ['1901'])
        >>> worst = answers.to_pandas().sort_values("f1").head()

    Args:
        system: as for `compare`: ``NAME[:TRAINED_ON[:CHECKPOINT]]``.
        trained_on: snapshot the head was trained on, where several are possible.
        checkpoint: snapshot it was scored on, likewise.
        split: that was scored.
        workspace: folder of the experiment; by default the one you stand in.

    Returns:
        A row for each item in the order of the data: ``id``; ``question`` and ``context``, or
        ``text`` and ``pair``; ``gold``, of spans a list of texts that is empty where there is no
        answer; ``answer``; and in per cent ``f1`` and ``exact`` of spans, ``accuracy`` of classes
        and of yes or no, nothing of a task that predicts a number.

    Raises:
        UnknownNameError: the system was not scored, or several are meant.
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    source = None if trained_on is None else parse_tag(trained_on)
    target = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace)
    from bertvision.pipelines.results.answers import answer_rows

    found = answer_rows(space, system, trained_on=source, checkpoint=target, split=split)
    return Rows(map(Row, found))


@job
def table(
    name: str | None = None,
    *,
    beside: Annotated[Sequence[StrPath] | None, Option(flag="--with", several=True)] = None,
    workspace: WorkspacePath = None,
) -> Rows[Row]:
    """Print a table of the report.

    Scores, snapshots against each other, parts of the data, probes and others; rows of several
    workspaces say which data they are of, by its digest.

    Examples:
        >>> import bertvision
        >>> {"learning_curve", "costs", "results"} <= {row.table for row in bertvision.table()}
        True
        >>> bertvision.table("learning_curve").to_pandas().checkpoint.to_list()
        ['0.5e', '1e']

    Args:
        name: Table of the report; by default the names of all.
        beside: Another workspace, whose rows stand beside; may be repeated.

    Raises:
        UnknownNameError: a workspace has no such table.
        InputError: ``beside`` without a name, or the same workspace twice.
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    space = find_workspace(workspace)
    others = [find_workspace(other) for other in beside or ()]
    _check_beside(name, space, others)
    from bertvision.pipelines.report.build import find_table, read_tables

    if name is None:
        tables = read_tables(space, intervals=False).values()
        rows = [{"table": t.name, "rows": len(t.rows), "title": t.title} for t in tables]
        found: Rows[Row] = Rows(map(Row, rows), _list_of_tables)
    else:
        shown = find_table(space, name, others)
        found = Rows(
            [Row({key: row.get(key) for key in shown.keys()}) for row in shown.rows],  # noqa: SIM118
            lambda rows: replace(shown, rows=rows).text(),
        )
    return found


def _check_beside(name: str | None, space: Workspace, others: Sequence[Workspace]) -> None:
    if others and name is None:
        raise InputError(
            f"--with {others[0].root}: name the table that its rows are to stand in; `bertvision "
            "table` alone lists the names"
        )
    seen = {space.root.resolve()}
    for root in (other.root.resolve() for other in others):
        if root in seen:
            raise InputError(f"--with {root}: this workspace is named twice; name each once")
        seen.add(root)


def _list_of_tables(rows: Sequence[Values]) -> str:
    lines = [[row["table"], str(row["rows"]), row["title"]] for row in rows]
    return format_table(["table", "rows", "what"], lines)


def results_table(rows: Sequence[Values]) -> str:
    """Systems with their scores, and the difference from BERT."""
    from bertvision.pipelines.results.columns import marked

    metrics = metric_names(rows)
    names = [marked(r["name"], r) for r in rows]
    rest = [
        [
            *(name, f"{r['fraction']:.4g}", str(r["seed"])),
            *(r["trained_on"], r["checkpoint"]),
            *metric_cells(r, metrics),
            number(r["difference"], "{:+.1f}"),
        ]
        for name, r in zip(names, rows, strict=True)
    ]
    baseline = next((r["baseline"] for r in rows if r["baseline"] is not None), None)
    if baseline is not None:
        trivial, cells = baseline_cells(baseline, metrics)
        rest.append([trivial, *["-"] * 4, *cells, "-"])
    table = format_table(
        [
            "system",
            "part of data",
            "seed",
            "trained on",
            "evaluated on",
            *metrics.values(),
            "− BERT",
        ],
        rest,
    )
    return with_footnote(table, names, rows)
