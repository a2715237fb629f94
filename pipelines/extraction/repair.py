"""Repair a store: extract exactly what is damaged again."""

from __future__ import annotations

from typing import NamedTuple

from bertvision.errors import CorruptStoreError
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.opening import open_storage
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.workspace.reproduce import not_extracted, stored_options
from bertvision.pipelines.workspace.workspace import Workspace


class Repaired(NamedTuple):
    """What a repair did to one split.

    Attributes:
        name: ``tag/split``.
        damage: what was wrong, a line each; empty where all was well.
        shards: that were extracted again; the others were not touched.
        lacking: of an incomplete split, what it still lacks; why one could not be repaired.
    """

    name: str
    damage: list[str]
    shards: list[int]
    lacking: str | None


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
    ledger = Ledger(open_storage(workspace.activations), tag, split)
    damage, again = [], set[int]()
    try:
        ledger.read_split()
    except CorruptStoreError as error:
        damage.append(str(error))
        with ledger.lock():
            ledger.restore_split()
    # a damaged plan hides what is wrong with shards, so they are looked at again once it is back
    for _ in range(2):
        held = ActivationSplit(workspace.activations, tag, split)
        found = find_damage(held)
        if not found:
            break
        damage += [item.what for item in found]
        if held.record.is_shuffled:
            source = held.record.provenance.get("shuffled_from")
            again_by = f"remove it and run `bertvision store shuffle {source} {split}` again"
            lacking = f"{held.name} was shuffled from {source}: {again_by}"
            return Repaired(held.name, damage, [], lacking)
        if (reason := not_extracted(held)) is not None:
            again_by = "run `bertvision store import` again from the files that it was made of"
            if "imported_from" not in held.record.provenance:
                again_by = "have that program write it again"
            lacking = f"{reason}, so that nothing here can repair it: remove it and {again_by}"
            return Repaired(held.name, damage, [], lacking)
        shards = [item.shard for item in found if item.shard is not None]
        again.update(shard for shard in shards if shard < held.record.shards)
        # everything beside the shards too, with the options of before
        extract(workspace, tag, stored_options(held), shards=shards, mend=True)
    return Repaired(f"{tag}/{split}", damage, sorted(again), held.lacking())
