"""``bertvision probe``: what each layer knows, by linear probes."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import (
    Cluster,
    Csv,
    Data,
    Json,
    LabelColumn,
    MaxLength,
    MissingEncoding,
    NewModel,
    PairColumn,
    Precision,
    SkipBad,
    Store,
    TextColumn,
    Workspace,
    runs_verb,
)
from bertvision.pipelines.probing.options import ProbeOptions


@runs_verb
def probe(
    task: Annotated[
        list[str], typer.Argument(help="Data sets, by their tasks, such as bigram_shift.")
    ],
    *,
    data: Data = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    label: LabelColumn = None,
    max_length: MaxLength = None,
    skip_bad: SkipBad = None,
    checkpoint: Annotated[str, typer.Option(help="Snapshots, such as 0e,1e.")] = "0e",
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Also probe the twin with random weights.")
    ] = False,
    layers: Annotated[
        str, typer.Option(help="Hidden states, such as 0,6,12 (0: embeddings), or all.")
    ] = "all",
    pool: Annotated[
        str, typer.Option(help="Poolings of a window's tokens: cls,sep,mean,max.")
    ] = "cls,mean",
    concat: Annotated[
        str | None, typer.Option(help="Also layers put end to end, such as first+last,0+3+6.")
    ] = None,
    mlp: Annotated[
        bool, typer.Option("--mlp", help="Probe with a hidden layer of 50 sigmoids, not linearly.")
    ] = False,
    control: Annotated[
        bool, typer.Option("--control", help="Also probe the control task, for selectivity.")
    ] = False,
    mdl: Annotated[
        bool, typer.Option("--mdl", help="Also measure the description length, by online coding.")
    ] = False,
    options: ProbeOptions,
    memory: Annotated[
        float, typer.Option(min=0, help="GiB that features and probes may take, about.")
    ] = 2.0,
    model: NewModel = None,
    encoding: MissingEncoding = None,
    precision: Precision = "auto",
    scheduler: Cluster = None,
    csv: Csv = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    r"""Train a probe on every layer and pooling of snapshots, and score it.

    Extracts what is missing; --data is needed the first time, a folder may hold several data sets.
    Training follows SentEval unless options say otherwise. A second call does only what is missing.
    """
