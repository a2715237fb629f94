"""Windows: a question over a context, cut into inputs that BERT can take.

``[CLS] question [SEP] part of the context [SEP]``, without padding. A context that does not fit is
cut into consecutive windows that share ``overlap`` tokens, so that an answer near a cut is whole,
with some of its surroundings, in one of them (Devlin et al. 2019, arXiv:1810.04805; run_squad.py of
google-research/bert names the step between windows instead, its `doc_stride`).

All windows of a split are kept ragged: concatenated, with the number of tokens of each. Lengths are
thus known before BERT runs, which is what the shards of a store are planned from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.tasks.squad import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
_BATCH = 1024  # texts per call of the tokenizer: bounds the memory its Python lists take

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """All windows of a split, concatenated; window w has tokens first_token[w] + [0, n_tokens[w]).

    The windows of a question are consecutive and in the order of the context.
    """

    input_ids: Int32Array
    """(tokens,) vocabulary indices."""
    token_type_ids: npt.NDArray[np.uint8]
    """(tokens,) 0 up to and including the first [SEP], then 1."""
    offset_mapping: Int32Array
    """(tokens, 2) characters [start, end) of the context; −1 −1 for tokens not of the context."""
    n_tokens: Int32Array
    """(windows,)"""
    question_index: Int32Array
    """(windows,) index into the questions that the windows were made from."""
    start_positions: Int32Array
    """(windows,) first token of the first gold answer, counted inside the window; 0, the [CLS], if
    there is none or it is not wholly in this window."""
    end_positions: Int32Array
    """(windows,) its last token (inclusive), or 0."""

    @property
    def first_token(self) -> npt.NDArray[np.int64]:
        """(windows,) where each window begins in the concatenated arrays."""
        ends = np.cumsum(self.n_tokens, dtype=np.int64)
        return ends - self.n_tokens

    def __len__(self) -> int:
        return len(self.n_tokens)


def make_windows(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 386,
    max_question_length: int = 64,
    overlap: int = 128,
) -> Windows:
    """Tokenise questions and contexts and cut them into windows.

    Args:
        questions: whose windows to make.
        tokenizer: a fast (Rust) tokenizer of a BERT checkpoint.
        max_length: most tokens of a window, special tokens included.
        max_question_length: most tokens of a question; what is beyond is cut off.
        overlap: context tokens that two consecutive windows share.

    Returns:
        The windows, by question. Every context token is in at least one window; the last window of
        a question ends at the last token; an empty context makes one window.

    Raises:
        InputError: the lengths leave no room for a context, or the tokenizer is not a fast one or
            has no [CLS] and [SEP].
    """
    if max_question_length < 1 or overlap < 0:
        raise InputError(
            f"max_question_length is {max_question_length} and overlap {overlap}: give a question "
            "length of at least 1 and an overlap of at least 0 tokens"
        )
    capacity = max_length - max_question_length - _SPECIAL_TOKENS
    if capacity - overlap < 1:
        raise InputError(
            f"windows of max_length {max_length} hold, beside max_question_length "
            f"{max_question_length} and {_SPECIAL_TOKENS} special tokens, {capacity} tokens of the "
            f"context, which must be more than the overlap of {overlap}: raise max_length or lower "
            "max_question_length or overlap"
        )
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    if not tokenizer.is_fast or not isinstance(cls, int) or not isinstance(sep, int):
        raise InputError(
            f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r} cannot make windows: it "
            "must be a fast tokenizer (one with tokenizer.json) that has [CLS] and [SEP]"
        )

    distinct = list(dict.fromkeys(q.context for q in questions))
    contexts = dict(zip(distinct, _tokenise(distinct, tokenizer), strict=True))
    texts = [q.question for q in questions]
    question_ids = [tokens.ids[:max_question_length] for tokens in _tokenise(texts, tokenizer)]
    pieces = [
        piece
        for i, (question, ids) in enumerate(zip(questions, question_ids, strict=True))
        for piece in _cut(i, question, contexts[question.context], len(ids), max_length, overlap)
    ]

    n_tokens = np.array([p.n_tokens for p in pieces], np.int32)
    total = int(n_tokens.sum(dtype=np.int64))
    input_ids = np.full(total, sep, np.int32)
    token_type_ids = np.zeros(total, np.uint8)
    offset_mapping = np.full((total, 2), -1, np.int32)
    at = 0
    for piece in pieces:
        question, ids = questions[piece.question_index], question_ids[piece.question_index]
        tokens = contexts[question.context]
        begin, end = at + len(ids) + 2, at + piece.n_tokens - 1
        input_ids[at] = cls
        input_ids[at + 1 : begin - 1] = ids
        input_ids[begin:end] = tokens.ids[piece.first : piece.last]
        offset_mapping[begin:end] = tokens.offsets[piece.first : piece.last]
        token_type_ids[begin : end + 1] = 1
        at += piece.n_tokens
    return Windows(
        input_ids=input_ids,
        token_type_ids=token_type_ids,
        offset_mapping=offset_mapping,
        n_tokens=n_tokens,
        question_index=np.array([p.question_index for p in pieces], np.int32),
        start_positions=np.array([p.start_position for p in pieces], np.int32),
        end_positions=np.array([p.end_position for p in pieces], np.int32),
    )


class _Tokens(NamedTuple):
    ids: Int32Array  # (tokens,)
    offsets: Int32Array  # (tokens, 2)


class _Piece(NamedTuple):
    question_index: int
    first: int  # context tokens [first, last)
    last: int
    n_tokens: int
    start_position: int
    end_position: int


def _tokenise(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[_Tokens]:
    for i in range(0, len(texts), _BATCH):
        encoded = tokenizer(
            list(texts[i : i + _BATCH]),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            split_special_tokens=True,  # "[SEP]" written in a context is text
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,  # no warning about contexts longer than the model: that is what we cut
        )
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield _Tokens(np.array(ids, np.int32), np.array(offsets, np.int32).reshape(-1, 2))


def _cut(
    index: int, question: Question, context: _Tokens, n_question: int, max_length: int, overlap: int
) -> Iterator[_Piece]:
    """The windows of one question, with labels."""
    capacity = max_length - n_question - _SPECIAL_TOKENS
    answer = _answer_tokens(question, context.offsets)
    first, n_context = 0, len(context.ids)
    while True:
        last = min(first + capacity, n_context)
        start = end = 0
        if answer is not None and first <= answer[0] and answer[1] < last:
            shift = n_question + 2 - first
            start, end = answer[0] + shift, answer[1] + shift
        yield _Piece(index, first, last, n_question + last - first + _SPECIAL_TOKENS, start, end)
        if last == n_context:
            return
        first = last - overlap


def _answer_tokens(question: Question, offsets: Int32Array) -> tuple[int, int] | None:
    """First and last (inclusive) context token that share a character with the first answer."""
    if not question.answers:
        return None
    text, begin = question.answers[0]
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], begin + len(text), side="left")) - 1
    # The tokenizer may drop every character of an answer (control characters): then no token has it
    return (first, last) if first <= last else None
