"""The scorers by name, and how the trained one is trained and its uncertainty found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from bertvision.pipelines.options import Option, Options

ScorerName = Literal["cosine", "trained"]
SCORERS: tuple[ScorerName, ...] = get_args(ScorerName)


@dataclass(frozen=True, kw_only=True)
class SimilarityOptions(Options):
    """Settings of the trained scorer, and of the intervals of all."""

    seeds: Annotated[int, Option("How many times the trained scorer is trained.", ge=1)] = 3
    epochs: Annotated[int, Option("Most epochs of a training; the best on dev is kept.", ge=1)] = (
        100
    )
    patience: Annotated[
        int, Option("Epochs without a better dev score that end a training.", ge=1)
    ] = 10
    batch_size: Annotated[int, Option("Pairs per step.", ge=1)] = 64
    lr: Annotated[float, Option("Learning rate of AdamW.", gt=0)] = 1e-3
    weight_decay: Annotated[float, Option("Weight decay of AdamW.", ge=0)] = 1e-2
    dev_fraction: Annotated[float, Option(gt=0, lt=1)] = 0.1
    """Part of the training pairs that is held out where the data have no dev to choose on."""
    resamples: Annotated[int, Option("How often the bootstrap draws, for intervals.", ge=1)] = 1000
