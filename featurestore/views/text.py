"""The text that each token of a split stands for, out of its table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.featurestore.reader import SplitReader


class TokenText:
    """The text that the tokens of a split stand for, read once.

    Raises:
        InputError: the split keeps one vector for each window or shuffled tokens, or its table has
            no text.
        CorruptStoreError: the table or the offsets are damaged.
    """

    def __init__(self, split: SplitReader) -> None:
        split.require_examples()
        pooling = split.record.provenance.get("tokens", "all")
        if pooling != "all" or "offset_mapping" not in split.record.arrays:
            raise InputError(
                f"{split.name} keeps no token beside its text (tokens: {pooling}): the texts are "
                "in `table()`, in the rows that `plan.example_id` names"
            )
        table = split.table()
        self._columns = [n for n in ("context", "text", "pair") if n in table.column_names]
        if not self._columns:
            raise InputError(
                f"the table of {split.name} has no column context or text: it has "
                f"{', '.join(table.column_names)}"
            )
        self._table = table.select(self._columns)
        self._offsets = split.array("offset_mapping")
        self._rows = split.table_rows
        # of windows that hold several documents, or a part of one: the row of each token
        has_rows = "text_row" in split.record.arrays
        self._text_row = split.array("text_row") if has_rows else None
        self._plan = split.plan

    def of(self, example: int) -> list[str]:
        """The text of each token of an example; empty where it stands for none."""
        begin = int(self._plan.first_token[example])
        span = slice(begin, begin + int(self._plan.n_tokens[example]))
        if self._text_row is None:
            return self._part(int(self._rows[example]), self._offsets[span])
        rows = self._text_row[span]
        cuts = np.flatnonzero(np.diff(rows)) + 1
        parts = np.split(np.arange(span.start, span.stop), cuts)
        return [
            text
            for row, tokens in zip(rows[np.append(0, cuts)].tolist(), parts, strict=True)
            for text in self._part(row, self._offsets[tokens])
        ]

    def _part(self, index: int, offsets: npt.NDArray[Any]) -> list[str]:
        """The text of tokens of a row of the table, by their offsets (tokens, 2)."""
        row = self._table.slice(index, 1).to_pylist()[0]
        texts = [row[column] for column in self._columns if row[column]]
        special = offsets[:, 0] < 0
        # special tokens part the two texts of a pair
        part = np.cumsum(~special & np.append(True, special[:-1])) - 1
        return [
            "" if none else texts[i][start:end]
            for none, i, (start, end) in zip(
                special.tolist(), part.tolist(), offsets.tolist(), strict=True
            )
        ]
