"""Repair a store: take back what is damaged, and extract exactly that again."""

from __future__ import annotations

from typing import NamedTuple

from bertvision.errors import CorruptStoreError
from bertvision.featurestore.examples import remove_examples
from bertvision.featurestore.inspect import find_damage
from bertvision.featurestore.ledger import Ledger
from bertvision.featurestore.place import place_of
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.extract import extract
from bertvision.pipelines.workspace import Workspace


class Repaired(NamedTuple):
    """What a repair did to one split.

    Attributes:
        name: ``tag/split``.
        damage: what was wrong, a line each; empty where all was well.
        shards: that were extracted again; the others were not touched.
    """

    name: str
    damage: list[str]
    shards: list[int]


def repair(workspace: Workspace, tag: str, split: str) -> Repaired:
    """Extract again what is damaged in a split, from the snapshot it came from.

    What is whole is not touched. A shard that was never written is not damage: `extract` goes on
    with it.

    Args:
        workspace: with the store and the snapshot.
        tag: of the snapshot.
        split: its name.

    Raises:
        StoreNotFoundError: there is no such split.
        ProvenanceError: the snapshot, the data or the options are not those it was made from.
        CorruptStoreError: its record and the copy of it are both damaged.
    """
    ledger = Ledger(place_of(workspace.activations), tag, split)
    damage = []
    try:
        held = ActivationSplit(workspace.activations, tag, split)
    except CorruptStoreError as error:
        damage.append(str(error))
        ledger.restore_split()
        held = ActivationSplit(workspace.activations, tag, split)
    found = find_damage(held)
    damage += [item.what for item in found]
    shards = sorted({item.shard for item in found if item.shard is not None})
    if not damage:
        return Repaired(held.name, [], [])
    with ledger.lock():
        for shard in shards:
            ledger.retract_shard(shard)
        if any(item.examples for item in found):
            remove_examples(ledger.place, split)
    record = held.record
    extract(
        workspace,
        tag,
        splits=[split],
        encoding=record.encoding,
        compression=record.compression,
        layers=record.layers,
        precision=str(record.provenance["precision"]),
        shard_tokens=record.shard_tokens,
        shards=shards,
        nonfinite="record" if record.provenance.get("nonfinite") == "record" else "error",
        mend=True,
    )
    return Repaired(held.name, damage, [shard for shard in shards if shard < record.shards])
