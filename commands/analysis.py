"""Offline analyses of stored activations."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import (
    Json,
    MaxTokens,
    Plot,
    Scheduler,
    Store,
    Workspace,
    find_workspace,
    parse_tag,
    show,
)


def cka(
    first: Annotated[str, typer.Argument(help="Snapshot.")],
    second: Annotated[str, typer.Argument(help="Snapshot; may be the same.")],
    split: Annotated[str, typer.Option(help="Split that both have.")] = "dev",
    max_tokens: MaxTokens = 20_000,
    biased: Annotated[bool, typer.Option("--biased", help="The biased estimator.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    scheduler: Scheduler = "threads",
    plot: Plot = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Linear CKA between the layers of two snapshots: table, JSON and an SVG figure."""
    from bertvision.pipelines.analysis.run import cka as run

    result = run(
        find_workspace(workspace, store),
        parse_tag(first),
        parse_tag(second),
        split=split,
        max_tokens=max_tokens or None,
        biased=biased,
        seed=seed,
        scheduler=scheduler,
        plot=plot,
    )
    show(result.to_dict(), as_json, lambda _: result.table())


def isotropy(
    checkpoint: Annotated[str, typer.Argument(help="Snapshot.")],
    split: Annotated[str, typer.Option(help="Split to analyse.")] = "dev",
    max_tokens: MaxTokens = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    scheduler: Scheduler = "threads",
    plot: Plot = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Isotropy of each layer: mean cosine, explained variance, outlier channels."""
    from bertvision.pipelines.analysis.run import isotropy as run

    result = run(
        find_workspace(workspace, store),
        parse_tag(checkpoint),
        split=split,
        max_tokens=max_tokens or None,
        seed=seed,
        scheduler=scheduler,
        plot=plot,
    )
    show(result.to_dict(), as_json, lambda _: result.table())
