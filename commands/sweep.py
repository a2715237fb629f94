"""``bertvision sweep``: every head on every snapshot, in as few passes as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from bertvision.commands.options import (
    Json,
    Store,
    Workspace,
    find_workspace,
    parse_fractions,
    parse_tags,
    show,
)
from bertvision.commands.tables import Row, metric_names, number
from bertvision.pipelines.text import format_table, size
from bertvision.pipelines.workspace.job_options import TrainOptions

_PARTS = ("fine_tuning", "extraction", "training")


def sweep(
    heads: Annotated[
        list[str] | None,
        typer.Argument(help="Names from `bertvision heads`; by default all but the costly ones."),
    ] = None,
    *,
    trained_on: Annotated[
        str | None, typer.Option(help="Snapshots to train on, such as 0.3e,1e; by default all.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshots to evaluate on; by default all.")
    ] = None,
    fractions: Annotated[
        str, typer.Option(help="Parts of the training examples, such as 0,0.1,0.3,1.")
    ] = "1",
    seeds: Annotated[int, typer.Option(min=1, help="How many trainings of each.")] = 1,
    options: TrainOptions,
    split: Annotated[str, typer.Option(help="Split to score.")] = "dev",
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Train and evaluate heads: snapshots × snapshots × parts of the data × seeds, one table.

    What is there already is not done again: a stopped sweep is continued by the same command.
    """
    from bertvision.pipelines.results.sweep import sweep as run
    from bertvision.pipelines.results.sweep import sweep_rows

    space = find_workspace(workspace, store)
    results = run(
        space,
        heads or (),
        trained_on=parse_tags(trained_on) if trained_on else (),
        checkpoints=parse_tags(checkpoint) if checkpoint else (),
        fractions=parse_fractions(fractions),
        seeds=range(seeds),
        options=options,
        split=split,
    )
    show(sweep_rows(space, results), as_json, sweep_table)


def sweep_table(rows: Sequence[Row]) -> str:
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


def _compared(rows: Sequence[Row], metrics: Mapping[str, str]) -> str:
    """Name of the metric that is the rows' score."""
    first = rows[0] if rows else {}
    names = (name for key, name in metrics.items() if first.get(key) == first.get("score"))
    return next(names, "score")


def _with_deviation(row: Row, key: str) -> str:
    """Mean over seeds, with the standard deviation where there is one."""
    deviation = row.get(f"{key}_sd")
    return number(row.get(key)) + ("" if deviation is None else f" ± {deviation:.1f}")
