"""Every head on every snapshot, in as few passes as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.text import format_table, size
from bertvision.pipelines.workspace.heads import stored_tags
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.runs import runs_of
from bertvision.verbs.arguments.checks import check_new_heads, find_workspace
from bertvision.verbs.arguments.options import chosen, takes
from bertvision.verbs.arguments.reading import (
    Names,
    Numbers,
    StrPath,
    Tags,
    at_least,
    parse_fractions,
    parse_names,
    parse_tags,
)
from bertvision.verbs.rows import Row, Rows
from bertvision.verbs.tables import Values, metric_names, number

_PARTS = ("fine_tuning", "extraction", "training")


@takes(TrainOptions)
def sweep(
    heads: Names | None = None,
    *,
    trained_on: Tags | None = None,
    checkpoint: Tags | None = None,
    fractions: Numbers = 1,
    seeds: int = 1,
    options: TrainOptions | None = None,
    split: str = "dev",
    workspace: StrPath | None = None,
    store: StrPath | None = None,
    **changes: Any,
) -> Rows[Row]:
    """Train and evaluate heads: snapshots × snapshots × parts of the data × seeds, one table.

    What is there already is not done again: a stopped sweep is continued by the same call.

    >>> import bertvision
    >>> rows = bertvision.sweep("learned-pooling", checkpoint="1e", seeds=2)
    >>> [(row.name, row.trained_on, row.seeds) for row in rows]
    [('learned-pooling', '0.5e', 2), ('learned-pooling', '1e', 2)]

    Args:
        heads: names of heads; by default all of the task's kind but the costly ones.
        trained_on: snapshots to train on, such as ``0.3e,1e``; by default all.
        checkpoint: snapshots to evaluate on; by default all.
        fractions: parts of the training examples, such as ``0,0.1,0.3,1``.
        seeds: how many trainings of each.
        **changes: options of the job, by keyword.
        options: these in one object; what is given by keyword goes before it.
        split: what is scored.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Returns:
        A row for each head, part of the data and pair of snapshots, its seeds together: means and
        standard deviations, the difference from BERT, costs, files and commands.

    Raises:
        UnknownNameError: there is no such head, snapshot or stored split.
        WorkspaceError: a head was trained with other options before; nothing was changed.
        StoppedError: SIGINT or SIGTERM; all is saved.
    """
    options = chosen(TrainOptions, options, changes)
    at_least(seeds, 1, "--seeds")
    names, parts = parse_names(heads or ()), parse_fractions(fractions)
    sources = () if trained_on is None else parse_tags(trained_on)
    targets = () if checkpoint is None else parse_tags(checkpoint)
    space = find_workspace(workspace, store)
    if names:
        check_new_heads(space, runs_of(names, parts, range(seeds)))
    elif space.splits():
        kind = find_task(space.config.task.name).kind
        stored_tags(space, sources, kind, "train", "--trained-on")
        stored_tags(space, targets, kind, split, "--checkpoint")
    from bertvision.pipelines.results.sweep import sweep as run
    from bertvision.pipelines.results.sweep import sweep_rows

    results = run(
        space,
        names,
        trained_on=sources,
        checkpoints=targets,
        fractions=parts,
        seeds=range(seeds),
        options=options,
        split=split,
    )
    return Rows(map(Row, sweep_rows(space, results)), sweep_table)


def sweep_table(rows: Sequence[Values]) -> str:
    """Scores of each head on each pair of snapshots, against BERT's at the second; then costs."""
    metrics = metric_names(rows)
    system = ["head", "data", "trained on", "evaluated on"]
    systems = [[r["name"], f"{r['fraction']:.4g}", r["trained_on"], r["checkpoint"]] for r in rows]
    scores = [
        [
            str(r["seeds"]),
            *[_with_deviation(r, key) for key in metrics],
            number(r["difference"], "{:+.1f}"),
        ]
        for r in rows
    ]
    costs = [
        [
            number(r.get("percent"), "{:.3f}"),
            *[number(r.get(f"{part}_seconds")) for part in _PARTS],
            "-" if r.get("bytes") is None else size(r["bytes"]),
            number(r.get("retention"), "{:.1f}%"),
            number(r.get("speed_up"), "{:.2f}"),
        ]
        for r in rows
    ]
    names = ["% of encoder", *(f"{part.replace('_', '-')} s" for part in _PARTS)]
    return "\n\n".join(
        format_table([*system, *header], [a + b for a, b in zip(systems, cells, strict=True)])
        for header, cells in (
            (["seeds", *metrics.values(), f"{_compared(rows, metrics)} − BERT"], scores),
            ([*names, "stored", "retention", "speed-up"], costs),
        )
    )


def _compared(rows: Sequence[Values], metrics: Mapping[str, str]) -> str:
    """Name of the metric that is the rows' score."""
    first = rows[0] if rows else {}
    names = (name for key, name in metrics.items() if first.get(key) == first.get("score"))
    return next(names, "score")


def _with_deviation(row: Values, key: str) -> str:
    """Mean over seeds, with the standard deviation where there is one."""
    deviation = row.get(f"{key}_sd")
    return number(row.get(key)) + ("" if deviation is None else f" ± {deviation:.1f}")
