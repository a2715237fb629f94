"""Linear probes on every layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

from bertvision.jobs.checks import check_cluster, check_snapshots
from bertvision.jobs.data import adding_data, check_data
from bertvision.jobs.declare import (
    DEFAULTS,
    ClusterAddress,
    DataSource,
    LabelColumn,
    MaxLength,
    NewEncoding,
    NewModel,
    PairColumn,
    Precision,
    SkipBad,
    StorePath,
    TextColumn,
    WorkspacePath,
    job,
)
from bertvision.jobs.reading import (
    Layers,
    Names,
    Tags,
    parse_layers,
    parse_names,
    parse_poolings,
    parse_tags,
    path_of,
    text_of,
)
from bertvision.jobs.show import Row, Rows, Values, number
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.tasks.sentences.labelled_file import Columns
from bertvision.pipelines.text import fill, format_table

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
    pool: Names = "cls,mean",
    concat: Names | None = None,
    mlp: bool = False,
    control: bool = False,
    mdl: bool = False,
    options: ProbeOptions = DEFAULTS,
    memory: Annotated[float, Option(ge=0)] = 2.0,
    model: NewModel = None,
    encoding: NewEncoding = None,
    precision: Precision = "auto",
    scheduler: ClusterAddress = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> Rows[Row]:
    """Train probes on every layer, and score them.

    Extracts what is missing; ``data`` is needed the first time; a folder may hold several.
    Training follows SentEval unless options say otherwise. A second call does only what is missing.

    Args:
        task: Data sets, by their tasks, such as bigram_shift.
        checkpoint: Snapshots, such as 0e,1e.
        untrained: Also probe the twin with random weights.
        layers: Hidden states, such as 0,6,12 (0: embeddings), or all.
        pool: Poolings of a window's tokens: cls,sep,mean,max.
        concat: Also layers put end to end, such as first+last,0+3+6.
        mlp: Probe with a hidden layer of 50 sigmoids, not linearly.
        control: Also probe the control task, for selectivity.
        mdl: Also measure the description length, by online coding.
        memory: GiB that features and probes may take, about.

    Returns:
        A row for each probe: ``accuracy`` with its interval, ``difference`` from the untrained
        twin, ``best`` for the layer that does best on held-out examples (see `probe_rows`).

    Raises:
        InputError: the data cannot be probed, or there is no such layer, pooling or task.
        UnknownNameError: there is no such snapshot.
        ProvenanceError: probes or hidden states were made from something else; names the field.
        LockedError: another process probes the same data set.
    """
    if mlp:
        options = replace(options, hidden=50)
    check_cluster(scheduler)
    tags, poolings, wanted = parse_tags(checkpoint), parse_poolings(pool), parse_layers(layers)
    root, encoder, tasks = path_of(workspace), text_of(model), dict.fromkeys(parse_names(task))
    columns = Columns(text or "text", pair, label or "label")
    for name in tasks:
        if (there := check_data(root, encoder, name, text_of(data), columns)) is not None:
            check_snapshots(there, tags)
    from bertvision.pipelines.readouts.probe_results import probe as run
    from bertvision.pipelines.readouts.probe_results import probe_rows

    settings: dict[str, object] = {"text": text, "pair": pair, "label": label}
    settings |= {"max_length": max_length, "skip_bad": skip_bad}
    place, source = text_of(store), text_of(data)
    found = []
    with ExitStack() as added:
        for space, dataset in [
            added.enter_context(adding_data(root, encoder, name, source, store=place, **settings))
            for name in tasks
        ]:
            found += run(
                space.at(place),
                dataset,
                tags,
                layers=wanted,
                poolings=poolings,
                concat=parse_names(concat or ()),
                untrained=untrained,
                control=control,
                mdl=mdl,
                options=options,
                encoding=encoding,
                precision=precision,
                scheduler=scheduler,
                memory=int(memory * _GIB),
            )
    rows = probe_rows(found)
    return Rows(map(Row, rows), probe_table, probe_charts)


_LEGEND = (
    "Accuracy in per cent on the scored examples, of the layer that does best on held-out ones "
    "(@ layer);\nin brackets the difference from the untrained twin."
)


def probe_table(rows: Sequence[Values]) -> str:
    """A line for each data set and snapshot: the best layer of each pooling.

    Args:
        rows: see `probe_rows`, as they are.
    """
    from bertvision.pipelines.readouts.probe_results import DOUBTFUL, by_snapshot

    poolings = list(dict.fromkeys(row["pooling"] for row in rows))
    joined = list(dict.fromkeys(r["layers"] for r in rows if "+" in r["layers"]))
    kinds = {row["probe"] for row in rows}
    header = ["data", "snapshot", *(["probe"] if len(kinds) > 1 else []), "majority"]
    header += [*poolings, *(f"{p} {text}" for text in joined for p in poolings)]
    extra = {"selectivity": "{:.1f}", "compression": "{:.2f}"}
    shown = [name for name in extra if any(row[name] is not None for row in rows)]
    header += [f"{name} {p}" for name in shown for p in poolings]
    doubts: dict[str, str | None] = {}
    lines = []
    for (dataset, kind, _, tag), found in by_snapshot(rows).items():
        doubts.setdefault(dataset, found[0]["doubts"])
        name = f"{dataset}{DOUBTFUL}" if doubts[dataset] else dataset
        line = [name, tag, *([kind] if len(kinds) > 1 else [])]
        line.append(f"{found[0]['majority']:.1f}")
        best = {r["pooling"]: r for r in found if r["best"]}
        line += [_cell(best.get(p), layer=True) for p in poolings]
        for text in joined:
            of = {r["pooling"]: r for r in found if r["layers"] == text}
            line += [_cell(of.get(p), layer=False) for p in poolings]
        for more in shown:
            line += [number(best[p][more] if p in best else None, extra[more]) for p in poolings]
        lines.append(line)
    notes = [fill(f"{DOUBTFUL} {name}: {text}.", 2) for name, text in doubts.items() if text]
    return "\n".join([f"{format_table(header, lines)}\n\n{_LEGEND}", *notes])


def probe_charts(rows: Sequence[Values]) -> dict[str, Chart]:
    """Scores of single layers, a line for each snapshot, data set, pooling and kind of probe.

    Args:
        rows: see `probe_rows`, as they are.
    """
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
    of = ["tag", "dataset", "pooling", "probe", "settings"]
    found: dict[str, Chart] = {}
    for key, label in told.items():
        if kept := [row for row in single if row[key] is not None]:
            levels = {"as the twin": 0.0} if key == "difference" else _majorities(kept)
            levels = levels if key in ("accuracy", "difference") else {}
            found[key] = curves(kept, key, label, by=of, places="layers", levels=levels)
    return found


def _majorities(rows: Sequence[Values]) -> dict[str, float]:
    by_data = {row["dataset"]: float(row["majority"]) for row in rows}
    if len(by_data) == 1:
        return {"largest class": next(iter(by_data.values()))}
    return {f"largest class of {name}": value for name, value in by_data.items()}


def _cell(row: Values | None, *, layer: bool) -> str:
    if row is None:
        return "-"
    gain = "" if row["difference"] is None else f" ({row['difference']:+.1f})"
    return f"{row['accuracy']:.1f}{gain}" + (f" @{row['layers']}" if layer else "")
