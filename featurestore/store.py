"""ActivationStore: the snapshots and splits that a folder of activations holds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from bertvision.errors import (
    CorruptStoreError,
    FormatVersionError,
    IncompleteSplitError,
    InputError,
    counted,
)
from bertvision.featurestore.format.ledger import (
    LEDGER,
    Ledger,
    require_split,
    require_store,
    require_tag,
    split_names,
    splits_of,
)
from bertvision.featurestore.format.names import (
    CompressionName,
    NonFinite,
    SnapshotTag,
    check_name,
)
from bertvision.featurestore.format.records import ROOT, Provenance
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.featurestore.views.html import html_table

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr
    from torch import Tensor

    from bertvision.featurestore.split import ActivationSplit
    from bertvision.featurestore.writing.appending import ActivationWriter

_MOST_ROWS = 12  # that a repr shows


class ActivationStore(Mapping[str, "SnapshotSplits"]):
    """A folder of activations: snapshots by tag, each with its splits.

    Examples:
        >>> store = bertvision.ActivationStore.open("activations")
        >>> store
        <ActivationStore activations: 2 snapshots>
          0.5e  dev, train, tune
          1e    dev, train, tune
        >>> store["1e"]["train"][17].shape  # (seq, hidden, layers)
        torch.Size([85, 32, 3])
        >>> store["1e/train"].name == store[1]["train"].name
        True
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __repr__(self) -> str:
        return _listing(*self._contents())

    def _repr_html_(self) -> str:
        title, rows = self._contents()
        return html_table(["snapshot", "splits"], rows, title=title)

    def _contents(self) -> tuple[str, list[tuple[str, str]]]:
        """Name of the store, and the splits of each snapshot."""
        splits: dict[str, list[str]] = {}
        for tag, split in split_names(self.storage):
            splits.setdefault(tag, []).append(split)
        rows = [
            (tag, textwrap.shorten(", ".join(splits[tag]), 80, placeholder=" …"))
            for tag in sorted(splits, key=SnapshotTag)
        ]
        return f"ActivationStore {self.storage}: {counted(len(splits), 'snapshot')}", rows

    @classmethod
    def open(cls, path: str | Path) -> ActivationStore:
        """Open an existing store.

        Args:
            path: a folder, an uncompressed zip of one, which is only read, or an fsspec URL such as
                ``s3://bucket/activations``.

        Raises:
            StoreNotFoundError: there is none at ``path``.
            CorruptStoreError: the zip is damaged, or names files that no store has.
            InputError: members of the zip are compressed.
        """
        return cls(require_store(open_storage(path)))

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
        keep: str | None = None,
        logits: str | None = None,
        part: int = 0,
    ) -> ActivationWriter:
        """Write hidden states that any code makes, or go on with a split that was begun.

        Args:
            tag: Tag of the model's state, such as ``0e``.
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
            tokenizer: Tokenizer that the token ids are of; its digest goes into the provenance.
            channel_stats: mean and deviation of each channel, (layers, hidden) each, for int8 and
                int4; by default they are taken from the examples of the first shard.
            nonfinite: refuse NaN and infinity ("error"), or replace and count them ("record").
            keep: Tokens of each example to store, by a rule: ``completion``, those where the field
                ``loss_mask`` or ``generated`` is 1; ``from:N``, all but the first N; ``every:N``,
                one of N; or the name of another mask field. None stores all. Their places are the
                array ``kept_position``.
            logits: ``top:K`` stores the log-probabilities of the K most probable next tokens beside
                each token, of the logits that `ActivationWriter.add` is given; None stores none.
            part: Part of this process among those that write the split at once, such as its rank.

        Raises:
            InputError: an argument is out of range, or its kind cannot be stored.
            ProvenanceError: the split was begun from something else; the message names the field.
            LockedError: another process is writing the split, or this part of it.
        """
        from bertvision.featurestore.writing.appending import open_appending

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
            keep=keep,
            logits=logits,
            part=part,
        )

    def tags(self) -> list[SnapshotTag]:
        """Tags of the snapshots that have at least one split, ordered as numbers."""
        return sorted({SnapshotTag(tag) for tag, _ in split_names(self.storage)})

    @overload
    def __getitem__(self, name: SnapshotTag | float) -> SnapshotSplits: ...

    @overload
    def __getitem__(self, name: str) -> Any: ...

    def __getitem__(self, name: str | float) -> Any:
        """A snapshot by its tag or its fraction of an epoch; a split by ``tag/split``.

        Raises:
            InputError: the name is no tag.
            UnknownNameError: nothing of that name was extracted.
        """
        if not isinstance(name, str):
            return self[SnapshotTag.of(name)]
        text, slash, split = name.partition("/")
        tag = SnapshotTag(text)
        require_tag(self.storage, tag)
        snapshot = SnapshotSplits(self, tag)
        return snapshot[split] if slash else snapshot

    def __iter__(self) -> Iterator[str]:
        return iter(self.tags())

    def __len__(self) -> int:
        return len(self.tags())

    def splits(self) -> list[ActivationSplit]:
        """All splits of all snapshots, but for those that examples are still added to."""
        from bertvision.featurestore.split import ActivationSplit

        return [ActivationSplit(self.storage, s.tag, s.split) for s in self.stored_splits()]

    def stored_splits(self) -> list[StoredSplit]:
        """The same as the ledger describes them, which is light."""
        splits = []
        for names in split_names(self.storage):
            with suppress(IncompleteSplitError):
                splits.append(StoredSplit(self.storage, *names))
        return splits

    def stored_bytes(self, tag: str, split: str) -> int:
        """Bytes of the committed shards of a split; a damaged record counts nothing.

        Raises:
            UnknownNameError: there is no such split.
        """
        return self._ledger(tag, split).stored_bytes()

    def remove(self, tag: str, split: str) -> int:
        """Remove a split, whole, begun or damaged, for good; other splits stay as they are.

        A call that is killed leaves a split without its shards, or folders that no record names:
        the same call, or extracting the split again, goes on from there.

        Returns:
            Bytes of the shards that were removed.

        Raises:
            UnknownNameError: there is no such split.
            LockedError: another process is writing it.
            InputError: the store can only be read.
        """
        from bertvision.featurestore.delegation import withdraw
        from bertvision.featurestore.writing.growth import remove_split

        ledger = self._ledger(tag, split)
        with ledger.lock():
            withdraw(ledger)
            freed = ledger.stored_bytes()
            remove_split(ledger)
        return freed

    def _ledger(self, tag: str, split: str) -> Ledger:
        """The ledger of a split of which there is anything at all."""
        ledger = Ledger(self.storage, SnapshotTag(tag), check_name(split, "split"))
        if not self.storage.names(f"{ROOT}/{ledger.name}"):
            self[tag].require(split)
        return ledger

    def to_xarray(self) -> xr.DataTree:
        """The complete splits as a lazy tree, ``tree["0.3e/train"]``; but for shuffled ones.

        Each is as `ActivationSplit.to_xarray` gives it.
        """
        import xarray as xr

        whole = (s for s in self.splits() if s.is_complete and not s.record.is_shuffled)
        return xr.DataTree.from_dict({split.name: split.to_xarray() for split in whole})

    def pooled(
        self,
        tag: str,
        split: str,
        poolings: Sequence[str],
        layers: Sequence[int] | None = None,
    ) -> xr.Dataset:
        """Several poolings of a split as one lazy dataset (see `lazy.pooled_dataset`).

        Args:
            tag: Tag of the snapshot.
            split: its name without the pooling: ``train`` stands for ``train-cls``, ``train-mean``.
            poolings: Poolings that were extracted, in the order of the axis.
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

    def __repr__(self) -> str:
        return _listing(*self._contents())

    def _repr_html_(self) -> str:
        title, rows = self._contents()
        return html_table(["split", ""], rows, title=title)

    def _contents(self) -> tuple[str, list[tuple[str, str]]]:
        """Name of the snapshot, and the content of its first splits."""
        names = self.splits()
        rows = [(name, self._describe(name)) for name in names[:_MOST_ROWS]]
        rows += [(name, "") for name in names[_MOST_ROWS:]]
        title = f"SnapshotSplits {self.tag} of {self.store.storage}: {counted(len(names), 'split')}"
        return title, rows

    def _describe(self, split: str) -> str:
        try:
            return Ledger(self.store.storage, self.tag, split).read_split().describe()
        except IncompleteSplitError:
            return "still being written"
        except (CorruptStoreError, FormatVersionError):
            return "not readable: `bertvision store verify` says why"

    def splits(self) -> list[str]:
        """Names of the splits that were created, complete or not."""
        return list(splits_of(self.store.storage, self.tag))

    def __getitem__(self, split: str) -> ActivationSplit:
        from bertvision.featurestore.split import ActivationSplit

        self.require(split)
        return ActivationSplit(self.store.storage, self.tag, split)

    def require(self, split: str) -> None:
        """Make sure that a split was created.

        Raises:
            UnknownNameError: it was not.
        """
        require_split(self.store.storage, self.tag, split)

    def __iter__(self) -> Iterator[str]:
        return iter(self.splits())

    def __len__(self) -> int:
        return len(self.splits())


def _listing(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A title and a line for each of the first rows, in two columns."""
    width = max((len(name) for name, _ in rows[:_MOST_ROWS]), default=0)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        lines.append(f"  … and {len(rows) - _MOST_ROWS} more")
    return "\n".join([f"<{title}>", *lines])
