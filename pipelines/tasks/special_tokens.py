"""Where a tokenizer puts special tokens around a text and a second one: its own template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Int32Array = npt.NDArray[np.int32]
_TEXT = "a"  # what a template is read from: any text that makes tokens


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A pair of texts as an encoder takes it: before, first text, between, second text, after.

    BERT's is ``[CLS] first [SEP] second [SEP]``, RoBERTa's ``<s> first </s></s> second </s>``. Each
    field holds (tokens, 2) vocabulary indices and token types.
    """

    before: Int32Array
    between: Int32Array
    after: Int32Array
    types: tuple[int, int]
    """Token types of the first and the second text."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Template:
        """The template of a fast tokenizer, read from what it makes of a pair.

        Raises:
            InputError: it is not a fast one, or makes no tokens.
        """
        require_fast(tokenizer)
        encoded = tokenizer(_TEXT, _TEXT, return_token_type_ids=True, verbose=False)
        has_types = "token_type_ids" in tokenizer.model_input_names
        types = np.array(encoded["token_type_ids"]) * has_types
        tokens = np.stack([np.array(encoded["input_ids"]), types], axis=1).astype(np.int32)
        sequence = np.array([-1 if s is None else s for s in encoded.sequence_ids(0)])
        first, second = np.flatnonzero(sequence == 0), np.flatnonzero(sequence == 1)
        if not len(first) or not len(second):
            raise InputError(
                f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r} makes no token of "
                f"{_TEXT!r}: it cannot make windows"
            )
        return cls(
            tokens[: first[0]],
            tokens[first[-1] + 1 : second[0]],
            tokens[second[-1] + 1 :],
            (int(types[first[0]]), int(types[second[0]])),
        )

    def __len__(self) -> int:
        """Special tokens of a pair."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Int32Array, second: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Vocabulary indices and token types of a pair, (tokens,) each.

        Args:
            first: (tokens,) vocabulary indices of the first text.
            second: likewise.
        """
        before, between, after = self.before.T, self.between.T, self.after.T
        ids = np.concatenate([before[0], first, between[0], second, after[0]])
        types = np.full(len(ids), self.types[0], np.int32)
        types[: len(self.before)] = before[1]
        begin = len(self.before) + len(first)
        types[begin : begin + len(self.between)] = between[1]
        end = len(ids) - len(self.after)
        types[begin + len(self.between) : end] = self.types[1]
        types[end:] = after[1]
        return ids, types


def special_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether the windows of a tokenizer begin, and whether they end, with a special token.

    Raises:
        InputError: it is not a fast one.
    """
    require_fast(tokenizer)
    encoded = tokenizer(_TEXT, return_special_tokens_mask=True, verbose=False)
    special = encoded["special_tokens_mask"]
    return bool(special[0]), bool(special[-1])


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot say which characters a token stands for.

    Raises:
        InputError: it is not a fast one.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r} cannot make windows: it "
            "must be a fast tokenizer (one with tokenizer.json)"
        )
