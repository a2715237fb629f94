"""Create a split: everything beside the activations, all of it known before the encoder runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from bertvision.errors import CorruptStoreError, InputError, ProvenanceError
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.calibration import Calibration
from bertvision.featurestore.format.contents import split_names, split_records
from bertvision.featurestore.format.examples import (
    FOLDER,
    examples_digest,
    has_examples,
    mend_examples,
    remove_examples,
    write_examples,
)
from bertvision.featurestore.format.layout import PLAN_ARRAYS, get_encoding
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.names import CompressionName
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import FEATURES, FORMAT, ROOT, ArrayRecord, SplitRecord
from bertvision.featurestore.format.shard import check_record_size
from bertvision.featurestore.reader import SplitReader
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
    calibrate: Callable[[], Calibration],
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
    check_record_size(contents.plan, len(spec.layers))
    digest = examples_digest(contents.examples, FORMAT)
    calibration = calibrate() if encoding.quantised else None
    group = f"{ROOT}/{ledger.name}"
    with store_lock(storage):  # to the end: a removal takes what no record names for left over
        storage.sweep(FOLDER)
        if first := all(split != spec.split for _, split in split_names(storage)):
            remove_examples(storage, spec.split)  # what is left of one that is gone
        write_examples(storage, spec.split, contents.examples)
        storage.remove(group)  # of an interrupted creation
        try:
            record = SplitRecord(
                **_described(spec, contents),
                arrays=_write_arrays(storage, group, _metadata_arrays(contents, calibration)),
                examples_sha256=digest,
            )
        except (ValidationError, InputError) as error:
            storage.remove(group)
            if first:  # or the corrected examples would be others than those of this attempt
                remove_examples(storage, spec.split)
            reason = error if isinstance(error, InputError) else error.errors()[0]["msg"]
            raise InputError(f"{ledger.name} cannot be stored: {reason}") from None
        _write_metadata(storage, record)
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
        examples_sha256=examples_digest(contents.examples, stored.format),
    )
    if difference := stored.difference(wanted):
        field, there, here = difference
        raise ProvenanceError(
            f"{ledger.name} in {ledger.storage} was written with {field.strip()} = {there!r}, "
            f"now it is {here!r}: use the same, or another store"
        )


def mend_split(
    ledger: Ledger, contents: SplitContents, calibrate: Callable[[], Calibration]
) -> None:
    """Write everything but the shards again, where it comes out as it was recorded.

    The caller holds the split's lock.

    Raises:
        ProvenanceError: an array comes out different.
    """
    record = ledger.read_split()
    reader, found = SplitReader(ledger.storage, ledger.tag, ledger.split), None
    if get_encoding(record.encoding).quantised:
        try:
            found = reader.stats and Calibration(reader.stats, reader.encoding_error)
        except CorruptStoreError:
            found = calibrate().as_stored(reader.error_names)
    values = _metadata_arrays(contents, found)
    for name, (make, dims) in values.items():
        if arrays.array_record(make(), dims) != record.arrays.get(name):
            raise ProvenanceError(
                f"array {name} of {ledger.name} comes out different from what was recorded: "
                "the data, the snapshot or the libraries are not the same; extract into another "
                "store"
            )
    with store_lock(ledger.storage):
        mend_examples(
            *(ledger.storage, record.split, contents.examples),
            *(record.examples_sha256, record.format),
        )
    _write_arrays(ledger.storage, arrays.group_key(record), values)
    _write_metadata(ledger.storage, record)


def write_shared(storage: Storage, spec: SplitSpec, contents: SplitContents) -> None:
    """Write what the splits of a store share: the examples, and the metadata above the splits."""
    with store_lock(storage):
        storage.sweep(FOLDER)
        if not has_examples(storage, spec.split):  # what is there is checked by who reads it
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


_Values = dict[str, tuple[Callable[[], npt.NDArray[Any]], tuple[str, ...]]]
"""By name what makes an array, which is large, and the names of its dimensions."""


def _write_arrays(storage: Storage, group: str, values: _Values) -> dict[str, ArrayRecord]:
    """Write the arrays that go with the plan, of which one at a time is in memory; describe them.

    Raises:
        InputError: an array has more values for each entry than a reader unpacks at once.
    """
    described = {}
    for name, (make, dims) in values.items():
        array = make()
        record = described[name] = arrays.array_record(array, dims)
        if not arrays.chunk_length(record.shape, record.dtype):
            raise InputError(
                f"array {name} has {record.shape[1:]} values for each {dims[0]}, which is more "
                "than is read at once: keep fewer, or several arrays"
            )
        for key, content in arrays.array_files(name, record, array).items():
            storage.write(f"{group}/{key}", content)
    return described


def _write_metadata(storage: Storage, record: SplitRecord) -> None:
    """Write the metadata of a split's Zarr group and of its shards."""
    for key, content in arrays.group_files(record).items():
        storage.write(f"{arrays.group_key(record)}/{key}", content)


def _metadata_arrays(contents: SplitContents, calibration: Calibration | None) -> _Values:
    plan = contents.plan
    found: _Values = {name: (partial(getattr, plan, name), ("example",)) for name in PLAN_ARRAYS}
    for name, values in contents.per_example.items():
        dims = ("example", *_more_dims(name, values))
        found[name] = (partial(values.__getitem__, plan.example_id), dims)
    for name, values in contents.per_token.items():
        found[name] = (partial(plan.place, values, 0), ("token", *_more_dims(name, values)))
    if calibration is not None:
        for name, values in calibration.arrays().items():
            found[name] = (values.copy, ("layer", "hidden")[: values.ndim])
    return found


def _more_dims(name: str, values: npt.NDArray[Any]) -> tuple[str, ...]:
    return tuple(f"{name}_{axis}" for axis in range(1, values.ndim))


def _described(spec: SplitSpec, contents: SplitContents) -> dict[str, Any]:
    """The fields of a split's record that are known before anything is written."""
    plan = contents.plan
    return {
        "format": FORMAT,
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
        "requires": tuple(sorted(FEATURES)),
        "provenance": dict(spec.provenance),
        "versions": {name: version(name) for name in ("bertvision", "numpy", "torch", "zarr")},
    }
