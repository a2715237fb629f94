"""``bertvision extract``: hidden states into the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from bertvision.commands.options import (
    Data,
    Json,
    LabelColumn,
    MaxLength,
    NewModel,
    PairColumn,
    SkipBad,
    Store,
    TextColumn,
    Workspace,
    check_storing,
    open_data,
    parse_tags,
    show,
)
from bertvision.commands.tables import Row
from bertvision.pipelines.text import format_table, size
from bertvision.pipelines.workspace.job_options import ExtractOptions


def extract(
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Snapshots, such as 0.3e or 0.3e,1e; by default the only one there is."),
    ] = None,
    *,
    options: ExtractOptions,
    task: Annotated[
        str | None,
        typer.Option(help="Another data set than the workspace's own: its task, such as cola."),
    ] = None,
    data: Data = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    label: LabelColumn = None,
    max_length: MaxLength = None,
    skip_bad: SkipBad = None,
    model: NewModel = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Write a snapshot's hidden states into the activation store.

    The data are the workspace's own, or another data set: --task says what it is and --data, the
    first time, where it is. A killed extraction is finished by the same command. A store named with
    --store is the workspace's from then on.
    """
    from bertvision.pipelines.extraction.extract import extract as run
    from bertvision.pipelines.workspace.heads import only_tag
    from bertvision.pipelines.workspace.pretrained import ensure_snapshot

    settings: dict[str, object] = {"text": text, "pair": pair, "label": label}
    settings |= {"max_length": max_length, "skip_bad": skip_bad}
    check_storing(options.encoding, options.precision)
    named = parse_tags(checkpoint) if checkpoint else None
    space, dataset = open_data(workspace, model, task, data, **settings)
    made = space.snapshots()
    tags = named or [only_tag(made or ["0e"], "snapshots")]
    for tag in tags:
        ensure_snapshot(space, tag)  # of all, before hours are spent on the first
    done = []
    for tag in tags:
        done += run(space, tag, options, dataset=dataset, store=store)
    show([item._asdict() for item in done], as_json, extracted_table)


def extracted_table(splits: Sequence[Row]) -> str:
    """What an extraction wrote, and what of it was pooled from stored tokens."""
    remarks = [
        f"{s['tag']}/{s['split']}: pooled from {s['pooled_from']}, without the encoder"
        for s in splits
        if s["pooled_from"]
    ]
    table = format_table(
        ["split", "examples", "shards written", "size", "examples/s", "encoder's share"],
        [
            [
                f"{s['tag']}/{s['split']}",
                f"{s['examples']:,}",
                str(s["shards_written"]),
                size(s["bytes"]),
                f"{s['examples_written'] / s['seconds']:.1f}" if s["shards_written"] else "-",
                f"{s['encoder_seconds'] / s['seconds']:.0%}"
                if s["shards_written"] and not s["pooled_from"]
                else "-",
            ]
            for s in splits
        ],
    )
    return "\n\n".join([table, *(["\n".join(remarks)] if remarks else [])])
