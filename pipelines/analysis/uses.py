"""Tokens that are uses of a word: words of a single piece, known by the ids that are stored.

A word that the tokenizer cuts into pieces has no state of its own, so it is left out, and counted.
A use in surroundings that were there before, as of a paragraph that several questions are asked
of, is no other use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError

Rows = NDArray[np.int64]
MARKERS = ("Ġ", "▁")
"""Prefixes of tokens that begin a word, where the tokenizer marks these and not the others."""
NO_LETTER = "\N{REPLACEMENT CHARACTER}"
"""Reading of a token that is a part of the bytes of a letter."""
SURROUNDINGS = 8
"""Tokens on either side by which two uses are known to be of the same text."""
CONTEXTS = 5
"""Uses that a word must have, as in Ethayarajh (2019)."""


class Vocabulary(NamedTuple):
    """Kinds of the ids of a tokenizer.

    Attributes:
        special: (ids,) whether a token is special, or not known.
        begins: (ids,) whether it begins a word, with a letter or a digit in it.
        goes_on: (ids,) whether it continues the word before it.
    """

    special: NDArray[np.bool_]
    begins: NDArray[np.bool_]
    goes_on: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Kinds of the ids of a tokenizer.

        Args:
            tokenizer: a fast one.

        Raises:
            InputError: it marks neither tokens that begin a word nor those that continue one.
        """
        n = len(tokenizer)
        tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(range(n))]
        special = np.isin(np.arange(n), tokenizer.all_special_ids)
        read = tokenizer.backend_tokenizer.decode_batch(
            [[i] for i in range(n)], skip_special_tokens=False
        )
        texts = [text.strip().lstrip("".join(MARKERS)) for text in read]
        solid = np.array([any(letter.isalnum() for letter in text) for text in texts])
        prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
        if prefix and any(token.startswith(prefix) for token in tokens):
            goes_on = np.array([token.startswith(prefix) for token in tokens])
            return cls(special, solid & ~goes_on & ~special, goes_on & ~special)
        marked = np.array([token.startswith(MARKERS) for token in tokens])
        if not marked.any():
            raise InputError(
                "the tokenizer marks neither tokens that begin a word (Ġ, ▁) nor those that go on "
                "with one (##), so that words cannot be told: take an encoder whose tokenizer does"
            )
        goes_on = np.array([text[:1].isalnum() or text[:1] == NO_LETTER for text in texts])
        return cls(special, solid & marked & ~special, goes_on & ~marked & ~special)


class Uses(NamedTuple):
    """Tokens that are uses of words.

    Attributes:
        groups: for each word the rows of its sampled uses.
        random: as many groups of as many rows, each a use of any word.
        n_special: tokens that are special.
        n_pieces: tokens that are pieces of words.
        n_marks: tokens without a letter or a digit.
        n_repeated: uses in surroundings that were there before.
        n_rare: uses of words with fewer than `CONTEXTS` others.
        n_words: words with enough uses, sampled or not.
    """

    groups: list[Rows]
    random: list[Rows]
    n_special: int
    n_pieces: int
    n_marks: int
    n_repeated: int
    n_rare: int
    n_words: int


def sample_uses(
    ids: NDArray[np.integer[Any]],
    lengths: Rows,
    vocabulary: Vocabulary,
    *,
    most: int,
    of_word: int,
    seed: int,
) -> Uses:
    """A sample of uses of words that have `CONTEXTS` or more.

    Words are drawn at random, then uses of each, until there are as many as asked for. The random
    groups are drawn from all uses of all words of one piece, each once.

    Args:
        ids: (tokens,) of windows behind one another.
        lengths: (windows,) tokens of each window.
        vocabulary: Vocabulary of the ids.
        most: uses of all words together.
        of_word: uses of a word.
        seed: Seed of the sample.

    Raises:
        InputError: no word has enough uses.
    """
    window = np.repeat(np.arange(len(lengths)), lengths)
    special, goes_on = vocabulary.special[ids], vocabulary.goes_on[ids]
    # a token that is followed by the rest of its word is a piece of it
    cut = np.append(goes_on[1:] & (window[1:] == window[:-1]), False)
    pieces = ~special & (goes_on | cut)
    single = vocabulary.begins[ids] & ~pieces
    rows = np.flatnonzero(single)
    _, once = np.unique(_surroundings(ids, window, rows), return_index=True)
    fresh = rows[np.sort(once)]
    words, word, counts = np.unique(ids[fresh], return_inverse=True, return_counts=True)
    frequent = np.flatnonzero(counts >= CONTEXTS)
    random = np.random.default_rng(seed)
    groups = _groups(fresh, word, random.permutation(frequent), counts, most, of_word, random)
    if not groups:
        raise InputError(
            f"no word of one piece has {CONTEXTS} uses among {len(ids):,} tokens, as many as "
            "--tokens allows: take a split of more text, or more --tokens"
        )
    sizes = [len(group) for group in groups]
    drawn = random.choice(fresh, sum(sizes), replace=False)
    return Uses(
        groups,
        np.split(drawn, np.cumsum(sizes)[:-1]),
        n_special=int(special.sum()),
        n_pieces=int(pieces.sum()),
        n_marks=int((~special & ~pieces & ~single).sum()),
        n_repeated=len(rows) - len(fresh),
        n_rare=int(counts[counts < CONTEXTS].sum()),
        n_words=len(frequent),
    )


def _groups(
    rows: Rows,
    word: Rows,
    order: Rows,
    counts: Rows,
    most: int,
    of_word: int,
    random: np.random.Generator,
) -> list[Rows]:
    """Uses of words in an order, as many as there may be, ascending."""
    by_word = np.argsort(word, kind="stable")
    starts = np.cumsum(counts) - counts
    groups: list[Rows] = []
    left = most
    for k in order.tolist():
        n = min(of_word, int(counts[k]))
        if n > left:
            break
        uses = rows[by_word[starts[k] : starts[k] + counts[k]]]
        groups.append(np.sort(random.choice(uses, n, replace=False)))
        left -= n
    return groups


def _surroundings(ids: NDArray[np.integer[Any]], window: Rows, rows: Rows) -> NDArray[np.uint64]:
    """(rows,) a number that is the same where a token and those around it are."""
    hashes = np.zeros(len(rows), np.uint64)
    for step in range(-SURROUNDINGS, SURROUNDINGS + 1):
        at = (rows + step).clip(0, len(ids) - 1)
        inside = (rows + step == at) & (window[at] == window[rows])
        id_ = np.where(inside, ids[at].astype(np.int64) + 1, 0).astype(np.uint64)
        hashes = (
            hashes * np.uint64(0x9E3779B97F4A7C15) + id_
        )  # wraps around; odd, so it loses nothing
    return hashes


def sample_windows(special: NDArray[np.bool_], lengths: Rows, most: int, seed: int) -> list[Rows]:
    """The tokens of windows at random, without special ones, as many windows as hold ``most``.

    Args:
        special: (tokens,) of windows behind one another.
        lengths: (windows,) tokens of each window.
        most: tokens of all together; one window there is in any case.
        seed: Seed of the sample.
    """
    ends = np.cumsum(lengths)
    samples: list[Rows] = []
    left = most
    for k in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        rows = np.arange(ends[k] - lengths[k], ends[k])
        rows = rows[~special[rows]]
        if len(rows) < 2:
            continue
        if len(rows) > left and samples:
            break
        samples.append(rows)
        left -= len(rows)
    return samples


def sample_positions(lengths: Rows, positions: Sequence[int], most: int, seed: int) -> list[Rows]:
    """For each position the tokens that stand there, of as many windows at random as are asked for.

    Args:
        lengths: (windows,) tokens of each window.
        positions: counted from the beginning of a window.
        most: windows.
        seed: Seed of the sample.
    """
    starts = np.cumsum(lengths) - lengths
    order = np.random.default_rng(seed).permutation(len(lengths))
    long = ((position, order[lengths[order] > position][:most]) for position in positions)
    return [np.sort(starts[windows] + position) for position, windows in long]
