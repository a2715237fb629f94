"""Windows: texts as the inputs that an encoder takes, without padding.

All windows of a split are kept ragged: concatenated, with the number of tokens of each. Lengths are
thus known before the encoder runs, which is what the shards of a store are planned from. How a
question over a long context becomes several windows is in `squad.windows`; a sentence, or a pair of
them, is one (`sentences.windows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

TEXTS_AT_ONCE = 1024
"""Texts per call of a tokenizer: bounds the memory that its Python lists take."""

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """All windows of a split, concatenated; window w has tokens first_token[w] + [0, n_tokens[w]).

    The windows of an item are consecutive; of a question, in the order of the context.
    """

    input_ids: Int32Array
    """(tokens,) vocabulary indices."""
    token_type_ids: npt.NDArray[np.uint8]
    """(tokens,) as the tokenizer gives them: to BERT 0 up to and including the first [SEP], then
    1; 0 throughout where it has none."""
    offset_mapping: Int32Array
    """(tokens, 2) characters [start, end) of the context, or of the sentence that the token is of;
    −1 −1 for special tokens, and for those of a question."""
    n_tokens: Int32Array
    """(windows,)"""
    item_index: Int32Array
    """(windows,) index into the items that the windows were made from."""
    labels: Mapping[str, npt.NDArray[Any]]
    """(windows,) each. Of questions ``start_positions`` and ``end_positions``: the first and last
    (inclusive) token of the first gold answer, counted inside the window, or 0, the first special
    token, if there is none or it is not wholly in this window. Of sentences ``label``: the class,
    −1 where there is none, or the score, NaN where there is none."""
    marks: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """(tokens,) each: what an output layer of a task's own reads beside the text, such as where
    words begin, as keyword arguments of the model; −1 of tokens that are not marked."""
    token_labels: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """(tokens,) each: what is right of tokens, where windows alone do not say it; −1 of tokens that
    nothing is learned of."""
    parts: Int32Array | None = None
    """(tokens,) the item that each token is of, where a window may hold several, one after another:
    no token sees those of another item, and positions begin anew. None: the item of the window."""
    token_fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """(tokens,) each: what a store keeps of tokens beside these, such as a loss mask."""

    @property
    def first_token(self) -> npt.NDArray[np.int64]:
        """(windows,) where each window begins in the concatenated arrays."""
        ends = np.cumsum(self.n_tokens, dtype=np.int64)
        return ends - self.n_tokens

    def __len__(self) -> int:
        return len(self.n_tokens)

    def part(self, first: int, stop: int) -> Windows:
        """The windows from ``first`` to below ``stop``, in memory of their own."""
        begins = np.append(self.first_token, len(self.input_ids))
        stop = min(stop, len(self))
        tokens, rows = slice(begins[first], begins[stop]), slice(first, stop)
        return Windows(
            self.input_ids[tokens].copy(),
            self.token_type_ids[tokens].copy(),
            self.offset_mapping[tokens].copy(),
            self.n_tokens[rows].copy(),
            self.item_index[rows].copy(),
            {name: values[rows].copy() for name, values in self.labels.items()},
            {name: values[tokens].copy() for name, values in self.marks.items()},
            {name: values[tokens].copy() for name, values in self.token_labels.items()},
            None if self.parts is None else self.parts[tokens].copy(),
            {name: values[tokens].copy() for name, values in self.token_fields.items()},
        )

    def separated(self, rows: npt.NDArray[np.int64]) -> tuple[Windows, npt.NDArray[np.int64]]:
        """Some windows with one item each: what an encoder is to read by itself.

        Args:
            rows: (batch,) which windows.

        Returns:
            Windows, and which of them hold the tokens of ``rows``, in the same order.
        """
        if self.parts is None:
            return self, rows
        begins, lengths = self.first_token[rows], self.n_tokens[rows]
        spans = [np.arange(a, a + n) for a, n in zip(begins, lengths, strict=True)]
        tokens = np.concatenate(spans)
        parts, new = self.parts[tokens], np.zeros(len(tokens), bool)
        new[1:] = parts[1:] != parts[:-1]
        new[np.cumsum(lengths) - lengths] = True
        starts = np.flatnonzero(new)
        apart = Windows(
            self.input_ids[tokens],
            self.token_type_ids[tokens],
            self.offset_mapping[tokens],
            np.diff(np.append(starts, len(tokens))).astype(np.int32),
            parts[starts],
            {},
        )
        return apart, np.arange(len(starts))
