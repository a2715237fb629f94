"""A split as a ``datasets.Dataset`` whose rows get their hidden states when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from bertvision.errors import InputError
from bertvision.featurestore.lazy import SplitSource
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.views.decoded import decoded_tokens

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLE, STATES = "example", "hidden_states"


def as_rows(split: SplitReader, layers: int | str | Sequence[int | str] | None) -> Dataset:
    """The examples of a split in stored order, a row each.

    Args:
        split: complete.
        layers: indices of hidden states, or names, or one of them; None is all.

    Raises:
        IncompleteSplitError: shards are not committed yet.
        InputError: its tokens were shuffled, a layer is not stored, or a column of the data has a
            name that is needed.
        CorruptStoreError: the plan, the labels or the table are damaged.
    """
    from datasets import Dataset

    source = SplitSource.of(split.require_complete())
    positions = split.layer_positions(layers)
    columns: dict[str, Any] = {}
    if "text_row" not in split.record.arrays:  # else windows hold tokens of several rows
        texts = split.table().take(pa.array(split.table_rows))
        columns = dict(zip(texts.column_names, texts.columns, strict=True))
    columns |= {name: _column(values) for name, values in split.labels.items()}
    if taken := columns.keys() & {EXAMPLE, STATES}:
        raise InputError(f"{split.name} has a column {taken.pop()} of its own: use split.read")
    # given, as the library would pickle the whole table to make one
    digest = sha256(repr(source).encode()).hexdigest()[:16]
    rows = Dataset(pa.table({EXAMPLE: np.arange(len(split)), **columns}), fingerprint=digest)
    return rows.with_transform(WithStates(source, positions))


class WithStates:
    """Adds the hidden states to rows that still say which examples they are.

    Pickled as the place of the split: workers of a DataLoader open it for themselves.

    Args:
        source: where the split is.
        positions: on the stored layer axis.
    """

    def __init__(self, source: SplitSource, positions: Sequence[int]) -> None:
        self.source, self.positions = source, list(positions)

    def __call__(self, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The rows with ``hidden_states``, float32 (seq, layers, hidden) each, read in one go.

        Args:
            rows: values by column; without ``example`` they stay as they are.

        Raises:
            CorruptStoreError: what is stored is damaged.
        """
        if EXAMPLE not in rows:
            return dict(rows)
        split = self.source.open()
        examples = np.asarray(rows[EXAMPLE], np.int64)
        n = split.plan.n_tokens[examples].astype(np.int64)
        places = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        states = decoded_tokens(split, np.repeat(examples, n), places, self.positions)
        # a copy each, or a kept row would keep all that were read with it
        parts = [part.clone() for part in torch.from_numpy(states).split(n.tolist())]
        return {**rows, STATES: parts}


def _column(values: np.ndarray[Any, Any]) -> Any:
    """Labels of examples as a column; several to an example are lists."""
    return values if values.ndim == 1 else pa.array(values.tolist())
