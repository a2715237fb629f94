"""Pairs of texts from their pooled states: candidate passages of questions, similarity."""

from __future__ import annotations

from typing import Any

from bertvision.featurestore.format.names import EncodingName
from bertvision.pipelines.files import write_text
from bertvision.pipelines.options import PrecisionName
from bertvision.pipelines.ranking.options import CROSS_ENCODER, SCORERS, RankOptions
from bertvision.pipelines.similarity.options import SCORERS as SIMILARITY_SCORERS
from bertvision.pipelines.similarity.options import SimilarityOptions
from bertvision.pipelines.text import csv_text
from bertvision.verbs.arguments.checks import check_cluster, check_snapshots
from bertvision.verbs.arguments.data import check_data, open_data
from bertvision.verbs.arguments.options import chosen, takes
from bertvision.verbs.arguments.reading import (
    ENCODINGS,
    PRECISIONS,
    Names,
    StrPath,
    Tags,
    at_least,
    parse_choice,
    parse_names,
    parse_poolings,
    parse_tags,
    path_of,
    text_of,
)
from bertvision.verbs.rows import Row, Rows, RowsField, ShownRecord
from bertvision.verbs.tables import Values


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
        from bertvision.pipelines.ranking.rows import table

        return table(dict(values))


@takes(RankOptions)
def rank(
    task: str,
    *,
    data: StrPath | None = None,
    checkpoint: Tags = "0e",
    scorers: Names = "cosine,bilinear,logistic,mlp",
    pool: Names = "mean",
    layers: str = "all",
    seeds: int = 1,
    options: RankOptions | None = None,
    resamples: int = 10_000,
    model: StrPath | None = None,
    encoding: EncodingName | None = None,
    precision: PrecisionName = "auto",
    scheduler: str | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
    **changes: Any,
) -> Ranked:
    """Rank the candidate passages of each question, and compare with BM25.

    Extracts what is missing; ``data`` is needed the first time. Scorers are trained on train, the
    epoch is chosen on dev, and MAP, MRR and P@1 are those of test. A second call does only what is
    missing.

    Args:
        task: questions with candidate passages: ``wikiqa``.
        data: where the data are, to be said once: a file, a folder or a data set on the hub.
        checkpoint: snapshots, such as ``0e,1e``; ``untrained`` has random weights.
        scorers: of ``cosine,bilinear,logistic,mlp,logistic-uv,mlp-uv``; and ``cross-encoder``, in
            a workspace of ``wikiqa_pairs``.
        pool: pooling of a text's tokens: cls, sep, mean or max.
        layers: ``all``: each hidden state alone; numbers, first (1), last; ``+`` puts them end to
            end: ``all,first+last``.
        seeds: trainings of each scorer.
        **changes: options of the job, by keyword.
        options: these in one object; what is given by keyword goes before it.
        resamples: how often the bootstrap draws, for intervals.
        model: make a workspace for the hidden states of this encoder alone.
        encoding: how to store what is extracted: int8 (default), int4, bfloat16, float16, float32.
        precision: arithmetic of the extraction: auto, 32 or bf16.
        scheduler: ``tcp://HOST:PORT`` of a Dask cluster whose workers extract.
        csv: write the table to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        InputError: a name is not known, the data lacks a part, or a part has no positive passage.
        ProvenanceError: hidden states were not extracted alike, or a ranking was made with other
            settings; names the field.
        WorkspaceError: the data changed.
        LockedError: another process ranks the same data set.
    """
    options = chosen(RankOptions, options, changes)
    offered = (*SCORERS, CROSS_ENCODER)
    names = [parse_choice(name, offered, "--scorers") for name in parse_names(scorers)]
    parse_choice(precision, PRECISIONS, "--precision")
    if encoding is not None:
        parse_choice(encoding, ENCODINGS, "--encoding")
    check_cluster(scheduler)
    at_least(seeds, 1, "--seeds")
    at_least(resamples, 1, "--resamples")
    poolings, tags = parse_poolings(pool), parse_tags(checkpoint)
    if (there := check_data(path_of(workspace), text_of(model), task, text_of(data))) is not None:
        check_snapshots(there, tags)
    from bertvision.pipelines.ranking.rank import rank as run

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
    if (file := path_of(csv)) is not None:
        write_text(file, csv_text(result["rows"]))
    return Ranked.model_validate(result)


@takes(SimilarityOptions)
def similarity(
    task: Names,
    *,
    data: StrPath | None = None,
    checkpoint: Tags = "0e",
    untrained: bool = False,
    scorers: Names = "cosine,trained",
    pool: Names = "mean",
    layers: str = "all",
    options: SimilarityOptions | None = None,
    model: StrPath | None = None,
    encoding: EncodingName | None = None,
    precision: PrecisionName = "auto",
    scheduler: str | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
    **changes: Any,
) -> Rows[Row]:
    """Score pairs of sentences by their similarity, and correlate with people's scores.

    Extracts what is missing; ``data`` is needed the first time, a folder may hold several data
    sets. The cosine learns nothing; a softmax regression on both vectors is trained where there
    is a training part. A second call does only what is missing.

    Args:
        task: data sets by their task: ``sick``, ``sts_benchmark``, ``sts12`` to ``sts16``; several.
        data: where the data are, to be said once: a folder.
        checkpoint: snapshots, such as ``0e,1e``.
        untrained: also the twin with random weights.
        scorers: of ``cosine,trained``.
        pool: pooling of a sentence's tokens: cls, sep, mean or max.
        layers: ``all``: each hidden state alone; numbers, first (1), last; ``+`` puts them end to
            end: ``all,first+last``.
        **changes: options of the job, by keyword.
        options: these in one object; what is given by keyword goes before it.
        model: make a workspace for the hidden states of this encoder alone.
        encoding: how to store what is extracted: int8 (default), int4, bfloat16, float16, float32.
        precision: arithmetic of the extraction: auto, 32 or bf16.
        scheduler: ``tcp://HOST:PORT`` of a Dask cluster whose workers extract.
        csv: write the table to this file too, with the sub-sets.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

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
    options = chosen(SimilarityOptions, options, changes)
    names = [parse_choice(n, SIMILARITY_SCORERS, "--scorers") for n in parse_names(scorers)]
    parse_choice(precision, PRECISIONS, "--precision")
    if encoding is not None:
        parse_choice(encoding, ENCODINGS, "--encoding")
    check_cluster(scheduler)
    poolings, tags = parse_poolings(pool), parse_tags(checkpoint)
    root, encoder, tasks = path_of(workspace), text_of(model), dict.fromkeys(parse_names(task))
    for name in tasks:
        if (there := check_data(root, encoder, name, text_of(data))) is not None:
            check_snapshots(there, tags)
    from bertvision.pipelines.similarity.rows import similarity_rows
    from bertvision.pipelines.similarity.run import similarity as run
    from bertvision.pipelines.similarity.table import table

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
    if (file := path_of(csv)) is not None:
        write_text(file, csv_text(rows))
    return Rows(map(Row, rows), table)
