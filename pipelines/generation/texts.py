"""What was generated, as text: the tokens of a split, read by the tokenizer that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writing.origin import tokenizer_digest
from bertvision.pipelines.encoders.hub import fetch
from bertvision.pipelines.encoders.loading import load_tokenizer
from bertvision.pipelines.generation.batch import FINISH_REASONS


class GeneratedText(NamedTuple):
    """A prompt and what follows, in words."""

    id: str
    """Key of the prompt."""
    prompt: str
    """With the special tokens that it was read with."""
    completion: str
    """Without special tokens."""
    finish_reason: str
    """See `FINISH_REASONS`."""
    example: int
    """Its position in the split."""


def generated_texts(split: ActivationSplit, tokenizer: str | None = None) -> list[GeneratedText]:
    """The texts of a split, in the order of the prompts.

    Args:
        split: that `bertvision generate` wrote, complete.
        tokenizer: folder or hub name; by default that of the decoder, where it was.

    Raises:
        InputError: the split was not generated, or the tokenizer is another one or gone.
        IncompleteSplitError: it is not complete.
    """
    split.require_complete()
    if "generated" not in split.record.arrays or "finish_reason" not in split.labels:
        raise InputError(f"{split.name} was not written by `bertvision generate`: it has no texts")
    reader, order = _tokenizer(split, tokenizer), np.argsort(split.labels["prompt"])
    return list(_texts(split, reader, order.tolist()))


def _tokenizer(split: ActivationSplit, given: str | None) -> Any:
    made_from = split.record.provenance
    name, revision = given, None
    if name is None:
        name, revision = str(made_from.get("model")), made_from.get("model_revision")
    local = Path(name).expanduser()
    found = local if local.is_dir() else fetch(name, None if revision is None else str(revision))
    tokenizer = load_tokenizer(found)
    if tokenizer_digest(tokenizer) != made_from.get("tokenizer_sha256"):
        raise InputError(
            f"the tokenizer of {name} is not the one that {split.name} was made with: name the "
            "folder of that one with --tokenizer"
        )
    return tokenizer


def _texts(split: ActivationSplit, tokenizer: Any, order: list[int]) -> Iterator[GeneratedText]:
    ids, generated = split.array("input_ids"), split.array("generated")
    keys, plan = split.table()["id"].to_pylist(), split.plan
    for example in order:
        begin = int(plan.first_token[example])
        span = slice(begin, begin + int(plan.n_tokens[example]))
        tokens, new = ids[span], generated[span] == 1
        whole, before = (
            tokenizer.decode(of, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for of in (tokens, tokens[~new])
        )
        if whole.startswith(before):  # a decoder of pieces drops the space in front of the first
            completion = whole[len(before) :]
        else:  # the prompt ends within a character
            completion = tokenizer.decode(tokens[new], skip_special_tokens=True)
        yield GeneratedText(
            keys[int(plan.example_id[example])],
            tokenizer.decode(tokens[~new], clean_up_tokenization_spaces=False),
            completion,
            FINISH_REASONS[int(split.labels["finish_reason"][example])],
            example,
        )
