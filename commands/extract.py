"""``bertvision extract``: hidden states into the store."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import (
    Data,
    DryRun,
    Json,
    LabelColumn,
    MaxLength,
    NewModel,
    PairColumn,
    SkipBad,
    Store,
    TextColumn,
    Workspace,
    runs_verb,
)
from bertvision.pipelines.workspace.job_options import ExtractOptions


@runs_verb
def extract(
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Snapshots, such as 0.3e or 0.3e,1e; by default the only one there is."),
    ] = None,
    *,
    options: ExtractOptions,
    task: Annotated[
        str | None,
        typer.Option(help="Another data set than the workspace's own: its task, such as cola."),
    ] = None,
    data: Data = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    label: LabelColumn = None,
    max_length: MaxLength = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="What becomes of documents (task text): cut (default), a window each; split, as "
            "many windows as they fill; pack, several documents in a window, apart."
        ),
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(
            help="Date, as 2024-07-26, for a chat template that writes it (task chat); by default "
            "the day on which the data are first named."
        ),
    ] = None,
    skip_bad: SkipBad = None,
    model: NewModel = None,
    workspace: Workspace = None,
    store: Store = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write a snapshot's hidden states into the activation store.

    The data are the workspace's own, or another data set: --task says what it is and --data, the
    first time, where it is. A killed extraction is finished by the same command. A store named with
    --store is the workspace's from then on.
    """
