"""The scorers by name, and how they are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from bertvision.pipelines.options import Option, Options

ScorerName = Literal["cosine", "bilinear", "logistic", "mlp", "logistic-uv", "mlp-uv"]
SCORERS: tuple[ScorerName, ...] = get_args(ScorerName)
CROSS_ENCODER = "cross-encoder"
"""What is no scorer of stored states: the fine-tuned encoder itself, which reads both texts."""


@dataclass(frozen=True, kw_only=True)
class RankOptions(Options):
    """Settings of the training of scorers."""

    margin: Annotated[float, Option("Margin of the pairwise hinge loss.", gt=0)] = 1.0
    """By how much a positive passage must score above a negative one to cost nothing."""
    epochs: Annotated[int, Option("Most epochs of a training; the best on dev is kept.", ge=0)] = 30
    patience: Annotated[
        int, Option("Epochs without a better MAP on dev that end a training.", ge=1)
    ] = 5
    batch_size: Annotated[int, Option("Questions per step.", ge=1)] = 32
    lr: Annotated[float, Option("Learning rate of AdamW.", gt=0)] = 1e-3
    weight_decay: Annotated[float, Option("Weight decay of AdamW.", ge=0)] = 1e-2
