"""Loading a decoder whole: with its output layer, and the tokens that end its texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, PreTrainedModel

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.records import Provenance
from bertvision.pipelines.encoders.loading import (
    dimensions,
    find_pretrained,
    load_reported,
    load_tokenizer,
)
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.files import sha256_of_files


class LoadedDecoder(NamedTuple):
    """A decoder, ready to read prompts."""

    model: PreTrainedModel
    """With its output layer, in float32, on the CPU."""
    tokenizer: Any
    longest: int
    """Tokens that it takes."""
    stops: tuple[int, ...]
    """Tokens that end a text, ascending; none where nothing says which."""
    made_from: Provenance
    """What it is, as the store compares it."""


def load_decoder(name: str, revision: str | None = None) -> LoadedDecoder:
    """Load a decoder from a folder or the hub: safetensors alone, and none of its own code.

    Args:
        name: folder or hub name.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: there is none, its family cannot generate, or its weights lack a part.
    """
    found = find_pretrained(name, revision)
    tokenizer = load_tokenizer(found.folder)
    model, missing = load_reported(found.folder, AutoModelForCausalLM)
    if missing:
        raise InputError(
            f"the weights in {found.folder} lack {counted(len(missing), 'part')} of a decoder with "
            f"its output layer, such as {missing[0]}: they are those of a model that writes no "
            "text; take a checkpoint of a causal language model, such as openai-community/gpt2"
        )
    stops = _stops(model, tokenizer)
    return LoadedDecoder(
        model,
        tokenizer,
        dimensions(model.config, tokenizer).max_length,
        stops,
        {
            "model": found.name_or_path,
            "model_revision": found.revision,
            "weights_sha256": weights_digest(found.folder),
            "config_sha256": sha256_of_files([found.folder / "config.json"]),
            "stop_ids": ",".join(map(str, stops)),
        },
    )


def _stops(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text: those of the model, or else the tokenizer's."""
    settings = (getattr(model, "generation_config", None), model.config)
    for named in (*(getattr(of, "eos_token_id", None) for of in settings), tokenizer.eos_token_id):
        ids = named if isinstance(named, list) else [named]
        if known := sorted({i for i in ids if isinstance(i, int) and 0 <= i < len(tokenizer)}):
            return tuple(known)
    return ()
