"""The tokens that a page shows: a seeded sample of whole examples, their states and their texts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

CONTEXT = 12
"""Tokens shown on either side of one that is named."""
_TITLES = ("question", "text", "context", "id")
_LONGEST = 80


class Sample(NamedTuple):
    """Examples of a split, whole, and the states of their tokens."""

    split: ActivationSplit
    examples: Ints
    """(examples,) positions in the split, ascending."""
    lengths: Ints
    """(examples,) tokens of each."""
    states: Floats
    """(tokens, layers, hidden), examples one after another."""
    places: list[int] | None
    """(tokens,) place of each in what the model read; None where that is its place among them."""


def drawn_examples(lengths: npt.NDArray[np.integer], most: int, seed: int) -> Ints:
    """Examples that have so many tokens together at most: all, or a seeded choice of whole ones.

    Args:
        lengths: (examples,) tokens of each.
        most: Largest number of tokens.
        seed: Seed of the choice.

    Returns:
        (n,) positions, ascending; examples with more than ``most`` tokens are not among them.

    Raises:
        InputError: every example has more tokens.
    """
    order = np.arange(len(lengths))
    if lengths.sum() > most:
        order = np.random.default_rng(seed).permutation(order)
        order = order[lengths[order] <= most]
        order = np.sort(order[np.cumsum(lengths[order], dtype=np.int64) <= most])
    if not len(order):
        raise InputError(
            f"--max-tokens {most}: the shortest example has {lengths.min()} tokens, and examples "
            f"are shown whole; give {lengths.min()} or more"
        )
    return order.astype(np.int64)


def read_sample(split: ActivationSplit, most: int, seed: int) -> Sample:
    """Draw examples and read the states of all their layers.

    Args:
        split: Split that is whole.
        most: Largest number of tokens.
        seed: Seed of the choice.

    Raises:
        InputError: every example has more tokens, or the tokens were shuffled.
        CorruptStoreError: what is stored is damaged.
    """
    lengths = split.plan.n_tokens.astype(np.int64)
    examples = drawn_examples(lengths, most, seed)
    states: Floats = split.read(examples).hidden_states.numpy()
    places = None
    if split.keep is not None:
        places = np.concatenate([split.positions(i) for i in examples.tolist()]).tolist()
    return Sample(split, examples, lengths[examples], states, places)


class TokenNames:
    """Names of a split's tokens: pieces of words, or the texts that they stand for.

    A name has a space in front where it does not continue the word before.

    Args:
        split: Split of all tokens, or of a pooling of them, whose vectors have the examples' names.
        tokenizer: Tokenizer of its encoder; without one the names are the texts of the split.

    Attributes:
        split: As given.
        tokenizer: As given.

    Raises:
        CorruptStoreError: the table or an array of the split is damaged.
    """

    def __init__(self, split: ActivationSplit, tokenizer: Any | None) -> None:
        self.split, self.tokenizer = split, tokenizer
        arrays = split.record.arrays
        self.pooled = split.record.provenance.get("tokens", "all") != "all"
        self._ids = split.array("input_ids") if "input_ids" in arrays else None
        # of windows that hold several documents, or a part of one: the row of each token
        self._text_row = split.array("text_row") if "text_row" in arrays else None
        self._table = split.table()
        names = self._table.column_names
        self._title = next((name for name in _TITLES if name in names), None)
        self._known: dict[int, str] = {}
        if tokenizer is not None:
            vocabulary = tokenizer.get_vocab()
            begins = sum(piece.startswith(("Ġ", "▁")) for piece in vocabulary)
            self._marks_beginnings = begins > len(vocabulary) / 100
            self._special = set(tokenizer.all_special_ids)

    def title(self, example: int) -> str:
        """The beginning of an example's question or text."""
        row = int(self.split.table_rows[example])
        if self._text_row is not None:
            row = int(self._text_row[self.split.plan.first_token[example]])
        if self._title is None or row >= self._table.num_rows:
            return f"example {example}"
        text = " ".join(str(self._table.column(self._title)[row].as_py()).split())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"

    def of(self, example: int) -> list[str]:
        """The names of the tokens of an example, (seq,) strings."""
        plan = self.split.plan
        if self.pooled:
            return [f" {self.title(example)}"]
        begin, n = int(plan.first_token[example]), int(plan.n_tokens[example])
        if self.tokenizer is not None and self._ids is not None:
            return [self.word(number) for number in self._ids[begin : begin + n].tolist()]
        try:
            return [f" {text or '·'}" for text in self.split.text(example)]
        except InputError:  # a split that a program wrote, without texts
            return [f" {position}" for position in range(n)]

    def word(self, number: int) -> str:
        """The name of an entry of the tokenizer's vocabulary, wherever it stands.

        Args:
            number: Its index; one that has no piece is called by that.
        """
        if number not in self._known:
            piece = self.tokenizer.convert_ids_to_tokens(number)  # type: ignore[union-attr]
            text = self.tokenizer.decode([number]).strip()  # type: ignore[union-attr]
            if piece is None:
                name = f" #{number}"
            elif number in self._special:
                name = f" {piece}"
            elif piece.startswith("##") and len(piece) > 2 and not self._marks_beginnings:
                name = piece[2:]
            else:
                begins = not self._marks_beginnings or piece.startswith(("Ġ", "▁"))
                name = " " * begins + (text or piece)
            self._known[number] = name
        return self._known[number]

    def context(self, example: int, position: int) -> tuple[str, str, str]:
        """A token with the text before and after it.

        Args:
            example: Position of the example in the split.
            position: Place of the token in it.

        Returns:
            The text before, the token, the text after; of a pooled split the example alone.
        """
        names = self.of(example)
        gaps = np.flatnonzero(np.diff(self.split.positions(example)) > 1) + 1
        pieces = list(names)
        for first in gaps.tolist():
            pieces[first] = f" … {names[first].lstrip()}"
        begin, end = max(0, position - CONTEXT), position + CONTEXT + 1
        before, after = "".join(pieces[begin:position]), "".join(pieces[position + 1 : end])
        name = names[position]
        before += " …" * (position in gaps)
        space = " " * (name[:1] == " ")
        left, right = "… " * (begin > 0), " …" * (end < len(names))
        return f"{left}{before.lstrip()}{space}", name.strip(), f"{after}{right}"
