"""``bertvision generate``: prompts gone on with, and the hidden states on the way kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Json, Workspace, runs_verb
from bertvision.commands.store.foreign import NewStore
from bertvision.pipelines.generation.options import GenerateOptions


@runs_verb
def generate(
    name: Annotated[str, typer.Argument(help="Split to write, such as 0e/answers.")],
    model: Annotated[str, typer.Option(help="Decoder: a folder, or a name on the hub.")],
    data: Annotated[str, typer.Option(help="Prompts: a file, a folder or a data set on the hub.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the decoder on the hub.")
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="What the prompts are: text (jsonl, parquet, txt), or chat, conversations "
            "whose next message is generated."
        ),
    ] = "text",
    text: Annotated[
        str | None, typer.Option(help="Column of the texts (task text; default text).")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the data, where they have several.")
    ] = None,
    *,
    options: GenerateOptions,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad", help="Leave out malformed rows and prompts that are too long; count them."
        ),
    ] = False,
    jsonl: Annotated[
        Path | None, typer.Option(help="Write the texts to this file too, a line of JSON each.")
    ] = None,
    workspace: Workspace = None,
    store: NewStore = None,
    as_json: Json = False,
) -> None:
    """Go on with prompts by a decoder; keep the hidden states of all tokens, read and written.

    A killed generation is finished by the same command, and nothing is stored twice. The likeliest
    token comes next, or one that is drawn, with --temperature.
    """
