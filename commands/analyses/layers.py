"""What the layers of a snapshot are like."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.analyses.shared import runs_analysis
from bertvision.commands.options import MaxTokens


@runs_analysis
def isotropy(
    checkpoint: Annotated[str, typer.Argument(help="Snapshots to analyse, such as 0e,1e.")],
    split: Annotated[str, typer.Option(help="Split to analyse.")] = "dev",
    max_tokens: MaxTokens = 20_000,
) -> None:
    """Measure how tokens and [CLS] spread in each layer, and over which channels."""
