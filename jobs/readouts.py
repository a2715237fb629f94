"""Readouts of stored hidden states: probes, rankings, similarities, syntax trees."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bertvision.errors import InputError
from bertvision.jobs.show import Row, Rows, RowsField, ShownRecord, Values
from bertvision.pipelines.declare import (
    DEFAULTS,
    ClusterAddress,
    DataSource,
    LabelColumn,
    MaxLength,
    NewEncoding,
    NewModel,
    PairColumn,
    Poolings,
    PrecisionOption,
    Resamples,
    SkipBad,
    StorePath,
    TextColumn,
    WorkspacePath,
    job,
)
from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.poolings import POOLING_NAMES
from bertvision.pipelines.reading import (
    Layers,
    Names,
    Tag,
    Tags,
    parse_choice,
    parse_layers,
    parse_names,
    parse_poolings,
    parse_tags,
    path_of,
    text_of,
)
from bertvision.pipelines.readouts.options import (
    CROSS_ENCODER,
    PAIR_SCORERS,
    SCORERS,
    ProbeOptions,
    RankOptions,
    SimilarityOptions,
)
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.tasks.sentences.rows import Columns
from bertvision.pipelines.text import fill
from bertvision.pipelines.workspace.checks import check_cluster, check_snapshots, find_workspace
from bertvision.pipelines.workspace.data import adding_data, check_data, open_data

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from bertvision.pipelines.readouts.directions import DirectionKind
    from bertvision.pipelines.readouts.probe_results import ProbeFile
    from bertvision.pipelines.readouts.ridge import RidgeFile

_GIB = 1 << 30


@job
def probe(
    task: Names,
    *,
    data: DataSource = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    label: LabelColumn = None,
    max_length: MaxLength = None,
    skip_bad: SkipBad = None,
    checkpoint: Tags = "0e",
    untrained: bool = False,
    layers: Layers = "all",
    pool: Annotated[
        Names | None,
        Option(
            f"Poolings of a window: {POOLING_NAMES} (default cls,mean, of decoders last,mean); of "
            "words: first, last, mean, max (default mean)."
        ),
    ] = None,
    concat: Names | None = None,
    mlp: bool = False,
    control: bool = False,
    mdl: bool = False,
    inlp: Annotated[int, Option(ge=0)] = 0,
    save: bool = False,
    options: ProbeOptions = DEFAULTS,
    memory: Annotated[float, Option(ge=0)] = 2.0,
    model: NewModel = None,
    encoding: NewEncoding = None,
    precision: PrecisionOption = "auto",
    scheduler: ClusterAddress = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> Probes:
    """Train probes on every layer, and score them.

    Examples are sentences, or labelled words and spans (tasks tagging, spans). Extracts what is
    missing; ``data`` is needed the first time; a folder may hold several. Training follows SentEval
    unless options say otherwise. A second call does only what is missing.

    Args:
        task: Data sets, by their tasks, such as bigram_shift.
        checkpoint: Snapshots, such as 0e,1e.
        untrained: Also probe the twin with random weights.
        layers: Hidden states, such as 0,6,12 (0: embeddings), or all.
        concat: Also layers put end to end, such as first+last,0+3+6.
        mlp: Probe with a hidden layer of 50 sigmoids, not linearly.
        control: Also probe the control task, for selectivity.
        mdl: Also measure the description length.
        inlp: Also probe after this number of null-space projections of the labels.
        save: Also keep the weights of the probes, for `direction`.
        memory: GiB that features and probes may take, about.

    Returns:
        A row for each probe: ``accuracy`` with its interval, ``difference`` from the untrained
        twin, ``best`` for the layer that does best on held-out examples (see `probe_rows`), or
        correlations of scores (see `score_rows`); and directions of probes whose weights are kept.

    Raises:
        InputError: the data cannot be probed, or there is no such layer, pooling or task.
        UnknownNameError: there is no such snapshot.
        ProvenanceError: probes or hidden states were made from something else; names the field.
        LockedError: another process probes the same data set.
    """
    if mlp:
        options = replace(options, hidden=50)
    if inlp and options.hidden:
        raise InputError("--inlp removes what linear probes read: leave out the hidden layer")
    if mdl and options.solver == "lbfgs":
        raise InputError(
            "--mdl codes with probes of few examples, whose optimum is sure of what it has not "
            "seen: leave --solver lbfgs out"
        )
    if options.solver == "ridge" and (control or mdl or inlp):
        raise InputError(
            "--solver ridge learns scores: leave out --control, --mdl and --inlp, which are of "
            "classes"
        )
    check_cluster(scheduler)
    tags, wanted = parse_tags(checkpoint), parse_layers(layers)
    poolings = None if pool is None else parse_poolings(pool)
    root, encoder, tasks = path_of(workspace), text_of(model), dict.fromkeys(parse_names(task))
    named = Columns(text or "text", pair, label or "label")
    for name in tasks:
        if (there := check_data(root, encoder, name, text_of(data), named)) is not None:
            check_snapshots(there, tags)
    from bertvision.pipelines.readouts.probe_results import probe as run
    from bertvision.pipelines.readouts.probe_results import probe_rows
    from bertvision.pipelines.readouts.ridge import probe_scores, score_rows

    settings: dict[str, object] = {"text": text, "pair": pair, "label": label}
    settings |= {"max_length": max_length, "skip_bad": skip_bad}
    place, source = text_of(store), text_of(data)
    asked: dict[str, Any] = {
        "layers": wanted,
        "poolings": poolings,
        "concat": parse_names(concat or ()),
        "untrained": untrained,
        "save": save,
        "options": options,
        "encoding": encoding,
        "precision": precision,
        "scheduler": scheduler,
    }
    of_classes: dict[str, Any] = {"control": control, "mdl": mdl, "inlp": inlp}
    of_classes["memory"] = int(memory * _GIB)
    measured: list[ProbeFile] = []
    scores: list[RidgeFile] = []
    with ExitStack() as added:
        for space, dataset in [
            added.enter_context(adding_data(root, encoder, name, source, store=place, **settings))
            for name in tasks
        ]:
            if options.solver == "ridge":
                scores += probe_scores(space.at(place), dataset, tags, **asked)
                continue
            measured += run(space.at(place), dataset, tags, **asked, **of_classes)
    rows = probe_rows(measured) + score_rows(scores)
    return Probes(rows, path_of(workspace), [*measured, *scores])


class Probes(Rows[Row]):
    """Probes: a row for each, and the directions of those whose weights are kept."""

    def __init__(
        self,
        rows: Sequence[Values],
        workspace: Path | None,
        files: Sequence[ProbeFile | RidgeFile] = (),
    ) -> None:
        super().__init__(map(Row, rows), probe_table, probe_charts)
        self._workspace, self._files = workspace, tuple(files)

    def direction(
        self,
        layer: int | str,
        label: str | int | None = None,
        *,
        kind: DirectionKind = "probe",
        dataset: str | None = None,
        tag: Tag | None = None,
        pooling: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """A direction in the space of the hidden states, towards a class or to higher scores.

        Args:
            layer: Hidden state, such as 6; or those that a probe reads end to end, such as 0+6.
            label: Name of the class, or its index; of two classes the second by default. The
                direction leads away from the mean of the others.
            kind: ``probe`` takes the weights of the linear probe (of the first fold, where there
                are several), ``means`` the mean vectors of the classes.
            dataset: Data set of the probe, where there are several.
            tag: Snapshot, likewise, such as 0.3e or 0.3.
            pooling: Pooling, likewise.

        Returns:
            (hidden,) or, of layers end to end, (layers × hidden,); not of length 1.

        Raises:
            InputError: no probe or several are meant, its weights are not kept, or there is no such
                class or kind.
            WorkspaceError: the file of the weights is gone or changed.
        """
        tags = (None,) if tag is None else parse_tags(tag)
        wanted = {"dataset": dataset, "tag": tags[0], "pooling": pooling}
        named = {key: str(value) for key, value in wanted.items() if value is not None}
        every = [(file, probe) for file in self._files for probe in file.probes]
        meant = [
            (file, probe)
            for file, probe in every
            if layers_text(probe.layers) == str(layer)
            and all(getattr(file, key) == value for key, value in named.items())
        ]
        if len(meant) != 1:
            layers: dict[str, list[str]] = {}
            for f, p in meant or every:
                name = f"dataset={f.dataset!r}, tag={str(f.tag)!r}, pooling={f.pooling!r}"
                layers.setdefault(name, []).append(layers_text(p.layers))
            names = "; ".join(f"{name}: layer {', '.join(own)}" for name, own in layers.items())
            asked = ", ".join([f"layer {layer}", *(f"{k}={v!r}" for k, v in named.items())])
            raise InputError(
                f"{asked} is of several probes, name one: {names}"
                if meant
                else f"no probe is of {asked}: there are {names or 'none'}"
            )
        ((file, probe),) = meant
        if probe.weights is None:
            raise InputError("the weights of this probe are not kept: probe with save=True")
        from bertvision.pipelines.readouts.directions import SavedProbe

        path = file.weights_path(find_workspace(self._workspace).root, probe.layers)
        return SavedProbe.load(path, probe.weights).direction(label, kind)


_LEGEND = (
    "Accuracy in per cent on the scored examples, of the layer that does best on held-out ones "
    "(@ layer);\nin brackets the difference from the untrained twin."
)


_REMOVED = (
    "INLP and mean projection: accuracy of new probes after the label was removed from the vectors "
    "by null-space projections, and by the differences of the class means alone."
)


def probe_table(rows: Sequence[Values]) -> str:
    """A line for each data set and snapshot: the best layer of each pooling.

    Args:
        rows: see `probe_rows`, as they are.
    """
    from bertvision.pipelines.readouts.probe_results import DOUBTFUL, by_snapshot

    if rows and rows[0]["probe"] == "ridge":
        return _score_table(rows)
    poolings = list(dict.fromkeys(row["pooling"] for row in rows))
    joined = dict.fromkeys(r["layers"] for r in rows if "+" in r["layers"])
    doubts: dict[str, str | None] = {}
    lines = []
    for (dataset, _, _, _), own in by_snapshot(rows).items():
        doubtful = doubts.setdefault(dataset, own[0]["doubts"])
        line = {**own[0], "dataset": dataset + DOUBTFUL * bool(doubtful)}
        for row in own:
            pooling = row["pooling"]
            if row["best"]:
                line |= {f"{name} {pooling}": row[name] for name in _MEASURES}
                line[pooling] = f"{_accuracy(row)} @{row['layers']}"
            elif row["layers"] in joined:
                line[f"{pooling} {row['layers']}"] = _accuracy(row)
        lines.append(line)
    more = [name for name in _MEASURES if any(row[name] is not None for row in rows)]
    shown = columns("text", dataset="data", tag="snapshot")
    shown += columns("text", probe="probe") if len({row["probe"] for row in rows}) > 1 else []
    texts = [*poolings, *(f"{p} {text}" for text in joined for p in poolings)]
    shown += [Column("majority", "majority"), *(Column(key, key, "text") for key in texts)]
    shown += [
        Column(f"{name} {p}", f"{_NAMES.get(name, name)} {p}", digits=_MEASURES[name])
        for name in more
        for p in poolings
    ]
    notes = [fill(f"{DOUBTFUL} {name}: {text}.", 2) for name, text in doubts.items() if text]
    if "inlp" in more:
        notes.insert(0, fill(_REMOVED))
    return "\n".join([f"{table_of(shown, lines)}\n\n{_LEGEND}", *notes])


_MEASURES = {"selectivity": 1, "compression": 2, "inlp": 1, "mean_projection": 1}
"""Measures beside the accuracy, with their decimals."""
_NAMES = {"inlp": "INLP", "mean_projection": "mean projection"}


def _accuracy(row: Values) -> str:
    gain = "" if row["difference"] is None else f" ({row['difference']:+.1f})"
    return f"{row['accuracy']:.1f}{gain}"


_SCORES = (
    "Correlations from −100 to 100 on the scored examples, with 95 % intervals over these, of the "
    "layer with the highest Pearson on held-out ones; rmse in points of the score, beside it that "
    "of always giving the mean of the training examples, whose correlations are 0."
)


def _score_table(rows: Sequence[Values]) -> str:
    """A line for the best layer of each data set, snapshot and pooling, and for joined layers."""
    lines = []
    for row in rows:
        if row["best"] or "+" in row["layers"]:
            line = dict(row)
            for key in ("pearson", "spearman"):
                line[key] = f"{row[key]:.1f} [{row[f'{key}_low']:.1f}, {row[f'{key}_high']:.1f}]"
            lines.append(line)
    shown = columns("text", dataset="data", tag="snapshot", pooling="pooling", layers="layer")
    shown += columns("text", pearson="Pearson", spearman="Spearman")
    shown += [Column("rmse", "rmse", digits=3), Column("mean_rmse", "rmse of the mean", digits=3)]
    doubts = {row["dataset"]: row["doubts"] for row in rows if row["doubts"]}
    notes = [fill(f"{name}: {text}.", 2) for name, text in doubts.items()]
    return "\n".join([f"{table_of(shown, lines)}\n\n{fill(_SCORES)}", *notes])


def probe_charts(rows: Sequence[Values]) -> dict[str, Chart]:
    """Scores of single layers, a line for each snapshot, data set, pooling and kind of probe.

    Args:
        rows: see `probe_rows`, as they are.
    """
    keys = ["tag", "dataset", "pooling", "probe", "settings"]
    if rows and rows[0]["probe"] == "ridge":
        single = [row for row in rows if "+" not in row["layers"]]
        labels = {"pearson": "Pearson (×100)", "spearman": "Spearman (×100)"}
        return {k: curves(single, k, x, by=keys, places="layers") for k, x in labels.items()}
    told = {
        "accuracy": "accuracy (%)",
        "difference": "difference from the untrained twin (points)",
        "selectivity": "selectivity (points)",
        "compression": "compression (uniform code ÷ description length)",
    }
    single = [
        {**row, "accuracy_low": row["low"], "accuracy_high": row["high"]}
        for row in rows
        if "+" not in row["layers"]
    ]
    charts: dict[str, Chart] = {}
    for key, label in told.items():
        if scored_rows := [row for row in single if row[key] is not None]:
            levels = {"as the twin": 0.0} if key == "difference" else _majorities(scored_rows)
            levels = levels if key in ("accuracy", "difference") else {}
            charts[key] = curves(scored_rows, key, label, by=keys, places="layers", levels=levels)
    return charts


def _majorities(rows: Sequence[Values]) -> dict[str, float]:
    by_data = {row["dataset"]: float(row["majority"]) for row in rows}
    if len(by_data) == 1:
        return {"largest class": next(iter(by_data.values()))}
    return {f"largest class of {name}": value for name, value in by_data.items()}


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
    pool: Poolings = "mean",
    layers: str = "all",
    seeds: Annotated[int, Option(ge=1)] = 1,
    options: RankOptions = DEFAULTS,
    resamples: Resamples = 10_000,
    model: NewModel = None,
    encoding: NewEncoding = None,
    precision: PrecisionOption = "auto",
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
        layers: all: each hidden state alone; numbers, first (1), last; + puts them end to end:
            all,first+last.
        seeds: Trainings of each scorer.

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
    pool: Poolings = "mean",
    layers: str = "all",
    options: SimilarityOptions = DEFAULTS,
    model: NewModel = None,
    encoding: NewEncoding = None,
    precision: PrecisionOption = "auto",
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

    measured = []
    for space, dataset, name in [
        (*open_data(root, encoder, name, text_of(data)), name) for name in tasks
    ]:
        measured += run(
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
    rows = similarity_rows(measured)
    return Rows(map(Row, rows), table)
