"""Offline analyses of stored activations."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.analyses.shared import runs_analysis
from bertvision.commands.options import MaxTokens

_First = Annotated[str, typer.Argument(help="Snapshot of the rows.")]
_Second = Annotated[str, typer.Argument(help="Snapshot of the columns; may be the same.")]


@runs_analysis
def cka(
    first: _First,
    second: _Second,
    split: Annotated[str, typer.Option(help="Split that both have.")] = "dev",
    max_tokens: MaxTokens = 20_000,
    biased: Annotated[bool, typer.Option("--biased", help="Use the biased estimator.")] = False,
) -> None:
    """Measure how alike the layers of two snapshots are, by linear CKA."""


@runs_analysis
def rsa(
    first: _First,
    second: _Second,
    split: Annotated[
        str, typer.Option(help="Split that both have; several side by side, such as dev,mpqa-test.")
    ] = "dev",
    tokens: Annotated[int, typer.Option(min=3, help="Tokens of a sample.")] = 5_000,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each split.")] = 10,
) -> None:
    """Measure how alike tokens lie to each other in two snapshots, by RSA of sampled tokens."""


@runs_analysis
def isotropy(
    checkpoint: Annotated[str, typer.Argument(help="Snapshot to analyse.")],
    split: Annotated[str, typer.Option(help="Split to analyse.")] = "dev",
    max_tokens: MaxTokens = 100_000,
) -> None:
    """Measure the isotropy of each layer: mean cosine, explained variance, outlier channels."""
