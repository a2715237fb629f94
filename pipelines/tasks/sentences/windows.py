"""Sentences and pairs of sentences as windows, one each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.special_tokens import require_fast
from bertvision.pipelines.tasks.windows import TEXTS_AT_ONCE, Int32Array, Windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sentence_windows(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, *, max_length: int = 128
) -> Windows:
    """Tokenise sentences, or pairs of them, a window each.

    Args:
        sentences: in the order of the data.
        tokenizer: a fast (Rust) tokenizer, whose template places the special tokens.
        max_length: most tokens of a window, special tokens included. What is beyond is cut off, of
            a pair from the longer sentence first.

    Returns:
        The windows, with ``labels["label"]``: int32 classes, or float32 where a label is a float.

    Raises:
        InputError: ``max_length`` leaves no room for a text, a sentence makes no token at all, or
            the tokenizer is not a fast one.
    """
    require_fast(tokenizer)
    special = tokenizer.num_special_tokens_to_add(pair=any(s.pair is not None for s in sentences))
    if max_length < special + 2:
        raise InputError(
            f"windows of max_length {max_length} leave no room for a text beside {special} special "
            f"tokens: give at least {special + 2}"
        )
    encodings = list(_encode(sentences, tokenizer, max_length))
    for sentence, encoding in zip(sentences, encodings, strict=True):
        if not len(encoding.ids):
            raise InputError(
                f"sentence {sentence.id!r} ({sentence.text!r}) makes no token, and the tokenizer "
                "adds no special one: leave it out of the data"
            )
    return Windows(
        input_ids=_joined([e.ids for e in encodings]),
        token_type_ids=_joined([e.types for e in encodings]).astype(np.uint8),
        offset_mapping=_joined([e.offsets for e in encodings], (0, 2)),
        n_tokens=np.array([len(e.ids) for e in encodings], np.int32),
        item_index=np.arange(len(sentences), dtype=np.int32),
        labels={"label": _label_array([sentence.label for sentence in sentences])},
    )


class _Encoding(NamedTuple):
    ids: Int32Array  # (tokens,)
    types: Int32Array  # (tokens,)
    offsets: Int32Array  # (tokens, 2)


def _encode(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[_Encoding]:
    """Each sentence or pair as the tokenizer's template has it, in order."""
    has_types = "token_type_ids" in tokenizer.model_input_names
    for start in range(0, len(sentences), TEXTS_AT_ONCE):
        batch = sentences[start : start + TEXTS_AT_ONCE]
        for pair, run in groupby(batch, key=lambda sentence: sentence.pair is not None):
            group = list(run)
            encoded = tokenizer(
                [sentence.text for sentence in group],
                [sentence.pair or "" for sentence in group] if pair else None,
                padding=False,
                truncation="longest_first",
                max_length=max_length,
                split_special_tokens=True,
                return_attention_mask=False,
                return_token_type_ids=True,
                return_special_tokens_mask=True,
                return_offsets_mapping=True,
                verbose=False,
            )
            for i, ids in enumerate(encoded["input_ids"]):
                offsets = np.array(encoded["offset_mapping"][i], np.int32).reshape(-1, 2)
                offsets[np.array(encoded["special_tokens_mask"][i], bool)] = -1
                types = np.array(encoded["token_type_ids"][i], np.int32) * has_types
                yield _Encoding(np.array(ids, np.int32), types, offsets)


def _joined(parts: list[Int32Array], empty: tuple[int, ...] = (0,)) -> Int32Array:
    return np.concatenate(parts) if parts else np.zeros(empty, np.int32)


def _label_array(labels: Sequence[int | float | None]) -> npt.NDArray[Any]:
    if any(isinstance(label, float) for label in labels):
        return np.array([np.nan if label is None else label for label in labels], np.float32)
    return np.array([-1 if label is None else label for label in labels], np.int32)
