"""Section about similarity: how well scores of pairs of sentences agree with people's."""

from __future__ import annotations

from collections.abc import Sequence

from bertvision.pipelines.readouts.similarity_results import (
    ALL,
    Row,
    SimilarityFile,
    notes,
    similarity_rows,
)
from bertvision.pipelines.report.analyses.probe_tables import by_registry
from bertvision.pipelines.report.section import Section
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.workspace.workspace import Workspace

FILES = f"{SimilarityFile.folder}/*/*.json"
"""Where similarities are, in a workspace."""
_SOURCE = f"{SimilarityFile.folder}/<data set>/<snapshot>-<pooling>-<settings>.json"
_COMMAND = "bertvision similarity DATA… --checkpoint TAG,TAG"
_ENDS = ("", "_sd", "_low", "_high")
"""Ends of keys: a value, its deviation over seeds, its interval."""


def similarity_section(workspace: Workspace, left_out: list[str]) -> Section | None:
    """Similarities of every data set; None where there are none.

    Args:
        workspace: that they are of.
        left_out: gets a message for each file that is damaged and left out.
    """
    rows = similarity_rows(SimilarityFile.read_all(workspace, left_out))
    if not rows:
        return None
    lead = (
        "Sentences are encoded by themselves; the cosine of their pooled states, or a softmax "
        "regression trained on both, is correlated with what people said of the pair. Read a row "
        "beside the overlap of words, which needs no encoder, and layer 0, the mean of embeddings. "
        "Intervals are of resampled pairs (95 %), not of other trainings."
    )
    title = "Similarity of sentences"
    return Section("similarity", title, lead, notes(rows), tables=_tables(rows))


def _tables(rows: Sequence[Row]) -> list[Table]:
    order = {name: i for i, name in enumerate(by_registry({r["dataset"] for r in rows}))}
    rows = sorted(rows, key=lambda r: order[r["dataset"]])  # which keeps the order of the rest
    related = [_shown(r) for r in rows if r["target"] == "relatedness"]
    judged = [_shown(r) for r in rows if r["target"] == "entailment"]
    names = [Column("scorer", "scorer", "text"), Column("tag", "snapshot", "text")]
    names += [Column("pooling", "pooling", "text"), Column("layers", "layers", "text")]
    pairs = Column("pairs", "pairs", "count")
    tables = []
    if related:
        columns = [
            *names,
            pairs,
            Column("spearman", "Spearman", sd=True, interval=True),
            Column("pearson", "Pearson", sd=True, interval=True),
        ]
        if any(r["mse"] is not None for r in related):
            columns.append(Column("mse", "squared error", digits=3, sd=True))
        whole = [r for r in related if r["subset"] == ALL]
        title = f"Correlation with people's scores × 100, of {_counts(whole)}"
        tables.append(_table("similarity", title, columns, whole))
        tables += _by_layer(whole)
        parts = [r for r in related if r["subset"] != ALL]
        if parts:
            title = "The same by sub-set, with their mean and the mean weighted by pairs (wmean)"
            shown = [Column("subset", "sub-set", "text"), *columns]
            tables.append(_table("similarity_subsets", title, shown, parts))
    if judged:
        columns = [*names, pairs, Column("accuracy", "accuracy", sd=True, interval=True)]
        title = f"Entailment: accuracy in per cent, of {_counts(judged)}"
        tables.append(_table("similarity_entailment", title, columns, judged))
    return tables


def _by_layer(rows: Sequence[Row]) -> list[Table]:
    """A row for each data set, scorer, snapshot and pooling: Spearman's correlation by layer."""
    single = [r for r in rows if str(r["number"]).isdigit()]
    layers = sorted({int(r["number"]) for r in single})
    if len(layers) < 2:
        return []
    baselines = [r for r in rows if r["number"] is None]
    keys = ("dataset", "scorer", "tag", "pooling", "settings", "pairs", "doubts")
    lines: dict[tuple[object, ...], Row] = {}
    for r in single:
        of = {key: r[key] for key in keys}
        line = lines.setdefault(tuple(of.values()), {**of, "best": None})
        line |= {f"layer_{r['number']}{end}": r[f"spearman{end}"] for end in _ENDS}
        if r["best"]:
            line["best"] = r["number"]
    for r in baselines:
        for line in lines.values():
            if line["dataset"] == r["dataset"]:
                line["overlap"] = r["spearman"]
    columns = [Column("scorer", "scorer", "text"), Column("tag", "snapshot", "text")]
    columns += [Column("pooling", "pooling", "text"), Column("best", "best layer", "text")]
    columns += [Column("overlap", "word overlap")]
    columns += [Column(f"layer_{layer}", str(layer)) for layer in layers]
    title = (
        "Spearman's correlation × 100 by layer (0: embeddings); the best by held-out pairs, where "
        f"there are any; {_counts(single)}"
    )
    more = ["settings", "pairs", "doubts"]
    more += [f"layer_{layer}{end}" for layer in layers for end in _ENDS[1:]]
    return [
        Table(
            *("similarity_layers", title, columns, list(lines.values()), _SOURCE, _COMMAND),
            group="dataset",
            more=more,
            basis="In the files 95 % intervals over pairs, and ± over seeds of the trained scorer.",
        )
    ]


def _table(name: str, title: str, columns: list[Column], rows: Sequence[Row]) -> Table:
    title += "; 95 % intervals over pairs; ± over seeds of the trained scorer"
    more = ["settings", "scored_part", "seeds", "dev", "best", "doubts"]
    return Table(name, title, columns, rows, _SOURCE, _COMMAND, group="dataset", more=more)


def _counts(rows: Sequence[Row]) -> str:
    """How many pairs of which data set, for a caption."""
    pairs = {r["dataset"]: f"{r['pairs']:,} pairs of {r['dataset']}" for r in rows}
    return ", ".join(pairs.values())


def _shown(row: Row) -> Row:
    row = row | {"number": row["layers"]}
    if not row["best"]:
        return row
    return row | {"layers": f"{row['layers']} (best on held-out pairs)"}
