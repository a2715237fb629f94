"""ActivationStore: the snapshots and splits that a folder of activations holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import StoreNotFoundError, UnknownNameError
from bertvision.featurestore.schema import SnapshotTag, check_name
from bertvision.featurestore.split import ActivationSplit

if TYPE_CHECKING:
    import xarray as xr


class ActivationStore(Mapping[str, "Snapshot"]):
    """A folder of activations: snapshots by tag, each with its splits.

    >>> store = ActivationStore.open("activations")        # doctest: +SKIP
    >>> store["0.3e"]["train"][17].shape                   # doctest: +SKIP
    torch.Size([171, 384, 7])
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> ActivationStore:
        """Open an existing store.

        Raises:
            StoreNotFoundError: there is none at ``path``.
        """
        path = Path(path)
        if not (path / "ledger").is_dir():
            raise StoreNotFoundError(
                f"there is no activation store at {path}: `bertvision extract` writes one"
            )
        return cls(path)

    def tags(self) -> list[SnapshotTag]:
        """Tags of the snapshots that have at least one split, ordered as numbers."""
        found = {path.parents[1].name for path in (self.path / "ledger").glob("*/*/split.json")}
        return sorted(SnapshotTag(name) for name in found if SnapshotTag.is_valid(name))

    def __getitem__(self, tag: str) -> Snapshot:
        tag = SnapshotTag(tag)
        if tag not in self.tags():
            held = ", ".join(self.tags()) or "nothing yet"
            raise UnknownNameError(
                f"no activations of {tag} in {self.path}: it holds {held}; "
                "`bertvision status` says what can be extracted"
            )
        return Snapshot(self, tag)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tags())

    def __len__(self) -> int:
        return len(self.tags())

    def splits(self) -> list[ActivationSplit]:
        """All splits of all snapshots."""
        return [snapshot[split] for snapshot in self.values() for split in snapshot]

    def to_xarray(self) -> xr.DataTree:
        """The complete splits as a lazy tree, ``tree["0.3e/train"]`` (see `lazy.to_dataset`)."""
        import xarray as xr

        complete = (split for split in self.splits() if split.is_complete)
        return xr.DataTree.from_dict({split.name: split.to_xarray() for split in complete})


class Snapshot(Mapping[str, "ActivationSplit"]):
    """The splits of one snapshot."""

    def __init__(self, store: ActivationStore, tag: SnapshotTag) -> None:
        self.store = store
        self.tag = tag

    def splits(self) -> list[str]:
        """Names of the splits that were created, complete or not."""
        found = (self.store.path / "ledger" / self.tag).glob("*/split.json")
        return sorted(path.parent.name for path in found)

    def __getitem__(self, split: str) -> ActivationSplit:
        check_name(split, "split")
        if split not in self.splits():
            raise UnknownNameError(
                f"no split {split!r} of {self.tag} in {self.store.path}: it holds "
                f"{', '.join(self.splits())}; "
                "`bertvision status` says what can be extracted"
            )
        return ActivationSplit(self.store.path, self.tag, split)

    def __iter__(self) -> Iterator[str]:
        return iter(self.splits())

    def __len__(self) -> int:
        return len(self.splits())
