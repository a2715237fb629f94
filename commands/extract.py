"""``bertvision extract``: hidden states into the store."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from bertvision.commands.options import (
    Json,
    Precision,
    Store,
    Workspace,
    find_workspace,
    parse_choice,
    parse_layers,
    parse_names,
    parse_tags,
    show,
)


def extract(
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshots, such as 0.3e or 0.3e,1e.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Such as train,dev; by default all of the workspace.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="all, or cls: [CLS] alone; by default what the task's heads take."),
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="int8, int4, bfloat16, float16 or float32.")
    ] = "int8",
    compression: Annotated[
        str, typer.Option(help="none; zstd for slow disks; pcodec to archive float encodings.")
    ] = "none",
    layers: Annotated[
        str, typer.Option(help="Hidden states to keep, such as 0,6,12 (0: embeddings), or all.")
    ] = "all",
    precision: Precision = "auto",
    nonfinite: Annotated[
        str, typer.Option(help="NaN and infinity: error, or record to replace and count them.")
    ] = "error",
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Write a snapshot's hidden states into the activation store.

    A killed extraction is finished by the same command. A store named with --store is the
    workspace's from then on.
    """
    from bertvision.featurestore.shardfile import CompressionName
    from bertvision.pipelines.extract import extract as run
    from bertvision.pipelines.shardwork import NonFinite
    from bertvision.pipelines.tables import extracted_table
    from bertvision.pipelines.tasks.registry import Tokens

    space = find_workspace(workspace)
    done = []
    tags = parse_tags(checkpoint) if checkpoint else [space.only(space.snapshots(), "snapshots")]
    for tag in tags:
        space.require_snapshot(tag)  # of all, before hours are spent on the first
    for tag in tags:
        done += run(
            space,
            tag,
            splits=parse_names(split),
            tokens=parse_choice(tokens, get_args(Tokens), "--tokens") if tokens else None,
            encoding=encoding,
            compression=parse_choice(compression, get_args(CompressionName), "--compression"),
            layers=parse_layers(layers),
            precision=precision,
            nonfinite=parse_choice(nonfinite, get_args(NonFinite), "--nonfinite"),
            store=store,
        )
    show([item._asdict() for item in done], as_json, extracted_table)
