"""Remove a split, so that a kill at any moment leaves nothing false."""

from __future__ import annotations

from bertvision.featurestore.creation import store_lock, write_root
from bertvision.featurestore.format.contents import split_names
from bertvision.featurestore.format.examples import remove_examples
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.records import ROOT
from bertvision.featurestore.writing.growing import GrowingLedger


def remove_split(ledger: Ledger) -> None:
    """Remove a split, in an order that a kill at any moment leaves nothing false.

    First the shards are taken back, so that the split counts as unfinished, and extraction could go
    on with it; then go their files, the split's record, what it shared with others, and last its
    folder. What is left after a kill is removed by the same call. The caller holds the split's
    lock.
    """
    storage, group = ledger.storage, f"{ROOT}/{ledger.name}"
    for shard in sorted(ledger.shards()):
        ledger.retract_shard(shard)
    for name in ("hidden_states", "scale"):
        storage.remove(f"{group}/{name}/c")
    GrowingLedger(storage, ledger.tag, ledger.split).remove_beside()
    ledger.retract_split()
    with store_lock(storage):
        left = split_names(storage)
        if ledger.split not in (split for _, split in left):
            remove_examples(storage, ledger.split)
        write_root(storage)
        # the folder last: as long as it is there, the same call goes on
        last_of_tag = ledger.tag not in (tag for tag, _ in left)
        storage.remove(f"{ROOT}/{ledger.tag}" if last_of_tag else group)
