"""Sections of what hidden states say by themselves: rankings, similarity, and every analysis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.analysis.result import FOLDER, Analysis, AnalysisResult, read_analyses
from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.measurements import read_current
from bertvision.pipelines.readouts.options import CROSS_ENCODER
from bertvision.pipelines.readouts.rank_metrics import expected_at_random, read_qrels, summary
from bertvision.pipelines.readouts.rank_results import FILE as RANKING
from bertvision.pipelines.readouts.rank_results import FOLDER as RANKINGS
from bertvision.pipelines.readouts.rank_results import (
    SCORES,
    Ranking,
    mark_best,
    read_ranked,
    system_row,
)
from bertvision.pipelines.readouts.similarity_results import (
    ALL,
    NAMES,
    PAIRS,
    VALUES,
    SimilarityFile,
    notes,
    similarity_rows,
)
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.report.probe_tables import by_registry
from bertvision.pipelines.report.section import Figure, Reading, Section, Table
from bertvision.pipelines.results.columns import Column, columns
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.workspace.workspace import Workspace

FILES = (f"{RANKINGS}/*/**/{RANKING}", f"{SimilarityFile.folder}/*/*.json", f"{FOLDER}/*.json")
"""The files of these sections, in a workspace."""
_FIGURES = 6
"""Figures in the section of an analysis at most; its table has all results."""
_GROUP, _TRACE = "of", ("file", "command")
_SIMILARITIES = f"{SimilarityFile.folder}/<data set>/<snapshot>-<pooling>-<settings>.json"
_SIMILARITY = "bertvision similarity DATA… --checkpoint TAG,TAG"
_ENDS = ("", "_sd", "_low", "_high")
"""Ends of keys: a value, its deviation over seeds, its interval."""
_RESAMPLES = 2_000

Found = dict[str, Analysis[AnalysisResult]]


def analysis_section(kind: type[AnalysisResult], reading: Reading) -> Section | None:
    """The results of a kind of analysis, as they are; None where there are none.

    Args:
        kind: Kind of analysis.
        reading: The workspace.
    """
    results = read_analyses(reading.workspace, kind, reading.left_out)
    if not results:
        return None
    figures = [_figure(file, analysis) for file, analysis in list(results.items())[:_FIGURES]]
    tables = [_table(kind, results)]
    return Section(kind.kind, kind.heading, kind.reading, figures=figures, tables=tables)


def _figure(file: str, analysis: Analysis[AnalysisResult]) -> Figure:
    """The figure that the command draws."""
    result = analysis.result
    ident, caption = Path(file).stem.replace(".", "-"), f"{result.title()}. {result.seen}"
    return Figure(ident, result.title(), caption, file, analysis.command, result.drawn())


def _table(kind: type[AnalysisResult], results: Found) -> Table:
    """The rows of all results, each under its title; what no column shows is in the files."""
    lines: list[dict[str, Any]] = []
    named: dict[str, Column] = {}
    remarks: dict[str, None] = {}
    for file, analysis in results.items():
        result = analysis.result
        named |= {column.key: column for column in result.columns() if column.key not in named}
        remarks |= dict.fromkeys(result.footnotes())
        trace = {_GROUP: result.title(), "file": file, "command": analysis.command}
        lines += [row | trace for row in result.shown()]
    told = [_GROUP, *_TRACE, *named]
    told += [f"{key}_sd" for key, column in named.items() if column.sd]
    return Table(
        kind.kind,
        kind.caption,
        list(named.values()),
        lines,
        f"{FOLDER}/{kind.kind}-*.json",
        f"bertvision {kind.kind}",
        group=_GROUP,
        more=list(dict.fromkeys(key for line in lines for key in line if key not in told)),
        trace=True,
        remarks=list(remarks),
    )


def rankings_section(reading: Reading) -> Section | None:
    """Every ranking of the workspace, beside BM25 and a random order; None where there is none."""
    rows: list[Row] = []
    for folder in sorted((reading.workspace.root / RANKINGS).glob("[!.]*")):
        rows += _rankings(reading.workspace, folder, reading.left_out)
    if not rows:
        return None
    table = Table(
        "rankings",
        "Rankings of test in per cent, with 95 % intervals over questions; best: of the scorer and "
        "pooling, the layers with the highest MAP on dev",
        [
            *columns("text", system="system", checkpoint="snapshot", pooling="pooling"),
            *columns("text", layers="layers", mark="best"),
            Column("seeds", "seeds", "count"),
            *SCORES,
        ],
        rows,
        FILES[0],
        "bertvision rank DATA --data FOLDER",
        group="group",
        more=[
            *("difference_low", "difference_high", "p", "questions", "without_positive"),
            *("map_all", "mrr_all", "p1_all", "data"),
        ],
        trace=True,
    )
    lead = (
        "MAP, MRR and P@1 over questions that have a right passage. Look at the best rows: their "
        "layers were chosen on dev, where the highest number of test would be too high. "
        "An interval of one seed holds the choice of questions alone."
    )
    return Section("rankings", "Answer ranking", lead, tables=[table])


def _rankings(workspace: Workspace, folder: Path, left_out: list[str]) -> list[Row]:
    """BM25, a random order, then a row for each scorer and input, its seeds together."""
    groups: dict[tuple[str, ...], dict[Path, Ranking]] = {}
    files = folder.glob(f"**/{RANKING}")
    for path, record in read_current(workspace, files, read_ranked, left_out).items():
        groups.setdefault(_key(record), {})[path] = record
    baselines = {
        key[0]: next(iter(records.values())) for key, records in groups.items() if key[1] == "bm25"
    }
    rows: list[Row] = []
    for key, records in sorted(groups.items(), key=lambda item: _place(item[0])):
        data, system, *place = key
        names = dict(zip(("checkpoint", "pooling", "layers"), place, strict=False))
        baseline = None if system == "bm25" else baselines.get(data)
        row = system_row(
            list(records.values()), baseline, resamples=_RESAMPLES, system=system, **names
        )
        row["map_sd"] = row.pop("map_sd_over_seeds")
        row |= {
            "group": f"{folder.name}, data sha256 {data[:12]}…",
            "data": data[:12],
            "file": "; ".join(p.relative_to(workspace.root).as_posix() for p in records),
            "command": f"bertvision rank {folder.name}",
        }
        rows.append(row)
        if system == "bm25":
            rows += _by_chance(folder, row, left_out)
    learned = [row for row in rows if "pooling" in row]
    mark_best(learned, ("data", "system", "checkpoint", "pooling"))
    for row in learned:
        row["mark"] = "best" if row["best"] and row["dev_map"] is not None else None
    return rows


def _key(record: Ranking) -> tuple[str, ...]:
    """The key that rankings which differ by their seed alone share."""
    settings: dict[str, Any] = dict(record.settings)
    if settings["scorer"] == "bm25":
        return str(settings["data_sha256"]), "bm25"
    if settings["scorer"] == CROSS_ENCODER:
        return str(settings["data_sha256"]), CROSS_ENCODER, str(settings["checkpoint"])
    place = (
        str(settings["checkpoint"]),
        str(settings["pooling"]),
        layers_text(tuple(settings["layers"])),
    )
    return str(settings["data_sha256"]), str(settings["scorer"]), *place


def _place(key: Sequence[str]) -> tuple[object, ...]:
    data, system, *rest = key
    if not rest:
        return data, (), "", "", (), system
    if len(rest) == 1:
        return data, SnapshotTag(rest[0]).place, "", system, (), ""
    tag, pooling, layers = rest
    numbers = tuple(int(layer) for layer in layers.split("+"))
    return data, SnapshotTag(tag).place, pooling, system, (len(numbers), *numbers), ""


def _by_chance(folder: Path, beside: Row, left_out: list[str]) -> list[Row]:
    """The exact expectation of a random order, from the labels that are kept for trec_eval."""
    path = folder / "qrels" / "test.qrels"
    if not path.is_file():
        return []
    with leaving_out(left_out):
        question, label = read_qrels(path)
        expected = summary(expected_at_random(label, question), int(question.max()) + 1)
        if expected.questions != beside["questions"]:
            raise WorkspaceError(
                f"{path} is damaged ({expected.questions} of its questions have a positive "
                f"passage, of BM25's {beside['questions']}): `{beside['command']}` writes it again"
            )
        origin = {key: beside[key] for key in ("group", "data", "command")}
        file = (Path(beside["file"]).parents[1] / "qrels" / path.name).as_posix()
        return [{"system": "random order", **origin, "file": file, **expected._asdict()}]
    return []


def similarity_section(reading: Reading) -> Section | None:
    """Similarities of every data set; None where there are none."""
    rows = similarity_rows(SimilarityFile.read_all(reading.workspace, reading.left_out))
    if not rows:
        return None
    lead = (
        "Sentences are encoded by themselves; the cosine of their pooled states, or a softmax "
        "regression trained on both, is correlated with what people said of the pair. Read a row "
        "beside the overlap of words, which needs no encoder, and layer 0, the mean of embeddings. "
        "Intervals are of resampled pairs (95 %), not of other trainings."
    )
    title = "Similarity of sentences"
    return Section("similarity", title, lead, notes(rows), tables=_similarities(rows))


def _similarities(rows: Sequence[Row]) -> list[Table]:
    order = {name: i for i, name in enumerate(by_registry({r["dataset"] for r in rows}))}
    rows = sorted(rows, key=lambda r: order[r["dataset"]])  # which keeps the order of the rest
    related = [_with_best(r) for r in rows if r["target"] == "relatedness"]
    judged = [_with_best(r) for r in rows if r["target"] == "entailment"]
    tables = []
    if related:
        columns_of_pairs = [PAIRS, VALUES["spearman"], VALUES["pearson"]]
        if any(r["mse"] is not None for r in related):
            columns_of_pairs.append(VALUES["mse"])
        whole = [r for r in related if r["subset"] == ALL]
        title = f"Correlation with people's scores × 100, of {_counts(whole)}"
        tables.append(_similarity_table("similarity", title, [*NAMES, *columns_of_pairs], whole))
        tables += _by_layer(whole)
        parts = [r for r in related if r["subset"] != ALL]
        if parts:
            title = "The same by sub-set, with their mean and the mean weighted by pairs (wmean)"
            shown = [Column("subset", "sub-set", "text"), *NAMES, *columns_of_pairs]
            tables.append(_similarity_table("similarity_subsets", title, shown, parts))
    if judged:
        shown = [*NAMES, PAIRS, VALUES["accuracy"]]
        title = f"Entailment: accuracy in per cent, of {_counts(judged)}"
        tables.append(_similarity_table("similarity_entailment", title, shown, judged))
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
        place = {key: r[key] for key in keys}
        line = lines.setdefault(tuple(place.values()), {**place, "best": None})
        line |= {f"layer_{r['number']}{end}": r[f"spearman{end}"] for end in _ENDS}
        if r["best"]:
            line["best"] = r["number"]
    for r in baselines:
        for line in lines.values():
            if line["dataset"] == r["dataset"]:
                line["overlap"] = r["spearman"]
    shown = columns("text", scorer="scorer", tag="snapshot", pooling="pooling", best="best layer")
    shown += [Column("overlap", "word overlap")]
    shown += [Column(f"layer_{layer}", str(layer)) for layer in layers]
    title = (
        "Spearman's correlation × 100 by layer (0: embeddings); the best by held-out pairs, where "
        f"there are any; {_counts(single)}"
    )
    more = ["settings", "pairs", "doubts"]
    more += [f"layer_{layer}{end}" for layer in layers for end in _ENDS[1:]]
    return [
        Table(
            "similarity_layers",
            title,
            shown,
            list(lines.values()),
            _SIMILARITIES,
            _SIMILARITY,
            group="dataset",
            more=more,
            basis="In the files 95 % intervals over pairs, and ± over seeds of the trained scorer.",
        )
    ]


def _similarity_table(name: str, title: str, shown: list[Column], rows: Sequence[Row]) -> Table:
    title += "; 95 % intervals over pairs; ± over seeds of the trained scorer"
    more = ["settings", "scored_part", "seeds", "dev", "best", "doubts"]
    return Table(name, title, shown, rows, _SIMILARITIES, _SIMILARITY, group="dataset", more=more)


def _counts(rows: Sequence[Row]) -> str:
    """The numbers of pairs by data set, for a caption."""
    pairs = {r["dataset"]: f"{r['pairs']:,} pairs of {r['dataset']}" for r in rows}
    return ", ".join(pairs.values())


def _with_best(row: Row) -> Row:
    row = row | {"number": row["layers"]}
    if not row["best"]:
        return row
    return row | {"layers": f"{row['layers']} (best on held-out pairs)"}
