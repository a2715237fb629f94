"""Create a split: everything beside the activations, all of it known before the encoder runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pydantic import ValidationError

from bertvision.errors import CorruptStoreError, InputError, ProvenanceError
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.contents import split_names, split_records
from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.format.examples import remove_examples, write_examples
from bertvision.featurestore.format.layout import PLAN_ARRAYS, get_encoding
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.names import CompressionName
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import ROOT, SplitRecord
from bertvision.featurestore.storage.storage import Storage


@dataclass(frozen=True, eq=False)
class SplitContents:
    """What a split will hold beside the activations, all known before the encoder runs.

    Attributes:
        plan: where each example goes.
        per_token: ragged arrays by name, (tokens, …), examples one after another in data order.
        per_example: arrays by name, (examples, …), in data order.
        examples: the text side.
    """

    plan: ShardPlan
    per_token: Mapping[str, npt.NDArray[Any]]
    per_example: Mapping[str, npt.NDArray[Any]]
    examples: pa.Table


@dataclass(frozen=True)
class SplitSpec:
    """The activations to write, and what they come from.

    Attributes:
        tag: the snapshot.
        split: its name.
        encoding: int8, int4, bfloat16, float16 or float32.
        layers: indices of the hidden states to keep; 0 is the embedding output.
        hidden_size: channels of a hidden state.
        provenance: everything the activations depend on, as JSON scalars.
        compression: of the codes: none, zstd or pcodec (an archive of float encodings).
    """

    tag: str
    split: str
    encoding: str
    layers: tuple[int, ...]
    hidden_size: int
    provenance: Mapping[str, str | int | float | bool | None]
    compression: CompressionName = "none"


def create_split(
    ledger: Ledger,
    spec: SplitSpec,
    contents: SplitContents,
    calibrate: Callable[[], ChannelStats],
) -> None:
    """Write all arrays but the activations, then commit the split's record.

    The caller holds the split's lock.

    Raises:
        CorruptStoreError: shards are recorded, but the split's record is missing.
        InputError: the format cannot hold it, for instance because a compressed layer of a shard
            would be too large.
        ProvenanceError: the store has this split with other examples.
    """
    storage, encoding = ledger.storage, get_encoding(spec.encoding)
    if ledger.shards():
        raise CorruptStoreError(
            f"the record of {ledger.name} in {storage} is missing, but shards of it are recorded: "
            f"`bertvision store repair {ledger.name}` restores it"
        )
    if spec.compression == "pcodec" and np.dtype(encoding.zarr_dtype).itemsize == 1:
        raise InputError(
            f"pcodec takes values of two bytes and more: store {encoding.name} plain or with zstd"
        )
    stats = calibrate() if encoding.quantised else None
    values = _metadata_arrays(contents, stats)
    described = {name: arrays.array_record(*found) for name, found in values.items()}
    with store_lock(storage):  # to the end: a removal takes what no record names for left over
        examples_sha256 = write_examples(storage, spec.split, contents.examples)
        try:
            record = SplitRecord(
                **_described(spec, contents), arrays=described, examples_sha256=examples_sha256
            )
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise InputError(f"{ledger.name} cannot be stored: {reason}") from None
        storage.remove(arrays.group_key(record))  # an interrupted creation left it
        _write_group(storage, record, values)
        ledger.commit_split(record)


def check_split(ledger: Ledger, spec: SplitSpec, contents: SplitContents) -> None:
    """Check that a split was begun from exactly the same things.

    Raises:
        ProvenanceError: it was not; the message names the first field that differs.
    """
    stored = ledger.read_split()
    # not validated: what was stored of another encoding, say, need not fit to this one
    wanted = SplitRecord.model_construct(
        **_described(spec, contents),
        arrays=stored.arrays,
        examples_sha256=stored.examples_sha256,
    )
    if difference := stored.difference(wanted):
        field, there, here = difference
        raise ProvenanceError(
            f"{ledger.name} in {ledger.storage} was written with {field.strip()} = {there!r}, "
            f"now it is {here!r}: use the same, or another store"
        )


def mend_split(
    ledger: Ledger, contents: SplitContents, calibrate: Callable[[], ChannelStats]
) -> None:
    """Write everything but the shards again, where it comes out as it was recorded.

    The caller holds the split's lock.

    Raises:
        ProvenanceError: an array comes out different.
    """
    record = ledger.read_split()
    values = _metadata_arrays(contents, _stored_stats(ledger.storage, record, calibrate))
    for name, found in values.items():
        if arrays.array_record(*found) != record.arrays.get(name):
            raise ProvenanceError(
                f"array {name} of {ledger.name} comes out different from what was recorded: "
                "the data, the snapshot or the libraries are not the same; extract into another "
                "store"
            )
    with store_lock(ledger.storage):
        write_examples(ledger.storage, record.split, contents.examples, record.examples_sha256)
    _write_group(ledger.storage, record, values)


def _stored_stats(
    storage: Storage, record: SplitRecord, calibrate: Callable[[], ChannelStats]
) -> ChannelStats | None:
    """Channel statistics as they are stored; computed again only where they are damaged."""
    if not get_encoding(record.encoding).quantised:
        return None
    try:
        mean, std = (
            arrays.read_array(storage, arrays.group_key(record), name, record.arrays[name])
            for name in ("channel_mean", "channel_std")
        )
    except CorruptStoreError:
        return calibrate()
    return ChannelStats(torch.from_numpy(mean), torch.from_numpy(std))


def write_shared(storage: Storage, spec: SplitSpec, contents: SplitContents) -> None:
    """Write what the splits of a store share: the examples, and the metadata above the splits."""
    with store_lock(storage):
        write_examples(storage, spec.split, contents.examples)
        _write_root(storage)


def _write_root(storage: Storage) -> None:
    """Write the metadata above the splits; the caller holds the store's lock."""
    for key, content in arrays.root_files(split_records(storage)).items():
        # even where the same is there: a killed writer may not have flushed it
        storage.write(f"{ROOT}/{key}", content)


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
    ledger.retract_split()
    with store_lock(storage):
        left = split_names(storage)
        if ledger.split not in (split for _, split in left):
            remove_examples(storage, ledger.split)
        _write_root(storage)
        # the folder last: as long as it is there, the same call goes on
        last_of_tag = ledger.tag not in (tag for tag, _ in left)
        storage.remove(f"{ROOT}/{ledger.tag}" if last_of_tag else group)


def store_lock(storage: Storage) -> AbstractContextManager[None]:
    """Held for moments: what all splits share is written by one of them at a time."""
    return storage.lock("ledger/.lock", "writing the store", wait=True)


_Values = dict[str, tuple[npt.NDArray[Any], tuple[str, ...]]]


def _write_group(storage: Storage, record: SplitRecord, values: _Values) -> None:
    """Write a split's Zarr group: the metadata, and the arrays that go with the plan."""
    for key, content in arrays.group_files(record).items():
        storage.write(f"{arrays.group_key(record)}/{key}", content)
    for name, (array, _) in values.items():
        for key, content in arrays.array_files(name, record.arrays[name], array).items():
            storage.write(f"{arrays.group_key(record)}/{key}", content)


def _metadata_arrays(contents: SplitContents, stats: ChannelStats | None) -> _Values:
    plan = contents.plan
    found: _Values = {}
    for name in PLAN_ARRAYS:
        found[name] = (getattr(plan, name), ("example",))
    for name, values in contents.per_example.items():
        found[name] = (values[plan.example_id], ("example", *_more_dims(name, values)))
    for name, values in contents.per_token.items():
        found[name] = (plan.place(values, 0), ("token", *_more_dims(name, values)))
    if stats is not None:
        found["channel_mean"] = (stats.mean.numpy(), ("layer", "hidden"))
        found["channel_std"] = (stats.std.numpy(), ("layer", "hidden"))
    return found


def _more_dims(name: str, values: npt.NDArray[Any]) -> tuple[str, ...]:
    return tuple(f"{name}_{axis}" for axis in range(1, values.ndim))


def _described(spec: SplitSpec, contents: SplitContents) -> dict[str, Any]:
    """The fields of a split's record that are known before anything is written."""
    plan = contents.plan
    return {
        "tag": str(spec.tag),
        "split": spec.split,
        "encoding": get_encoding(spec.encoding).name,
        "compression": spec.compression,
        "layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "examples": len(plan),
        "tokens": plan.total_tokens,
        "shards": plan.n_shards,
        "shard_tokens": plan.shard_tokens,
        "permutation_seed": plan.seed,
        "plan_sha256": plan.digest,
        "provenance": dict(spec.provenance),
        "versions": {name: version(name) for name in ("bertvision", "numpy", "torch", "zarr")},
    }
