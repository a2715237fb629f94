"""WritableStore: what an activation store offers to those who write to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bertvision.errors import InputError
from bertvision.featurestore.format.ledger import LEDGER
from bertvision.featurestore.format.names import CompressionName, NonFinite
from bertvision.featurestore.format.records import ROOT, Provenance
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from bertvision.featurestore.writing.appending import ActivationWriter


class WritableStore:
    """The side of a store that is written to; `store.ActivationStore` adds what is read."""

    storage: Storage

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """Make a store, or open the one that is there.

        Args:
            path: a folder, which is made, or an fsspec URL that can be written to, such as
                ``s3://bucket/states``.

        Raises:
            InputError: the folder holds something else, or cannot be written to.
        """
        from bertvision.featurestore.creation import store_lock, write_root

        storage = open_storage(path)
        if LEDGER not in (names := storage.names("")):
            if others := [name for name in sorted(names) if name != ROOT]:
                raise InputError(
                    f"{storage} holds {', '.join(others[:3])} and is no activation store: name a "
                    "folder that is empty or not there yet"
                )
            with store_lock(storage):
                write_root(storage)
        return cls(storage)

    def writer(
        self,
        tag: str,
        split: str,
        *,
        hidden_size: int,
        layers: Sequence[int | str],
        encoding: str = "int8",
        compression: CompressionName = "none",
        shard_tokens: int | None = None,
        provenance: Provenance | None = None,
        tokenizer: Any = None,
        channel_stats: tuple[Tensor | npt.ArrayLike, Tensor | npt.ArrayLike] | None = None,
        nonfinite: NonFinite = "error",
        part: int = 0,
    ) -> ActivationWriter:
        """Write hidden states that any code makes, or go on with a split that was begun.

        Args:
            tag: of the model's state, such as ``0e``.
            split: its name; another snapshot with a split of that name has the same examples in it.
            hidden_size: channels.
            layers: what the hidden states are of, in the order in which they are given: indices,
                ascending, or names.
            encoding: int8, int4, bfloat16, float16 or float32.
            compression: none, zstd or pcodec.
            shard_tokens: capacity of a shard, best several times the longest example; 4,096 by
                default.
            provenance: what the hidden states come from, by name: model, revision, digest of its
                weights. Whoever goes on with the split must give the same.
            tokenizer: that the token ids are of; its digest goes into the provenance.
            channel_stats: mean and deviation of each channel, (layers, hidden) each, for int8 and
                int4; by default they are taken from the examples of the first shard.
            nonfinite: refuse NaN and infinity ("error"), or replace and count them ("record").
            part: of this process among those that write the split at once, such as its rank.

        Raises:
            InputError: an argument is out of range, or its kind cannot be stored.
            ProvenanceError: the split was begun from something else; the message names the field.
            LockedError: another process is writing the split, or this part of it.
        """
        from bertvision.featurestore.writing.opening import open_appending

        return open_appending(
            self.storage,
            tag,
            split,
            hidden_size=hidden_size,
            layers=layers,
            encoding=encoding,
            compression=compression,
            shard_tokens=shard_tokens,
            provenance=provenance or {},
            tokenizer=tokenizer,
            channel_stats=channel_stats,
            nonfinite=nonfinite,
            part=part,
        )
