"""A split as a ``datasets.Dataset`` whose rows get their hidden states when they are asked for.

The column ``hidden_states`` holds the numbers of examples, and its feature says of which split: as
with the features of images and sounds, whatever `datasets` does to rows keeps the column, and
decodes it where a value is looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.featurestore.lazy import SplitSource
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.views.decoded import decoded_tokens

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLE, STATES = "example", "hidden_states"


@dataclass
class StoredHiddenStates:
    """Feature of a column of hidden states that lie in a store.

    It is written into files of rows as it is, with the place of the split: these hold no hidden
    states, and are read where the store is seen under the same path or URL.

    Attributes:
        store: Absolute path or URL of the store.
        tag: Tag of the snapshot.
        split: Name of the split.
        record_sha256: Digest of the split's record: one that was written anew is another one.
        positions: Places of the layers on the stored layer axis.
        decode: Whether rows have the hidden states, or the numbers of their examples.
        id: As every feature of `datasets` has it.
    """

    store: str
    tag: str
    split: str
    record_sha256: str
    positions: list[int]
    decode: bool = True
    id: str | None = None
    dtype: ClassVar[str] = "torch.Tensor"
    pa_type: ClassVar[Any] = pa.struct({EXAMPLE: pa.int64()})
    _type: str = field(default="BertvisionHiddenStates", init=False, repr=False)

    def __call__(self) -> Any:
        """The type of the column in Arrow."""
        return self.pa_type

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        """A column of numbers of examples as it is.

        Raises:
            TypeError: It is another one, which `datasets` then keeps in its own type if it may.
        """
        if storage.type != self.pa_type:
            raise TypeError(f"Couldn't cast {storage.type} to numbers of stored examples")
        return storage

    def decode_example(self, value: dict[str, int], token_per_repo_id: object = None) -> Tensor:
        """The hidden states of an example, float32 (seq, layers, hidden).

        Args:
            value: Number of the example, by the name ``example``.
            token_per_repo_id: Not used; features of files of the hub need it.

        Raises:
            StoreNotFoundError: The store is not there, as seen from this machine.
            ProvenanceError: The split was written anew since.
            CorruptStoreError: The stored hidden states are damaged.
        """
        source = SplitSource(self.store, self.tag, self.split, self.record_sha256)
        split = source.open()
        example = value[EXAMPLE]
        n = int(split.plan.n_tokens[example])
        examples = np.full(n, example)
        return torch.from_numpy(decoded_tokens(split, examples, np.arange(n), self.positions))


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
    from datasets import Dataset, Features

    register()
    source = SplitSource.of(split.require_complete())
    feature = StoredHiddenStates(*source, positions=split.layer_positions(layers))
    columns: dict[str, Any] = {}
    if "text_row" not in split.record.arrays:  # else windows hold tokens of several rows
        texts = split.table().take(pa.array(split.table_rows))
        columns = dict(zip(texts.column_names, texts.columns, strict=True))
    columns |= {name: _column(values) for name, values in split.labels.items()}
    if taken := columns.keys() & {EXAMPLE, STATES}:
        raise InputError(f"{split.name} has a column {taken.pop()} of its own: use split.read")
    numbers = np.arange(len(split))
    # a structure, so that no number that somebody computes is taken for the number of an example
    pointers = pa.StructArray.from_arrays([pa.array(numbers)], names=[EXAMPLE])
    table = pa.table({EXAMPLE: numbers, **columns, STATES: pointers})
    features = Features(Features.from_arrow_schema(table.schema) | {STATES: feature})
    # given, as the library would pickle the whole table to make one
    digest = sha256(repr((source, feature.positions)).encode()).hexdigest()[:16]
    return Dataset(
        table.replace_schema_metadata(features.arrow_schema.metadata), fingerprint=digest
    )


@cache
def register() -> None:
    """Let `datasets` know the feature, which rows that were saved and are loaded again need."""
    from datasets.features.features import register_feature

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is called experimental since 2023
        register_feature(StoredHiddenStates, "BertvisionHiddenStates")
    # the format "torch" makes tensors of tensors
    warnings.filterwarnings(
        "ignore", "To copy construct from a tensor", UserWarning, r"datasets\.formatting"
    )


def _column(values: np.ndarray[Any, Any]) -> Any:
    """Labels of examples as a column; several to an example are lists."""
    return values if values.ndim == 1 else pa.array(values.tolist())
