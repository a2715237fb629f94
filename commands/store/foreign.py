"""``bertvision store import`` and ``export``: hidden states of others in, one's own out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Json, Store, Workspace, runs_verb

NewStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Activation store, a folder or an fsspec URL, made where there is none; by default "
        "the workspace's.",
    ),
]


@runs_verb
def import_states(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of safetensors or .npy files, DeepSpec cache, data set that `datasets` "
            "saved, .npy file or memory map."
        ),
    ],
    name: Annotated[str, typer.Argument(help="Split to write, such as 0e/train.")],
    layers: Annotated[
        str | None,
        typer.Option(
            help="What the layers are, by index or name, such as 2,18,33; by default what the "
            "files say."
        ),
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="int8, int4, bfloat16, float16 or float32.")
    ] = "int8",
    compression: Annotated[str, typer.Option(help="none, zstd or pcodec.")] = "none",
    shard_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a shard; by default 4,096, or twice the longest sample."
        ),
    ] = None,
    permute: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of a stored order that mixes neighbours."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose hidden states they are, for the provenance.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help=".npy with the tokens of each sample, beside one array.")
    ] = None,
    input_ids: Annotated[
        Path | None, typer.Option(help=".npy with the token ids, beside one array.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Numbers of a memory map: float16, bfloat16, float32 or float64."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of a memory map, such as 1000,128,4,768.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of a data set that has the hidden states.")
    ] = None,
    format: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            help="Kind of files, of a folder that holds several: safetensors, npy, arrow or "
            "deepspec."
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out damaged samples, and count them.")
    ] = False,
    workspace: Workspace = None,
    store: NewStore = None,
    as_json: Json = False,
) -> None:
    """Store hidden states that other programs wrote; all readers take them then.

    A killed import is finished by the same command: nothing is stored twice. Nothing is unpickled.
    """


@runs_verb
def export_states(
    name: Annotated[str, typer.Argument(help="Split, such as 0.3e/train.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write to, new or empty.")],
    format: Annotated[  # noqa: A002
        str,
        typer.Option(
            help="safetensors (a file for each example), npy (one array) or arrow (a data set that "
            "`datasets` opens)."
        ),
    ] = "safetensors",
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    layers: Annotated[
        str | None, typer.Option(help="Layers, by index or name; by default all.")
    ] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Write a split as files that other programs read.

    A killed export is finished by the same command: what has its name is whole.
    """
