"""Create a split: everything beside the activations, all of it known before the encoder runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from bertvision.errors import CorruptStoreError, InputError, ProvenanceError
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.calibration import Calibration
from bertvision.featurestore.format.examples import (
    FOLDER,
    examples_digest,
    has_examples,
    mend_examples,
    remove_examples,
    write_examples,
)
from bertvision.featurestore.format.layout import PLAN_ARRAYS, TRANSFORM_ARRAYS, get_encoding
from bertvision.featurestore.format.ledger import Ledger, split_names, split_records
from bertvision.featurestore.format.logits import LOGITS, TOP_LOGITS, TopRule
from bertvision.featurestore.format.names import CompressionName
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import FEATURES, FORMAT, ROOT, ArrayRecord, SplitRecord
from bertvision.featurestore.format.shard import check_record_size
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.storage.storage import Storage


@dataclass(frozen=True, eq=False)
class SplitContents:
    """Content of a split beside the activations, all known before the encoder runs.

    Attributes:
        plan: Place of each example.
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
        encoding: One of `layout.ENCODINGS`.
        layers: indices of the hidden states to keep; 0 is the embedding output.
        hidden_size: channels of a hidden state.
        provenance: everything the activations depend on, as JSON scalars.
        compression: Compression of the codes: none, zstd or pcodec (an archive of float encodings).
    """

    tag: str
    split: str
    encoding: str
    layers: tuple[int, ...]
    hidden_size: int
    provenance: Mapping[str, str | int | float | bool | None]
    compression: CompressionName = "none"

    @property
    def top(self) -> TopRule | None:
        """Rule of the log-probabilities that are stored beside; None stores none."""
        return TopRule.parse(self.provenance[LOGITS]) if LOGITS in self.provenance else None


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
    calibration = calibrate() if encoding.calibrated else None
    fields = described(spec, contents) | {"examples_sha256": digest}
    commit_new(ledger, fields, _metadata_arrays(contents, calibration), contents.examples)


def commit_new(
    ledger: Ledger, fields: Mapping[str, Any], values: Values, examples: pa.Table
) -> None:
    """Write all that a new split has beside its shards, then commit its record.

    The caller holds the split's lock; arguments and errors are those of `write_beside`.
    """
    storage = ledger.storage
    with store_lock(storage):  # to the end: a removal takes what no record names for left over
        storage.remove(f"{ROOT}/{ledger.name}")  # of an interrupted creation
        try:
            record = write_beside(ledger, fields, values, examples)
        except InputError:
            storage.remove(f"{ROOT}/{ledger.name}")
            raise
        ledger.commit_split(record)


def write_beside(
    ledger: Ledger, fields: Mapping[str, Any], values: Values, examples: pa.Table
) -> SplitRecord:
    """Write all that a split has beside its shards; only its record is left to be committed.

    The caller holds the store's lock and the split's, which has no record yet, or a growing one.

    Args:
        ledger: Ledger of the split.
        fields: Fields of the record, but for the arrays.
        values: the arrays.
        examples: the text side.

    Raises:
        InputError: the format cannot hold it.
        ProvenanceError: the store has this split with other examples.
    """
    storage, split = ledger.storage, ledger.split
    storage.sweep(FOLDER)
    if first := not any(
        name == split and not Ledger(storage, tag, name).is_growing
        for tag, name in split_names(storage)
    ):
        remove_examples(storage, split)  # what is left of one that is gone
    write_examples(storage, split, examples)
    try:
        written = write_arrays(storage, f"{ROOT}/{ledger.name}", values)
        record = SplitRecord(**fields, arrays=written)
    except (ValidationError, InputError) as error:
        if first:  # or the corrected examples would be others than those of this attempt
            remove_examples(storage, split)
        reason = error if isinstance(error, InputError) else error.errors()[0]["msg"]
        raise InputError(f"{ledger.name} cannot be stored: {reason}") from None
    write_metadata(storage, record)
    return record


def mend_split(
    ledger: Ledger, contents: SplitContents, calibrate: Callable[[], Calibration]
) -> None:
    """Write everything but the shards again, where it comes out as it was recorded.

    The caller holds the split's lock.

    Raises:
        ProvenanceError: an array comes out different.
    """
    record = ledger.read_split()
    reader, calibration = SplitReader(ledger.storage, ledger.tag, ledger.split), None
    if get_encoding(record.encoding).calibrated:
        try:
            calibration = reader.calibration
        except CorruptStoreError:
            calibration = calibrate().as_stored(reader.error_names)
    values = _metadata_arrays(contents, calibration)
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
    write_arrays(ledger.storage, arrays.group_key(record), values)
    write_metadata(ledger.storage, record)


def write_shared(storage: Storage, spec: SplitSpec, contents: SplitContents) -> None:
    """Write what the splits of a store share: the examples, and the metadata above the splits."""
    with store_lock(storage):
        storage.sweep(FOLDER)
        if not has_examples(storage, spec.split):  # what is there is checked by who reads it
            write_examples(storage, spec.split, contents.examples)
        write_root(storage)


def write_root(storage: Storage) -> None:
    """Write the metadata above the splits; the caller holds the store's lock."""
    for key, content in arrays.root_files(split_records(storage)).items():
        # even where the same is there: a killed writer may not have flushed it
        storage.write(f"{ROOT}/{key}", content)


def store_lock(storage: Storage) -> AbstractContextManager[None]:
    """Held for moments: what all splits share is written by one of them at a time."""
    return storage.lock("ledger/.lock", "writing the store", wait=True)


Values = dict[str, tuple[Callable[[], npt.NDArray[Any]], tuple[str, ...]]]
"""By name what makes an array, which is large, and the names of its dimensions."""


def write_arrays(storage: Storage, group: str, values: Values) -> dict[str, ArrayRecord]:
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


def write_metadata(storage: Storage, record: SplitRecord) -> None:
    """Write the metadata of a split's Zarr group and of its shards."""
    for key, content in arrays.group_files(record).items():
        storage.write(f"{arrays.group_key(record)}/{key}", content)


def _metadata_arrays(contents: SplitContents, calibration: Calibration | None) -> Values:
    plan = contents.plan
    entries: Values = {name: (partial(getattr, plan, name), ("example",)) for name in PLAN_ARRAYS}
    for name, values in contents.per_example.items():
        dims = ("example", *more_dims(name, values))
        entries[name] = (partial(values.__getitem__, plan.example_id), dims)
    for name, values in contents.per_token.items():
        entries[name] = (
            partial(plan.place, values, 0),
            ("token", *more_dims(name, values)),
        )
    if calibration is not None:
        for name, values in calibration.arrays().items():
            _, dims = TRANSFORM_ARRAYS.get(name, ("", ("layer", "hidden")[: values.ndim]))
            entries[name] = (values.copy, dims)
    return entries


def more_dims(name: str, values: npt.NDArray[Any]) -> tuple[str, ...]:
    """Names of the dimensions of an array behind its first."""
    return tuple(f"{name}_{axis}" for axis in range(1, values.ndim))


def described(spec: SplitSpec, contents: SplitContents) -> dict[str, Any]:
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
        "requires": tuple(sorted(FEATURES | ({TOP_LOGITS} if spec.top else set()))),
        "provenance": dict(spec.provenance),
        "versions": library_versions(),
    }


_version = cache(version)


def library_versions(*names: str) -> dict[str, str]:
    """Versions of libraries by name; of those that write a split where none is named."""
    return {name: _version(name) for name in names or ("bertvision", "numpy", "torch", "zarr")}
