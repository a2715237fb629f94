"""Batches of windows, padded to the longest of them, as an encoder reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.pipelines.tasks.windows import Windows

Int64Array = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Windows padded to the longest of them."""

    input_ids: Tensor
    """int64 (batch, seq)"""
    token_type_ids: Tensor | None
    """int64 (batch, seq); None for a model that takes none."""
    attention_mask: Tensor
    """int64 (batch, seq): 1 for real tokens."""
    labels: dict[str, Tensor]
    """(batch,) by name, int64 of classes and positions, float32 of scores: what the task learns;
    (batch, seq) int64 of tokens, −1 where there is nothing to learn."""
    marks: Mapping[str, Tensor] = MappingProxyType({})
    """int64 (batch, seq) by name: `Windows.marks`, −1 also of padding."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of the model with its output layer, as keyword arguments."""
        return {**self.text, **self.marks}

    @property
    def text(self) -> dict[str, Tensor]:
        """Inputs of the encoder alone, as keyword arguments."""
        given = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        types = self.token_type_ids
        return given if types is None else {**given, "token_type_ids": types}

    def to(self, where: torch.device) -> Batch:
        """The same batch on a device."""
        types = self.token_type_ids
        return Batch(
            self.input_ids.to(where),
            None if types is None else types.to(where),
            self.attention_mask.to(where),
            {name: of.to(where) for name, of in self.labels.items()},
            {name: of.to(where) for name, of in self.marks.items()},
        )


def collate(
    windows: Windows,
    first_token: Int64Array,
    rows: Int64Array,
    pad_id: int,
    labels: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    token_types: bool = True,
) -> Batch:
    """Pad the windows ``rows`` to the longest of them.

    Args:
        windows: all windows of a split.
        first_token: (windows,) ``windows.first_token``, computed once by the caller.
        rows: (batch,) the windows to take.
        pad_id: vocabulary index of the padding token.
        labels: by name, of all windows: (windows,), or (tokens,) of ``windows.token_labels``; none
            where nothing is learned.
        token_types: whether the model takes token types.
    """
    lengths = windows.n_tokens[rows]
    shape = (len(rows), int(lengths.max()))
    input_ids = np.full(shape, pad_id, np.int64)
    token_type_ids = np.zeros(shape, np.int64)
    for i, row in enumerate(rows):
        tokens = slice(first_token[row], first_token[row] + lengths[i])
        input_ids[i, : lengths[i]] = windows.input_ids[tokens]
        token_type_ids[i, : lengths[i]] = windows.token_type_ids[tokens]
    mask = np.arange(shape[1]) < lengths[:, None]

    def padded(of: npt.NDArray[Any]) -> Tensor:
        found = np.full(shape, -1, np.int64)
        for i, row in enumerate(rows):
            found[i, : lengths[i]] = of[first_token[row] : first_token[row] + lengths[i]]
        return torch.from_numpy(found)

    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(token_type_ids) if token_types else None,
        torch.from_numpy(mask.astype(np.int64)),
        {
            name: padded(of) if name in windows.token_labels else _label(of[rows])
            for name, of in (labels or {}).items()
        },
        {name: padded(of) for name, of in windows.marks.items()},
    )


def _label(values: npt.NDArray[Any]) -> Tensor:
    is_score = np.issubdtype(values.dtype, np.floating)
    return torch.from_numpy(values.astype(np.float32 if is_score else np.int64))
