"""``bertvision push`` and ``pull``: results on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Json, Store, Workspace, runs_verb


@runs_verb
def push(
    what: Annotated[
        str,
        typer.Argument(
            help="NAME:SNAPSHOT of a trained head, a snapshot such as 1e, splits such as "
            "1e/train,1e/dev, store for all splits, or report."
        ),
    ],
    repository: Annotated[str, typer.Argument(help="owner/name, made where there is none.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch to send to; by default the main one.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Visibility of a new repository; by default its owner's.",
        ),
    ] = None,
    license: Annotated[  # noqa: A002
        str | None, typer.Option(help="Licence that the card names, such as cc-by-4.0.")
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Take the place of the card, and of files of the same names, that somebody else "
            "put there, and of another split of a name; with store, remove the splits that an "
            "earlier push sent and the store does not have.",
        ),
    ] = False,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Send a head, a snapshot, stored splits or the report to the Hugging Face hub, with a card.

    The token is that of HF_TOKEN or of `hf auth login`. What is there is not sent again, so a
    killed push is finished by the same command. What an earlier push left there and this one no
    longer has is removed; a file that push did not send never is.
    """


@runs_verb
def pull(
    repository: Annotated[
        str, typer.Argument(help="owner/name, or datasets/owner/name, spaces/owner/name.")
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Where to put it; by default where it belongs in the workspace. Snapshots and "
            "reports need one."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Splits of a store to bring, such as 1e/dev; by default all."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit; by default the main branch.")
    ] = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Bring what `push` sent, and check every file before anything is put in its place.

    A killed pull is finished by the same command.
    """
