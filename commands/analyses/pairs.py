"""``bertvision rank`` and ``similarity``: pairs of texts from their pooled states."""

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
from bertvision.pipelines.similarity.options import SimilarityOptions

_Layers = Annotated[
    str,
    typer.Option(
        help="all: each hidden state alone; numbers, first (1), last; + puts them end to end: "
        "all,first+last."
    ),
]


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
        typer.Option(
            help="Scorers: cosine,bilinear,logistic,mlp,logistic-uv,mlp-uv; and cross-encoder, in "
            "a workspace of wikiqa_pairs."
        ),
    ] = "cosine,bilinear,logistic,mlp",
    pool: Annotated[
        str, typer.Option(help="Pooling of a text's tokens: cls, sep, mean or max.")
    ] = "mean",
    layers: _Layers = "all",
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


@runs_verb
def similarity(
    task: Annotated[
        list[str],
        typer.Argument(help="Data sets, by their tasks: sick, sts_benchmark, sts12 to sts16."),
    ],
    *,
    data: Data = None,
    checkpoint: Annotated[str, typer.Option(help="Snapshots, such as 0e,1e.")] = "0e",
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Also score the twin with random weights.")
    ] = False,
    scorers: Annotated[
        str, typer.Option(help="Scorers: cosine, which learns nothing, and trained.")
    ] = "cosine,trained",
    pool: Annotated[
        str, typer.Option(help="Pooling of a sentence's tokens: cls, sep, mean or max.")
    ] = "mean",
    layers: _Layers = "all",
    options: SimilarityOptions,
    model: NewModel = None,
    encoding: MissingEncoding = None,
    precision: Precision = "auto",
    scheduler: Cluster = None,
    csv: Csv = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Score pairs of sentences by their similarity, and correlate with people's scores.

    Extracts what is missing; --data is needed the first time, a folder may hold several data sets.
    The cosine learns nothing; a softmax regression on both vectors is trained where there is a
    training part. A second call does only what is missing.
    """
