"""Engine ``bertvision`` of xarray, found by the entry point in pyproject.toml.

xarray imports every installed engine before it opens anything: nothing heavy is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from xarray.backends import BackendEntrypoint

from bertvision.errors import IncompleteSplitError, InputError
from bertvision.featurestore.format.ledger import LEDGER
from bertvision.featurestore.format.records import ROOT

if TYPE_CHECKING:
    import xarray as xr

    from bertvision.featurestore.storage.storage import Storage


class StoreEngine(BackendEntrypoint):
    """Stores as datasets of xarray, decoded to float32 where they are indexed.

    Examples:
        >>> import xarray as xr
        >>> tree = xr.open_datatree("activations", engine="bertvision")
        >>> list(tree["1e"].children)
        ['dev', 'train', 'tune']
        >>> split = xr.open_dataset("activations", engine="bertvision", group="1e/train")
        >>> split.hidden_states.sel(layer=2).isel(token=[0, 1]).shape  # one example is read
        (2, 32)
    """

    description = "Open activation stores, decoded to float32 where they are indexed"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "group")
    supports_groups = True

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        group: str | None = None,
    ) -> xr.Dataset:
        """A split of a store as a lazy dataset (see `labelled.labelled`).

        Args:
            filename_or_obj: a folder, or an fsspec URL.
            drop_variables: names that are left out.
            group: ``tag/split``, such as ``0.3e/train``.

        Raises:
            StoreNotFoundError: there is no store.
            UnknownNameError: it has no such split.
            InputError: no split was named, or its tokens were shuffled.
            IncompleteSplitError: shards of the split are not committed yet.
            CorruptStoreError: its record or plan is damaged.
        """
        from bertvision.featurestore.format.ledger import require_split, require_tag, split_names
        from bertvision.featurestore.format.names import SnapshotTag
        from bertvision.featurestore.reader import SplitReader
        from bertvision.featurestore.views.labelled import labelled

        storage = _storage(filename_or_obj)
        tag, _, split = (group or "").strip("/").partition("/")
        if not split:
            stored = ", ".join("/".join(names) for names in split_names(storage)) or "nothing yet"
            raise InputError(
                f"group is {group!r}: name a split of {storage} as tag/split; it holds "
                f"{stored}; xarray.open_datatree opens all that are complete"
            )
        require_tag(storage, SnapshotTag(tag))
        require_split(storage, SnapshotTag(tag), split)
        return _without(labelled(SplitReader(storage, tag, split)), drop_variables)

    def open_groups_as_dict(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None
    ) -> dict[str, xr.Dataset]:
        """The complete splits of a store by group; those of shuffled tokens are left out.

        Args:
            filename_or_obj: a folder, or an fsspec URL.
            drop_variables: names that are left out.

        Raises:
            StoreNotFoundError: there is no store.
            CorruptStoreError: the record or plan of a split is damaged.
        """
        import xarray as xr

        from bertvision.featurestore.format.ledger import split_names
        from bertvision.featurestore.reader import SplitReader
        from bertvision.featurestore.views.labelled import labelled

        storage = _storage(filename_or_obj)
        groups = {"/": xr.Dataset()}
        for names in split_names(storage):
            with suppress(IncompleteSplitError):  # examples are still added to it
                split = SplitReader(storage, *names)
                if split.is_complete and not split.record.is_shuffled:
                    groups[f"/{split.name}"] = _without(labelled(split), drop_variables)
        return groups

    def open_datatree(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None
    ) -> xr.DataTree:
        """The same as a tree: ``tree["0.3e/train"]``."""
        import xarray as xr

        return xr.DataTree.from_dict(
            self.open_groups_as_dict(filename_or_obj, drop_variables=drop_variables)
        )

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Whether it is the folder of a store, so that ``engine=`` may be left out."""
        if not isinstance(filename_or_obj, str | os.PathLike):
            return False
        return all(os.path.isdir(os.path.join(filename_or_obj, name)) for name in (LEDGER, ROOT))


def _storage(where: Any) -> Storage:
    from bertvision.featurestore.format.ledger import require_store
    from bertvision.featurestore.storage.opening import open_storage

    if not isinstance(where, str | os.PathLike):
        raise InputError(f"{type(where).__name__} is no store: give its folder or URL")
    return require_store(open_storage(os.fspath(where)))


def _without(dataset: xr.Dataset, names: str | Iterable[str] | None) -> xr.Dataset:
    return dataset.drop_vars([names] if isinstance(names, str) else names or [], errors="ignore")
