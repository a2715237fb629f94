"""StoredSplit: what the ledger tells of a split, without its arrays and without torch.

Commands that only say what there is stand on it; `reader.SplitReader` adds the arrays.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Self

from bertvision.errors import InputError
from bertvision.featurestore.format.keeping import KEPT_POSITION
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.format.records import SplitRecord
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage


class StoredSplit:
    """One split of one snapshot, as the ledger describes it.

    Args:
        store: folder, URL or storage of the store.
        tag: Tag of the snapshot.
        split: its name.

    Raises:
        StoreNotFoundError: there is no such split.
        CorruptStoreError: its record is damaged.
        FormatVersionError: it was written in a newer format.
    """

    def __init__(self, store: str | Path | Storage, tag: str, split: str) -> None:
        self.storage = open_storage(store)
        self.tag = SnapshotTag(tag)
        self.split = check_name(split, "split")
        self.ledger = Ledger(self.storage, self.tag, self.split)
        self.record: SplitRecord = self.ledger.read_split()

    @property
    def name(self) -> str:
        """``tag/split``."""
        return f"{self.tag}/{self.split}"

    @property
    def layer_names(self) -> list[str]:
        """Names of the stored layers, where they were given to `ActivationStore.writer`."""
        try:
            names = json.loads(str(self.record.provenance.get("layer_names", "")))
        except ValueError:
            return []
        fits = isinstance(names, list) and len(names) == len(self.record.layers)
        return [str(name) for name in names] if fits else []

    def layer_positions(self, layers: int | str | Sequence[int | str] | None) -> list[int]:
        """Positions on the stored layer axis of hidden-state indices (negative ones from the end).

        Args:
            layers: indices, or names where the layers have some; one alone; None is all.

        Raises:
            InputError: a layer is not stored, or named twice.
        """
        stored = self.record.layers
        if layers is None:
            return list(range(len(stored)))
        layers = _named(layers)
        known: dict[int | str, int | str] = dict(zip(self.layer_names, stored, strict=False))
        known |= {position - len(stored): layer for position, layer in enumerate(stored)}
        wanted = [known.get(layer, layer) for layer in layers]
        for given, layer in zip(layers, wanted, strict=True):
            if layer not in stored:
                raise InputError(
                    f"layer {given} is not stored in {self.name}: "
                    f"it holds {', '.join(self.layer_names or map(str, stored))}"
                )
        if len(set(wanted)) != len(wanted) or not wanted:
            raise InputError(f"layers {layers} are {wanted}: name at least one, each once")
        return [stored.index(int(layer)) for layer in wanted]

    @property
    def keep(self) -> str | None:
        """Rule of the tokens that are stored of each example; None where all are."""
        return self.record.keep

    def require_all_tokens(self) -> Self:
        """Return the split itself, if it has all tokens of each example.

        Raises:
            InputError: It keeps some of them.
        """
        if self.keep is not None:
            raise InputError(
                f"{self.name} keeps some tokens of each example (keep: {self.keep}; their places "
                f"are its array {KEPT_POSITION}), and all are needed here: name a split that was "
                "written without keep, or read this one with split.read, split.tokens or split.dask"
            )
        return self

    def committed_shards(self) -> list[int]:
        """Shards that the split's record counts and the ledger names."""
        return sorted(shard for shard in self.ledger.shards() if shard < self.record.shards)

    @property
    def is_complete(self) -> bool:
        """Whether every shard is committed."""
        return len(self.committed_shards()) == self.record.shards

    def info(self) -> dict[str, Any]:
        """Facts about the split in JSON types: sizes in bytes, completeness, provenance.

        ``bytes`` are those of the shards on the disk, and of a transform's matrices;
        ``times_smaller_than_dense_float32`` compares them with float32 frames padded to
        ``dense_length`` tokens, the layout of the original research.
        """
        r, committed = self.record, self.committed_shards()
        shard_records = (self.ledger.find_shard(shard, r) for shard in committed)
        records = [record for record in shard_records if record is not None]
        stored = sum(file.bytes for record in records for file in record.files.values())
        stored += get_encoding(r.encoding).matrix_bytes(len(r.layers), r.hidden_size)
        done = sum(record.examples for record in records)
        given = r.provenance.get("max_length")
        length = given if isinstance(given, int) and given > 0 else self._longest()
        if r.provenance.get("tokens") == "cls":
            length = 1  # the original too kept no more of these than a vector
        dense = 4 * length * len(r.layers) * r.hidden_size
        return {
            "tag": str(self.tag),
            "split": self.split,
            "complete": len(committed) == r.shards,
            "shards": r.shards,
            "shards_committed": len(committed),
            "examples": r.examples,
            "tokens": r.tokens,
            "keep": self.keep,
            "encoding": r.encoding,
            "compression": r.compression,
            "layers": list(r.layers),
            "hidden_size": r.hidden_size,
            "bytes": stored,
            "bytes_per_example": stored / done if done else None,
            "times_smaller_than_dense_float32": dense * done / stored if stored else None,
            "dense_length": length,
            "nonfinite": sum(record.nonfinite for record in records),
            "format": r.format,
            "provenance": dict(r.provenance),
            "versions": dict(r.versions),
        }

    def _longest(self) -> int:
        """Tokens of the longest example; of a split that does not say it, out of its arrays."""
        from bertvision.featurestore.format import arrays

        group, described = arrays.group_key(self.record), self.record.arrays["n_tokens"]
        return int(arrays.read_array(self.storage, group, "n_tokens", described).max())


def is_one_layer(layers: object) -> bool:
    """Whether one layer is named, and not several of them, or all: a text would be its letters."""
    return isinstance(layers, str | Integral)


def _named(layers: int | str | Sequence[int | str]) -> list[int | str]:
    """Layers as a list of names and of Python's own numbers."""
    several: Any = [layers] if is_one_layer(layers) else layers
    try:
        return [each if isinstance(each, str) else operator.index(each) for each in several]
    except TypeError:
        raise InputError(
            f"layers is {layers!r}: give indices of hidden states, such as [0, -1], or names"
        ) from None
