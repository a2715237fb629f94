"""Copy a split with its tokens in the order of a seeded permutation.

The copy has the plan of its source: as many tokens in each shard, the same examples, labels and
texts beside them. Only what lies where differs, and two arrays say it: of each stored token the
example that it is of, and its position in that. A copy that was killed is gone on with by the same
call, which takes the order from these.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import CorruptStoreError, InputError, whole_number
from bertvision.featurestore.creation import (
    Values,
    commit_new,
    library_versions,
    store_lock,
    write_root,
)
from bertvision.featurestore.delegation import withdraw
from bertvision.featurestore.format.examples import examples_digest
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.names import check_name
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import (
    FEATURES,
    FORMAT,
    PLACES,
    ROOT,
    SHUFFLED,
    SplitRecord,
)
from bertvision.featurestore.shuffling.scatter import Scatter
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import full_disk_named
from bertvision.featurestore.writing.origin import check_record

MEMORY = 512 << 20
"""Bytes of codes that are in memory at a time, at least those of a shard."""


def shuffle_split(
    source: ActivationSplit,
    split: str,
    seed: int = 0,
    *,
    memory: int = MEMORY,
    scratch: Path | None = None,
) -> ActivationSplit:
    """Copy a split into another one of its snapshot, its tokens permuted.

    Stored token t, fill not counted, is token ``numpy.random.default_rng(seed).permutation(tokens)
    [t]`` of the source. Codes and scales move as they are. Until it is done, as many bytes again
    are taken by buckets in ``scratch``.

    Args:
        source: a complete split.
        split: name of the copy.
        seed: of the permutation.
        memory: bytes of codes that are in memory at a time; beside them about 40 for each token.
        scratch: a folder for the buckets; by default beside the shards in a store on a local disk,
            else the system's folder for temporary files.

    Returns:
        The copy, complete.

    Raises:
        InputError: the source has shuffled tokens itself, or the name is its own or none.
        IncompleteSplitError: shards of the source are not committed yet.
        ProvenanceError: the copy was begun from another split, or with another seed.
        LockedError: another process is writing the copy.
        CorruptStoreError: the source is damaged.
        DiskSpaceError: the disk has no room for the copy and its buckets.
    """
    source.require_complete()
    check_name(split, "split")
    seed = whole_number("seed", seed, 0)
    if split == source.split:
        raise InputError(f"{source.name} cannot be shuffled into itself: give the copy a new name")
    storage, ledger = source.storage, Ledger(source.storage, source.tag, split)
    with full_disk_named(storage), ledger.lock():
        withdraw(ledger)
        ledger.sweep()
        storage.sweep(f"{ROOT}/{ledger.name}")
        _begin(ledger, source, seed)
        with store_lock(storage):
            write_root(storage)
        copy = ActivationSplit(storage, source.tag, split)
        if missing := copy.missing_shards():
            Scatter(source, copy, _order(copy), memory).run(missing, scratch)
    return copy


def _begin(ledger: Ledger, source: ActivationSplit, seed: int) -> None:
    """Write all but the shards, or check that this was done for the same copy."""
    table, record = source.table(), source.record
    fields = record.model_dump(exclude={"arrays"}) | {
        "format": FORMAT,
        "requires": tuple(sorted(FEATURES | {SHUFFLED})),
        "split": ledger.split,
        "examples_sha256": examples_digest(table, FORMAT),
        "versions": library_versions(),
        "provenance": record.provenance
        | {
            "shuffle_seed": seed,
            "shuffled_from": source.name,
            "shuffled_from_sha256": record.identity,
        },
    }
    if not (ledger.exists or ledger.shards()):
        commit_new(ledger, fields, _values(source, seed), table)
    stored = ledger.read_split()
    # not validated: it may be another split altogether
    wanted = SplitRecord.model_construct(**fields, arrays=stored.arrays)
    check_record(ledger, stored, wanted)


def _values(source: ActivationSplit, seed: int) -> Values:
    """What makes each array of the copy, and its dimensions."""
    plan = source.plan
    order = np.random.default_rng(seed).permutation(plan.total_tokens)
    on_axis = _on_axis(plan)
    found: Values = {}
    for name, array in source.record.arrays.items():
        make = partial(source.array, name)
        if array.dims[0] == "token":
            make = partial(_moved, source, name, on_axis, order)
        found[name] = make, array.dims
    n = plan.n_tokens.astype(np.int64)

    def placed(values: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
        out = np.zeros(plan.n_shards * plan.shard_tokens, np.min_scalar_type(most))
        out[on_axis] = values
        return out

    def examples() -> npt.NDArray[Any]:
        return placed(np.repeat(np.arange(len(plan)), n)[order], len(plan))

    def positions() -> npt.NDArray[Any]:
        return placed(order - np.repeat(np.cumsum(n) - n, n)[order], int(n.max()))

    return found | dict(zip(PLACES, ((examples, ("token",)), (positions, ("token",))), strict=True))


def _moved(
    source: ActivationSplit,
    name: str,
    on_axis: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
) -> npt.NDArray[Any]:
    """A per-token array of the source, in the order of the copy."""
    values = source.array(name)
    out = np.zeros_like(values)
    out[on_axis] = values[on_axis[order]]
    return out


def _on_axis(plan: ShardPlan) -> npt.NDArray[np.int64]:
    """(tokens,) where each real token lies on the token axis."""
    n = plan.n_tokens.astype(np.int64)
    return np.repeat(plan.first_token - (np.cumsum(n) - n), n) + np.arange(plan.total_tokens)


def _order(copy: ActivationSplit) -> npt.NDArray[np.int64]:
    """(tokens,) the number of each stored token among those of the source.

    It is read, not drawn again: another version of NumPy may draw another permutation.

    Raises:
        CorruptStoreError: it is no permutation.
    """
    n = copy.plan.n_tokens.astype(np.int64)
    parts = [copy.token_places(shard) for shard in range(copy.plan.n_shards)]
    examples, positions = (np.concatenate(part) for part in zip(*parts, strict=True))
    known = bool(examples.max() < len(n)) and bool((positions < n[examples]).all())
    order = (np.cumsum(n) - n)[examples] + positions.astype(np.int64) if known else n[:0]
    seen = np.zeros(copy.plan.total_tokens, bool)
    seen[order] = True
    if not seen.all():
        raise CorruptStoreError(
            f"the tokens of {copy.name} are not those of its plan, each once: remove it and "
            "shuffle its source again"
        )
    return order
