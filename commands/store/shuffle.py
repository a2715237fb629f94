"""``bertvision store shuffle``: a copy of a split, its tokens in the order of a permutation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Json, Store, Workspace, runs_verb


@runs_verb
def shuffle_tokens(
    name: Annotated[str, typer.Argument(help="Split to copy, such as 0.3e/train.")],
    to: Annotated[
        str, typer.Argument(help="Name of the copy in the same snapshot, such as train-shuffled.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the permutation.")] = 0,
    scratch: Annotated[
        Path | None,
        typer.Option(
            help="Folder for as many bytes again, taken for a while; by default beside a local "
            "store, else where the system keeps temporary files."
        ),
    ] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Copy a split with all its tokens permuted, for trainers of sparse autoencoders.

    One pass over the copy in stored order is a shuffle of all tokens. A killed copy is finished by
    the same command. Examples cannot be read from it, and heads not trained on it.
    """
