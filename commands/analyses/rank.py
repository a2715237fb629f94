"""``bertvision rank``: candidate passages of questions, beside BM25."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import (
    Cluster,
    Csv,
    Data,
    Json,
    MissingEncoding,
    NewModel,
    Precision,
    Store,
    Workspace,
    runs_verb,
)
from bertvision.pipelines.ranking.options import RankOptions


@runs_verb
def rank(
    task: Annotated[str, typer.Argument(help="Questions with candidate passages: wikiqa.")],
    *,
    data: Data = None,
    checkpoint: Annotated[
        str, typer.Option(help="Snapshots, such as 0e,1e; untrained has random weights.")
    ] = "0e",
    scorers: Annotated[
        str,
        typer.Option(help="Scorers: cosine,bilinear,logistic,mlp,logistic-uv,mlp-uv."),
    ] = "cosine,bilinear,logistic,mlp",
    pool: Annotated[
        str, typer.Option(help="Pooling of a text's tokens: cls, sep, mean or max.")
    ] = "mean",
    layers: Annotated[
        str,
        typer.Option(
            help="all: each hidden state alone; numbers, first (1), last; + puts them end to end: "
            "all,first+last."
        ),
    ] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="How many times each scorer is trained.")] = 1,
    options: RankOptions,
    resamples: Annotated[
        int, typer.Option(min=1, help="How often the bootstrap draws, for intervals.")
    ] = 10_000,
    model: NewModel = None,
    encoding: MissingEncoding = None,
    precision: Precision = "auto",
    scheduler: Cluster = None,
    csv: Csv = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Rank the candidate passages of each question, and compare with BM25.

    Extracts what is missing; --data is needed the first time. Scorers are trained on train, the
    epoch is chosen on dev, and MAP, MRR and P@1 are those of test. A second call does only what is
    missing.
    """
