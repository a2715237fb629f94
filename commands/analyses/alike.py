"""How alike the layers of two snapshots are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.analyses.shared import runs_analysis
from bertvision.commands.options import MaxTokens

_First = Annotated[str, typer.Argument(help="Snapshot of the rows.")]
_Second = Annotated[str, typer.Argument(help="Snapshot of the columns; may be the same.")]


_OfBoth = Annotated[str, typer.Option(help="Split that both have.")]
_Beside = Annotated[
    Path | None,
    typer.Option("--with", help="Workspace with the second snapshot, of the same data."),
]


@runs_analysis
def cka(
    first: _First,
    second: _Second,
    split: _OfBoth = "dev",
    beside: _Beside = None,
    max_tokens: MaxTokens = 20_000,
    biased: Annotated[bool, typer.Option("--biased", help="Use the biased estimator.")] = False,
) -> None:
    """Measure how alike the layers of two snapshots are, by linear CKA."""


@runs_analysis
def cca(
    first: _First,
    second: _Second,
    split: _OfBoth = "dev",
    beside: _Beside = None,
    max_tokens: MaxTokens = 20_000,
    keep: Annotated[
        float, typer.Option(help="Share of the variance whose directions SVCCA takes.")
    ] = 0.99,
    ridge: Annotated[
        float,
        typer.Option(help="Part of the channels' mean variance that is added to each direction."),
    ] = 1e-6,
) -> None:
    """Measure what the layers of two snapshots hold of each other, by SVCCA and PWCCA."""


@runs_analysis
def rsa(
    first: _First,
    second: _Second,
    split: Annotated[
        str, typer.Option(help="Split that both have; several side by side, such as dev,mpqa-all.")
    ] = "dev",
    max_tokens: Annotated[
        int, typer.Option(min=3, help="Seeded sample of at most so many tokens.")
    ] = 5_000,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each split.")] = 10,
    tokens: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure how alike tokens lie to each other in two snapshots, by RSA of sampled tokens."""
