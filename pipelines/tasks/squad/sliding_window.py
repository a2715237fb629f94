"""Where a context that is too long for a window is cut, and which windows hold the answer whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.tasks.squad.read import Question

Int32Array = npt.NDArray[np.int32]


class TextTokens(NamedTuple):
    """The tokens of a text, without special ones."""

    ids: Int32Array
    """(tokens,) vocabulary indices."""
    offsets: Int32Array
    """(tokens, 2) characters [start, end) of the text."""


class Piece(NamedTuple):
    """What a window of a question holds, counted in tokens."""

    item_index: int
    """Index of the question."""
    first: int
    """Context tokens [first, last)."""
    last: int
    begin: int
    """Where they begin in the window."""
    n_tokens: int
    """Tokens of the whole window."""
    start_position: int
    """First token of the answer in the window; 0 if it is not wholly there."""
    end_position: int


def cut(
    index: int,
    question: Question,
    context: TextTokens,
    *,
    room: int,
    begin: int,
    after: int,
    overlap: int,
) -> Iterator[Piece]:
    """The windows of one question, with labels.

    Args:
        index: of the question.
        question: with its answers.
        context: its tokens.
        room: most context tokens of a window.
        begin: where the context begins in a window.
        after: special tokens after it.
        overlap: context tokens that two consecutive windows share.
    """
    answer = _answer_tokens(question, context.offsets)
    first, n_context = 0, len(context.ids)
    while True:
        last = min(first + room, n_context)
        start = end = 0
        if answer is not None and first <= answer[0] and answer[1] < last:
            start, end = (token - first + begin for token in answer)
        yield Piece(index, first, last, begin, begin + last - first + after, start, end)
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
