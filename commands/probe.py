"""``bertvision probe``: what each layer knows, by linear probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bertvision.commands.options import (
    Cluster,
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
    check_storing,
    open_data,
    parse_layers,
    parse_names,
    parse_poolings,
    parse_tags,
    show,
)
from bertvision.commands.tables import number
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.text import format_table

_GIB = 1 << 30


def probe(
    task: Annotated[
        list[str], typer.Argument(help="Data sets by their task, such as bigram_shift; several.")
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
        bool, typer.Option("--untrained", help="Also the twin with random weights.")
    ] = False,
    layers: Annotated[
        str, typer.Option(help="Hidden states, such as 0,6,12 (0: embeddings), or all.")
    ] = "all",
    pool: Annotated[
        str, typer.Option(help="Poolings of a window's tokens: cls,sep,mean,max.")
    ] = "cls,mean",
    concat: Annotated[
        str | None, typer.Option(help="Layers end to end besides: first+last,0+3+6.")
    ] = None,
    mlp: Annotated[
        bool, typer.Option("--mlp", help="A hidden layer of 50 sigmoids, not a linear probe.")
    ] = False,
    control: Annotated[
        bool, typer.Option("--control", help="Also the control task, for selectivity.")
    ] = False,
    mdl: Annotated[
        bool, typer.Option("--mdl", help="Also the description length, by online coding.")
    ] = False,
    options: ProbeOptions,
    memory: Annotated[
        float, typer.Option(min=0, help="GiB of features and probes at once, about.")
    ] = 2.0,
    model: NewModel = None,
    encoding: MissingEncoding = None,
    precision: Precision = "auto",
    scheduler: Cluster = None,
    csv: Annotated[Path | None, typer.Option(help="Write all probes to this file too.")] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    r"""Train a probe on every layer and pooling of snapshots, and score it.

    Extracts what is missing; --data is needed the first time, a folder may hold several data sets.
    Training follows SentEval unless options say otherwise. A second call does only what is missing.
    """
    from bertvision.pipelines.files import write_text
    from bertvision.pipelines.probing.run import probe as run
    from bertvision.pipelines.probing.summary import probe_rows
    from bertvision.pipelines.text import csv_text

    settings: dict[str, object] = {"text": text, "pair": pair, "label": label}
    settings |= {"max_length": max_length, "skip_bad": skip_bad}
    tags, poolings, joined = parse_tags(checkpoint), parse_poolings(pool), parse_names(concat) or []
    single = parse_layers(layers)
    check_storing(encoding, precision)
    found = []
    opened = [open_data(workspace, model, name, data, **settings) for name in dict.fromkeys(task)]
    for space, dataset in opened:
        found += run(
            space.at(store),
            dataset,
            tags,
            layers=single,
            poolings=poolings,
            concat=joined,
            untrained=untrained,
            control=control,
            mdl=mdl,
            options=replace(options, hidden=50) if mlp else options,
            encoding=encoding,
            precision=precision,
            scheduler=scheduler,
            memory=int(memory * _GIB),
        )
    rows = probe_rows(found)
    if csv is not None:
        write_text(csv, csv_text(rows))
    show(rows, as_json, _table)


_LEGEND = (
    "Accuracy in per cent on the scored examples, of the layer that does best on held-out ones "
    "(@ layer);\nin brackets the difference from the untrained twin."
)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each data set and snapshot: the best layer of each pooling.

    Args:
        rows: see `probe_rows`.
    """
    from bertvision.pipelines.probing.summary import by_snapshot

    poolings = list(dict.fromkeys(row["pooling"] for row in rows))
    joined = list(dict.fromkeys(r["layers"] for r in rows if "+" in r["layers"]))
    kinds = {row["probe"] for row in rows}
    header = ["data", "snapshot", *(["probe"] if len(kinds) > 1 else []), "majority"]
    header += [*poolings, *(f"{p} {text}" for text in joined for p in poolings)]
    extra = {"selectivity": "{:.1f}", "compression": "{:.2f}"}
    shown = [name for name in extra if any(row[name] is not None for row in rows)]
    header += [f"{name} {p}" for name in shown for p in poolings]
    lines = []
    for (dataset, kind, _, tag), found in by_snapshot(rows).items():
        line = [dataset, tag, *([kind] if len(kinds) > 1 else [])]
        line.append(f"{found[0]['majority']:.1f}")
        best = {r["pooling"]: r for r in found if r["best"]}
        line += [_cell(best.get(p), layer=True) for p in poolings]
        for text in joined:
            of = {r["pooling"]: r for r in found if r["layers"] == text}
            line += [_cell(of.get(p), layer=False) for p in poolings]
        for name in shown:
            line += [number(best[p][name] if p in best else None, extra[name]) for p in poolings]
        lines.append(line)
    return f"{format_table(header, lines)}\n\n{_LEGEND}"


def _cell(row: dict[str, Any] | None, *, layer: bool) -> str:
    if row is None:
        return "-"
    gain = "" if row["difference"] is None else f" ({row['difference']:+.1f})"
    return f"{row['accuracy']:.1f}{gain}" + (f" @{row['layers']}" if layer else "")
