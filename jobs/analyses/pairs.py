"""Pairs of texts from their pooled states: candidate passages of questions, similarity."""

from __future__ import annotations

from typing import Annotated, Any

from bertvision.jobs.checks import check_cluster, check_snapshots
from bertvision.jobs.data import check_data, open_data
from bertvision.jobs.declare import (
    DEFAULTS,
    ClusterAddress,
    DataSource,
    NewEncoding,
    NewModel,
    Precision,
    Resamples,
    StorePath,
    WorkspacePath,
    job,
)
from bertvision.jobs.reading import (
    Names,
    Tags,
    parse_choice,
    parse_names,
    parse_poolings,
    parse_tags,
    path_of,
    text_of,
)
from bertvision.jobs.show import Row, Rows, RowsField, ShownRecord, Values
from bertvision.pipelines.options import Option
from bertvision.pipelines.readouts.options import (
    CROSS_ENCODER,
    PAIR_SCORERS,
    SCORERS,
    RankOptions,
    SimilarityOptions,
)


class Ranked(ShownRecord):
    """Rankings of one data set, and what they follow from."""

    dataset: str
    data: str
    """Where the data set is."""
    data_sha256: str
    training: dict[str, Any]
    """The options of the training."""
    resamples: int
    folder: str
    """Where the rankings are, in the format of trec_eval."""
    rows: RowsField
    """The first are BM25 and a random order; then a row for each scorer, input and snapshot."""

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        from bertvision.pipelines.readouts.rank_results import table

        return table(dict(values))


@job
def rank(
    task: str,
    *,
    data: DataSource = None,
    checkpoint: Tags = "0e",
    scorers: Names = "cosine,bilinear,logistic,mlp",
    pool: Names = "mean",
    layers: str = "all",
    seeds: Annotated[int, Option(ge=1)] = 1,
    options: RankOptions = DEFAULTS,
    resamples: Resamples = 10_000,
    model: NewModel = None,
    encoding: NewEncoding = None,
    precision: Precision = "auto",
    scheduler: ClusterAddress = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> Ranked:
    """Rank the candidate passages of questions, by layer.

    BM25 stands beside. What is missing is extracted; ``data`` is needed the first time. Scorers are
    trained on train, the epoch is chosen on dev, and MAP, MRR and P@1 are those of test. A second
    call does only what is missing.

    Args:
        task: Questions with candidate passages: wikiqa.
        checkpoint: Snapshots, such as 0e,1e; untrained has random weights.
        scorers: Scorers: cosine,bilinear,logistic,mlp,logistic-uv,mlp-uv; and cross-encoder, in a
            workspace of wikiqa_pairs.
        pool: Pooling of a text's tokens: cls, sep, mean or max.
        layers: all: each hidden state alone; numbers, first (1), last; + puts them end to end:
            all,first+last.
        seeds: How many times each scorer is trained.

    Raises:
        InputError: a name is not known, the data lacks a part, or a part has no positive passage.
        ProvenanceError: hidden states were not extracted alike, or a ranking was made with other
            settings; names the field.
        WorkspaceError: the data changed.
        LockedError: another process ranks the same data set.
    """
    offered = (*SCORERS, CROSS_ENCODER)
    names = [parse_choice(name, offered, "--scorers") for name in parse_names(scorers)]
    check_cluster(scheduler)
    poolings, tags = parse_poolings(pool), parse_tags(checkpoint)
    if (there := check_data(path_of(workspace), text_of(model), task, text_of(data))) is not None:
        check_snapshots(there, tags)
    from bertvision.pipelines.readouts.rank_systems import rank as run

    space, dataset = open_data(path_of(workspace), text_of(model), task, text_of(data))
    result = run(
        space.at(text_of(store)),
        dataset or task,
        tags,
        scorers=[name for name in names if name != CROSS_ENCODER],
        cross_encoder=CROSS_ENCODER in names,
        poolings=poolings,
        layers=layers,
        seeds=seeds,
        options=options,
        resamples=resamples,
        encoding=encoding,
        precision=precision,
        scheduler=scheduler,
    )
    return Ranked.model_validate(result)


@job
def similarity(
    task: Names,
    *,
    data: DataSource = None,
    checkpoint: Tags = "0e",
    untrained: bool = False,
    scorers: Names = "cosine,trained",
    pool: Names = "mean",
    layers: str = "all",
    options: SimilarityOptions = DEFAULTS,
    model: NewModel = None,
    encoding: NewEncoding = None,
    precision: Precision = "auto",
    scheduler: ClusterAddress = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> Rows[Row]:
    """Score sentence pairs by similarity, against people's scores.

    Extracts what is missing; ``data`` is needed the first time; a folder may hold several.
    The cosine learns nothing; a softmax regression on both vectors is trained where there is a
    training part. A second call does only what is missing.

    Args:
        task: Data sets, by their tasks: sick, sts_benchmark, sts12 to sts16.
        checkpoint: Snapshots, such as 0e,1e.
        untrained: Also score the twin with random weights.
        scorers: Scorers: cosine, which learns nothing, and trained.
        pool: Pooling of a sentence's tokens: cls, sep, mean or max.
        layers: all: each hidden state alone; numbers, first (1), last; + puts them end to end:
            all,first+last.

    Returns:
        A row for each score and sub-set, the trivial baselines among them (see
        `similarity_rows`).

    Raises:
        InputError: a name is not known, or the data are none of pairs with scores.
        UnknownNameError: there is no such snapshot.
        ProvenanceError: hidden states were not extracted alike, or scores were made of others;
            names the field.
        WorkspaceError: the data changed since they were added.
        LockedError: another process measures the same data set.
    """
    names = [parse_choice(n, PAIR_SCORERS, "--scorers") for n in parse_names(scorers)]
    check_cluster(scheduler)
    poolings, tags = parse_poolings(pool), parse_tags(checkpoint)
    root, encoder, tasks = path_of(workspace), text_of(model), dict.fromkeys(parse_names(task))
    for name in tasks:
        if (there := check_data(root, encoder, name, text_of(data))) is not None:
            check_snapshots(there, tags)
    from bertvision.pipelines.readouts.similarity_results import similarity as run
    from bertvision.pipelines.readouts.similarity_results import similarity_rows, table

    found = []
    for space, dataset, name in [
        (*open_data(root, encoder, name, text_of(data)), name) for name in tasks
    ]:
        found += run(
            space.at(text_of(store)),
            dataset or name,
            tags,
            scorers=names,
            poolings=poolings,
            layers=layers,
            untrained=untrained,
            options=options,
            encoding=encoding,
            precision=precision,
            scheduler=scheduler,
        )
    rows = similarity_rows(found)
    return Rows(map(Row, rows), table)
