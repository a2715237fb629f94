"""Cloze texts as windows with one masked token, and words as the single token that stands there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.mlm.items import MASK
from bertvision.pipelines.tasks.special_tokens import require_fast
from bertvision.pipelines.tasks.windows import TEXTS_AT_ONCE, Windows


class Prompts(NamedTuple):
    """Texts as an encoder reads them."""

    windows: Windows
    """A window for each text that fits, in order."""
    masked: NDArray[np.int64]
    """(windows,) where in its window each mask stands."""
    fitting: NDArray[np.bool_]
    """(texts,) whether a text fits; the others have no window."""


def prompts(texts: Sequence[str], tokenizer: Any, longest: int) -> Prompts:
    """Tokenise texts that hold `MASK` once.

    Args:
        texts: at least one.
        tokenizer: of the encoder, a fast one.
        longest: most tokens of a window.

    Raises:
        InputError: the tokenizer is not a fast one, or knows no mask.
    """
    require_fast(tokenizer)
    if tokenizer.mask_token is None:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no mask token: take a checkpoint of "
            "a masked language model, such as google-bert/bert-base-uncased"
        )
    ids: list[list[int]] = []
    types: list[list[int]] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        # where spaces belong to tokens, the masked one has that before it
        masked = [
            before.rstrip(" ") + tokenizer.mask_token + after
            for before, after in (t.split(MASK) for t in texts[start : start + TEXTS_AT_ONCE])
        ]
        encoded = tokenizer(
            masked,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=True,
            verbose=False,
        )
        ids += encoded["input_ids"]
        types += encoded["token_type_ids"]
    if "token_type_ids" not in tokenizer.model_input_names:
        types = [[0] * len(of) for of in types]
    # a text that spells the tokenizer's own mask beside MASK has two
    places = [np.flatnonzero(np.array(of) == tokenizer.mask_token_id) for of in ids]
    fits = [len(of) <= longest and len(at) == 1 for of, at in zip(ids, places, strict=True)]
    used = [i for i, fitting in enumerate(fits) if fitting]
    tokens = [np.array(ids[i], np.int32) for i in used]
    empty = np.zeros(0, np.int32)
    joined = np.concatenate([empty, *tokens])
    windows = Windows(
        input_ids=joined,
        token_type_ids=np.concatenate([empty, *(types[i] for i in used)]).astype(np.uint8),
        offset_mapping=np.full((len(joined), 2), -1, np.int32),
        n_tokens=np.array([len(of) for of in tokens], np.int32),
        item_index=np.array(used, np.int32),
        labels={},
    )
    return Prompts(windows, np.array([int(places[i][0]) for i in used], np.int64), np.array(fits))


class Vocabulary:
    """The single token that a word is where a mask stands.

    That depends on what stands before it: a space belongs to the token of some tokenizers, and what
    goes on without one may be another token than the word alone, or part of a longer one.

    Args:
        tokenizer: of the encoder, a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, str], int | None] = {}

    def tokens(self, text: str, words: Iterable[str]) -> dict[str, int | None]:
        """The token of each word in the place of the mask of a text; None where it is not one.

        Args:
            text: with `MASK`.
            words: any.
        """
        before = text[: text.index(MASK)]
        # of what stands before a space the token of a word does not depend
        stem = "a " if before.endswith(" ") else before.split(" ")[-1]
        words = list(words)
        if new := [word for word in dict.fromkeys(words) if (stem, word) not in self._known]:
            start, *found = self._split([stem.rstrip(" "), *(stem + word for word in new)])
            for word, ids in zip(new, found, strict=True):
                single = len(ids) == len(start) + 1 and ids[:-1] == start
                known = single and ids[-1] != self._tokenizer.unk_token_id
                self._known[stem, word] = ids[-1] if known else None
        return {word: self._known[stem, word] for word in words}

    def _split(self, texts: list[str]) -> list[list[int]]:
        """The tokens of some texts alone; one that is spelled like a special token is none."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )
        found: list[list[int]] = encoded["input_ids"]
        return found
