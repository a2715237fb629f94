"""ActivationStore: the snapshots and splits that a folder of activations holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import (
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.format.contents import split_names, splits_of
from bertvision.featurestore.format.ledger import LEDGER, Ledger
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.stored_split import StoredSplit

if TYPE_CHECKING:
    import xarray as xr

    from bertvision.featurestore.split import ActivationSplit


class ActivationStore(Mapping[str, "SnapshotSplits"]):
    """A folder of activations: snapshots by tag, each with its splits.

    >>> store = ActivationStore.open("activations")        # doctest: +SKIP
    >>> store["0.3e"]["train"][17].shape                   # doctest: +SKIP
    torch.Size([171, 384, 7])
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __repr__(self) -> str:
        return f"<ActivationStore {self.storage}: {', '.join(self) or 'empty'}>"

    @classmethod
    def open(cls, path: str | Path) -> ActivationStore:
        """Open an existing store.

        Args:
            path: a folder, or an fsspec URL such as ``s3://bucket/activations``.

        Raises:
            StoreNotFoundError: there is none at ``path``.
        """
        storage = open_storage(path)
        if LEDGER not in storage.names(""):
            raise StoreNotFoundError(
                f"there is no activation store at {storage}: `bertvision extract` writes one"
            )
        return cls(storage)

    def tags(self) -> list[SnapshotTag]:
        """Tags of the snapshots that have at least one split, ordered as numbers."""
        return sorted({SnapshotTag(tag) for tag, _ in split_names(self.storage)})

    def __getitem__(self, tag: str) -> SnapshotSplits:
        tag = SnapshotTag(tag)
        if next(splits_of(self.storage, tag), None) is None:
            held = ", ".join(self.tags()) or "nothing yet"
            raise UnknownNameError(
                f"no activations of {tag} in {self.storage}: it holds {held}; "
                "`bertvision status` says what can be extracted"
            )
        return SnapshotSplits(self, tag)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tags())

    def __len__(self) -> int:
        return len(self.tags())

    def splits(self) -> list[ActivationSplit]:
        """All splits of all snapshots."""
        return [snapshot[split] for snapshot in self.values() for split in snapshot]

    def stored_splits(self) -> list[StoredSplit]:
        """All splits of all snapshots as the ledger describes them, which is light."""
        return [StoredSplit(self.storage, *names) for names in split_names(self.storage)]

    def to_xarray(self) -> xr.DataTree:
        """The complete splits as a lazy tree, ``tree["0.3e/train"]`` (see `lazy.to_dataset`)."""
        import xarray as xr

        complete = (split for split in self.splits() if split.is_complete)
        return xr.DataTree.from_dict({split.name: split.to_xarray() for split in complete})

    def pooled(
        self,
        tag: str,
        split: str,
        poolings: Sequence[str],
        layers: Sequence[int] | None = None,
    ) -> xr.Dataset:
        """Several poolings of a split as one lazy dataset (see `lazy.pooled_dataset`).

        Args:
            tag: of the snapshot.
            split: its name without the pooling: ``train`` stands for ``train-cls``, ``train-mean``.
            poolings: which were extracted; the order of the axis.
            layers: indices of hidden states; all that every pooling has by default.

        Returns:
            ``hidden_states`` (example, pooling, layer, hidden) float32, labels by (example).

        Raises:
            UnknownNameError: the snapshot or a pooling of the split was not extracted.
        """
        from bertvision.featurestore.lazy import pooled_dataset

        snapshot = self[tag]
        return pooled_dataset({name: snapshot[f"{split}-{name}"] for name in poolings}, layers)


class SnapshotSplits(Mapping[str, "ActivationSplit"]):
    """The splits of one snapshot."""

    def __init__(self, store: ActivationStore, tag: SnapshotTag) -> None:
        self.store = store
        self.tag = tag

    def splits(self) -> list[str]:
        """Names of the splits that were created, complete or not."""
        return list(splits_of(self.store.storage, self.tag))

    def __getitem__(self, split: str) -> ActivationSplit:
        ledger = Ledger(self.store.storage, self.tag, check_name(split, "split"))
        if not (ledger.exists or ledger.shards()):  # all of them are listed for the message alone
            raise UnknownNameError(
                f"no split {split!r} of {self.tag} in {self.store.storage}: it holds "
                f"{', '.join(self.splits())}; "
                "`bertvision status` says what can be extracted"
            )
        from bertvision.featurestore.split import ActivationSplit

        return ActivationSplit(self.store.storage, self.tag, split)

    def __iter__(self) -> Iterator[str]:
        return iter(self.splits())

    def __len__(self) -> int:
        return len(self.splits())
