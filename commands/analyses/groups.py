"""Groups of texts, such as languages."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Csv, Json, Plot, Store, Workspace, runs_verb


@runs_verb
def languages(
    checkpoint: Annotated[str, typer.Argument(help="Snapshot to analyse.")],
    task: Annotated[
        str,
        typer.Option(help="Data sets that are the groups, such as mr,subj; or one with labels."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Where the data are, to be said once: a file, a folder or a data set on the hub."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Column of the texts (task csv; default text).")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of the groups (task csv; default label).")
    ] = None,
    pool: Annotated[
        str, typer.Option(help="Pooling of a text's tokens: cls, sep, mean or max.")
    ] = "mean",
    texts: Annotated[int, typer.Option(min=10, help="At most so many of each group.")] = 1_000,
    translations: Annotated[
        bool,
        typer.Option("--translations", help="The n-th texts of all groups say the same."),
    ] = False,
    precision: Annotated[
        str,
        typer.Option(help="Arithmetic: 32, bf16, or auto, which is bf16 where it is native."),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of samples, halves and clusters.")] = 0,
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Measure how far languages, or any groups of texts, lie apart in each layer.

    Of several data sets each is a group; of one, such as a file with a column of languages, its
    labels name the groups. Extracts what is missing; --data is needed the first time.
    """
