"""Content of an export: the examples of a split as others take them, a shard after another.

The record of a folder of exported files: what they are of, and whether all are there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.files import read_json

_DTYPES = {"float16": torch.float16, "float32": torch.float32}
_NUMBER = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_TAKEN = {"id", "keys", "lengths", "token_ids", "hidden_states_scales"}
_PIECE_TOKENS = 1024
"""Tokens that are decoded at once; an example is never parted."""


class Example(NamedTuple):
    """An example on its way out.

    Attributes:
        position: Position in the split.
        states: (seq, layers, hidden) float16 or float32, in memory of its own.
        fields: arrays of its tokens, by name, (seq, …) each; ``input_ids`` is one of them.
        labels: arrays of it as a whole, by name.
    """

    position: int
    states: Tensor
    fields: dict[str, npt.NDArray[Any]]
    labels: dict[str, npt.NDArray[Any]]


class Content:
    """A split as it is exported.

    Args:
        split: a complete one.
        dtype: float16 or float32.
        layers: Layers of it, by index or name; None is all.

    Raises:
        IncompleteSplitError: shards are missing.
        InputError: a layer is not stored, or an array has a name that exports use themselves.

    Attributes:
        keys: Keys of the examples: those that it was written with, or the rows of its data.
        numbers: Numbers of the examples: the row of the data that each stands for, or its key,
            where all keys are numbers.
        lengths: tokens of each.
        positions: Positions of its layers among the stored ones.
        layers: indices or names of these.
        fields: arrays of tokens, by name: (token axis, …).
        labels: arrays of examples, by name: (examples, …).
    """

    def __init__(
        self, split: ActivationSplit, dtype: str, layers: Sequence[int | str] | None = None
    ) -> None:
        self.split, self.dtype = split.require_complete(), _DTYPES[dtype]
        self.positions = split.layer_positions(layers)
        layer_labels: Sequence[int | str] = split.layer_names or split.record.layers
        self.layers = [layer_labels[position] for position in self.positions]
        self.lengths = split.plan.n_tokens.astype(np.int64)
        self.keys, self.numbers = keys_of(split)
        of_tokens = (n for n, array in split.record.arrays.items() if array.dims[0] == "token")
        self.fields = {name: split.array(name) for name in of_tokens}
        self.labels = split.labels
        if taken := _TAKEN.intersection(self.fields):
            raise InputError(
                f"{split.name} has an array {min(taken)!r} of its tokens, a name that exported "
                "files use themselves: it cannot be exported"
            )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def order(self) -> list[int]:
        """Positions of the examples by their numbers."""
        return sorted(range(len(self)), key=self.numbers.__getitem__)

    def examples(self, shard: int) -> Iterator[Example]:
        """The examples of a shard.

        Raises:
            NonFiniteError: a value is beyond float16.
            CorruptStoreError: the shard is damaged.
        """
        piece: list[int] = []
        for position in self.split.plan.examples_of(shard):
            if piece and self.lengths[[*piece, position]].sum() > _PIECE_TOKENS:
                yield from self._decoded(piece)
                piece = []
            piece.append(position)
        yield from self._decoded(piece)

    def _decoded(self, piece: list[int]) -> Iterator[Example]:
        batch = self.split.read(piece, self.split_layers)
        states = batch.decode().to(self.dtype)
        for position, part in zip(piece, states.split(batch.lengths.tolist()), strict=True):
            if not bool(part.isfinite().all()):
                raise NonFiniteError(
                    f"example {self.keys[position]!r} of {self.split.name} holds values beyond "
                    "65,504, which float16 does not have: export float32"
                )
            begin = int(self.split.plan.first_token[position])
            tokens = slice(begin, begin + len(part))
            yield Example(
                position,
                part.clone(),
                {name: array[tokens] for name, array in self.fields.items()},
                {name: np.asarray(array[position]) for name, array in self.labels.items()},
            )

    @property
    def split_layers(self) -> list[int]:
        """Indices of its layers, as `ActivationSplit.read` takes them."""
        return [self.split.record.layers[position] for position in self.positions]


def parse_stored_layers(value: str | Iterable[int | str] | None) -> list[int | str] | None:
    """``2,18,33`` → indices of layers, or their names where a part is no number; None → None."""
    if value is None:
        return None
    texts = [str(part).strip() for part in (value.split(",") if isinstance(value, str) else value)]
    if all(text.removeprefix("-").isdecimal() for text in texts):
        return [int(text) for text in texts]
    return list(texts)


def keys_of(split: ActivationSplit) -> tuple[list[str], list[int]]:
    """Keys and numbers of the examples of a split, as `Content` has them."""
    rows, table = split.plan.example_id.tolist(), split.table()
    if table.column_names != ["id"] or len(table) != len(rows):
        return [str(row) for row in rows], rows
    ids = table["id"].to_pylist()  # of `ActivationStore.writer`
    keys = [ids[row] for row in rows]
    return keys, [int(key) for key in keys] if all(map(_NUMBER.fullmatch, keys)) else rows


class Target(ABC):
    """A kind of files that a split is exported to.

    What is written under its own name is whole: a kill leaves only files that begin with a dot.
    """

    @abstractmethod
    def pending(self) -> list[int]:
        """Shards of which something is not written yet."""

    @abstractmethod
    def write(self, shard: int) -> int:
        """Write what is missing of a shard, durably.

        Returns:
            How many examples it wrote.
        """

    @abstractmethod
    def finish(self) -> None:
        """Write what comes last, and check that all is there."""


RECORD = "export.json"
Format = Literal["safetensors", "npy", "arrow"]


class ExportRecord(BaseModel):
    """Record of a folder of exported files.

    Attributes:
        split: ``tag/split``.
        split_sha256: digest of all that decides the split's hidden states.
        format: Format of the files.
        dtype: Type of the hidden states.
        layers: indices or names, in the order in which they lie in the files.
        examples: Number of examples.
        provenance: Provenance of the split.
        complete: whether all is there.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    split: str
    split_sha256: str
    format: Format
    dtype: Literal["float16", "float32"]
    layers: list[int] | list[str]
    examples: int
    provenance: dict[str, Any]
    complete: bool = False


def read_export(folder: Path) -> ExportRecord | None:
    """Record of a folder as an export; None where it is none.

    Raises:
        InputError: the record is damaged.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        return ExportRecord.model_validate(read_json(path))
    except ValidationError as error:
        raise InputError(f"{path} is damaged: {error.errors()[0]['msg']}") from None
