"""``bertvision sweep``: every head on every snapshot, in as few passes as possible."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import (
    BestEpoch,
    Json,
    Precision,
    Store,
    Workspace,
    find_workspace,
    parse_fractions,
    parse_tags,
    show,
    train_options,
)


def sweep(
    heads: Annotated[
        list[str] | None,
        typer.Argument(help="Names from `bertvision heads`; by default all but the costly ones."),
    ] = None,
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
    epochs: Annotated[int, typer.Option(help="Passes over the store.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    layers: Annotated[str, typer.Option(help="Hidden states to train on, or all.")] = "all",
    precision: Precision = "auto",
    best_epoch: BestEpoch = False,
    split: Annotated[str, typer.Option(help="Split to score.")] = "dev",
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Train and evaluate heads: snapshots × snapshots × parts of the data × seeds, one table.

    What is there already is not done again: a stopped sweep is continued by the same command.
    """
    from bertvision.commands.tables import sweep_table
    from bertvision.pipelines.results.sweep import sweep as run
    from bertvision.pipelines.results.sweep import sweep_rows

    options = train_options(epochs, batch_size, lr, layers, precision, best_epoch)
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
