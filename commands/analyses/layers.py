"""What the layers of a snapshot are like."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.analyses.shared import runs_analysis
from bertvision.commands.options import MaxTokens

_Checkpoint = Annotated[str, typer.Argument(help="Snapshots to analyse, such as 0e,1e.")]
_Split = Annotated[str, typer.Option(help="Split to analyse.")]


@runs_analysis
def isotropy(
    checkpoint: _Checkpoint,
    split: _Split = "dev",
    max_tokens: MaxTokens = 20_000,
) -> None:
    """Measure how tokens and [CLS] spread in each layer, and over which channels."""


@runs_analysis
def context(
    checkpoint: _Checkpoint,
    split: _Split = "dev",
    tokens: Annotated[
        int, typer.Option(min=10, help="Uses of words that are sampled, and tokens of windows.")
    ] = 5_000,
    uses: Annotated[int, typer.Option(min=2, help="Uses of a word, at most.")] = 20,
) -> None:
    """Measure how much of a token's state is its word, and how much its context."""
