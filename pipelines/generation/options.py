"""Options of ``bertvision generate``: the choice of tokens, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bertvision.featurestore.format.layout import ENCODINGS, EncodingName
from bertvision.pipelines.options import Option, Options, PrecisionName


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """Options of ``bertvision generate``."""

    max_new_tokens: Annotated[
        int, Option("Largest number of tokens generated for a prompt.", ge=1)
    ] = 128
    temperature: Annotated[
        float,
        Option("Divisor of logits before a token is drawn; 0 takes the likeliest.", ge=0),
    ] = 0.0
    top_p: Annotated[
        float | None,
        Option(
            "Draw from the likeliest tokens alone, as many as have this probability together; by "
            "default as generation_config.json of the model says, or from all.",
            gt=0,
            le=1,
        ),
    ] = None
    seed: Annotated[
        int, Option("Seed of what is drawn; every prompt has its own draws.", ge=0, lt=1 << 63)
    ] = 0
    date: Annotated[
        str | None,
        Option(
            "Date, as 2024-07-26, for a chat template that writes it (task chat); by default the "
            "day on which the split is begun."
        ),
    ] = None
    batch_size: Annotated[int, Option("Prompts that are continued together.", ge=1)] = 16
    layers: Annotated[
        tuple[int, ...] | None,
        Option("Indices of the hidden states to keep, such as 0,6,-1, or all."),
    ] = None
    sites: Annotated[
        tuple[str, ...] | None,
        Option(
            "Keep sites inside the layers instead, by name or pattern, such as "
            "'blocks.*.hook_mlp_out' (docs/sites.md)."
        ),
    ] = None
    encoding: Annotated[EncodingName, Option(f"{', '.join(ENCODINGS)}.")] = "int8"
    permute: Annotated[
        int | None, Option("Seed of a stored order that mixes neighbours.", ge=0)
    ] = None
    precision: Annotated[
        PrecisionName, Option("Arithmetic: 32, bf16, or auto, which is bf16 where it is native.")
    ] = "auto"
