"""From tokens to words: which word each token of a window is a piece of, by its characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int32]
NO_WORD = -1


def words_of_tokens(words: Sequence[str], offsets: Offsets) -> npt.NDArray[np.int64]:
    """The word that each token is a piece of.

    A token that begins with a space, as those of SentencePiece do, belongs to the word behind it.

    Args:
        words: of a sentence, which the encoder read with a space between them.
        offsets: (tokens, 2) characters [start, end) of each token; −1 −1 of special ones.

    Returns:
        (tokens,) index of the word; `NO_WORD` of special tokens and of what stands for a space
        alone.
    """
    text = " ".join(words)
    # of every character its word; of a space between two words the next character that is none
    lengths = np.array([len(word) + 1 for word in words])
    word_of = np.append(np.repeat(np.arange(len(words)), lengths)[: len(text)], NO_WORD)
    solid = np.array([not letter.isspace() for letter in text] + [True])
    position = np.where(solid, np.arange(len(solid)), len(text))
    following = np.minimum.accumulate(position[::-1])[::-1]
    start, end = offsets[:, 0].clip(0), offsets[:, 1]
    first = following[start]
    found: npt.NDArray[np.int64] = np.where(first < end, word_of[first], NO_WORD)
    return found


def is_cut(text: str, offsets: Offsets, max_length: int) -> bool:
    """Whether a window is full before its text ends.

    Args:
        text: of the sentence.
        offsets: (tokens, 2) characters of each token; −1 −1 of special ones.
        max_length: most tokens of a window.
    """
    return len(offsets) >= max_length and int(offsets[:, 1].max()) < len(text)
