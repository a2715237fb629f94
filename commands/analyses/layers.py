"""What the layers of a snapshot are like."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.analyses.shared import runs_analysis
from bertvision.commands.options import MaxTokens


@runs_analysis
def isotropy(
    checkpoint: Annotated[str, typer.Argument(help="Snapshot to analyse.")],
    split: Annotated[str, typer.Option(help="Split to analyse.")] = "dev",
    max_tokens: MaxTokens = 100_000,
) -> None:
    """Measure the isotropy of each layer: mean cosine, explained variance, outlier channels."""
