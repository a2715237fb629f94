"""Fill the shards of a plan, once each: lock, plan, then shard after shard with its record."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import zarr
from torch import Tensor

from bertvision.errors import DiskSpaceError, InputError, ProvenanceError
from bertvision.featurestore import arrays
from bertvision.featurestore.encoding import ChannelStats, get_encoding
from bertvision.featurestore.examples import write_examples
from bertvision.featurestore.ledger import Ledger, seal
from bertvision.featurestore.plan import ShardPlan
from bertvision.featurestore.schema import ShardRecord, SnapshotTag, SplitRecord, check_name
from bertvision.featurestore.split import PLAN_ARRAYS, ActivationSplit

CHUNK_TOKENS = 1024
"""Tokens of an inner chunk, which holds one layer: 1 MiB at BERT-large in int8. One layer per chunk
costs training nothing and makes reading one layer of everything about ten times faster."""


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
    """Which activations to write, and from what they come.

    Attributes:
        tag: the snapshot.
        split: its name.
        encoding: int8, bfloat16, float16 or float32.
        layers: indices of the hidden states to keep; 0 is the embedding output.
        hidden_size: channels of a hidden state.
        provenance: everything the activations depend on, as JSON scalars.
    """

    tag: str
    split: str
    encoding: str
    layers: tuple[int, ...]
    hidden_size: int
    provenance: Mapping[str, str | int | float | bool | None]


def expected_bytes(plan: ShardPlan, spec: SplitSpec) -> int:
    """Bytes the shards of a split will take on the disk, checksums included."""
    encoding = get_encoding(spec.encoding)
    per_token = len(spec.layers) * (
        spec.hidden_size * encoding.itemsize + (4 if encoding.quantised else 0)
    )
    chunks = -(-plan.shard_tokens // _chunk_tokens(plan)) * len(spec.layers)
    index = chunks * (16 + 4) + 4
    return plan.n_shards * (plan.shard_tokens * per_token + index)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that holds ``path`` or, where it does not exist yet, its parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class SplitWriter:
    """Writes one split while it holds its lock; made by `open_writer`."""

    def __init__(self, store: Path, ledger: Ledger, record: SplitRecord) -> None:
        self.split = ActivationSplit(store, record.tag, record.split)
        self.plan = self.split.plan
        self._root = store
        self._ledger = ledger
        group = zarr.open_group(self.split.group_path, mode="r+")
        self._arrays = {"hidden_states": arrays.open_any(group, "hidden_states", writing=True)}
        if self.split.encoding.quantised:
            self._arrays["scale"] = arrays.open_any(group, "scale", writing=True)

    @property
    def stats(self) -> ChannelStats | None:
        """Channel statistics to encode with."""
        return self.split.stats

    def pending(self) -> list[int]:
        """Shards that are not committed yet."""
        return self.split.missing_shards()

    def write_shard(self, shard: int, codes: Tensor, scale: Tensor | None) -> ShardRecord:
        """Write a whole shard durably, then commit it.

        Args:
            shard: of the plan.
            codes: (real tokens of the shard, layers, hidden) from `encode`, on the CPU.
            scale: (real tokens of the shard, layers) or None.

        Raises:
            InputError: the shapes are not those of the plan.
            DiskSpaceError: the disk is full; what was committed before stays whole.
        """
        tokens = self.plan.tokens_of(shard)
        record = self.split.record
        shape = (tokens, len(record.layers), record.hidden_size)
        if tuple(codes.shape) != shape:
            raise InputError(f"shard {shard} takes codes {shape}, not {tuple(codes.shape)}")
        if codes.dtype == torch.bfloat16:
            codes = codes.view(torch.uint16)
        values = {"hidden_states": codes} | ({} if scale is None else {"scale": scale})
        if values.keys() != self._arrays.keys():
            raise InputError(f"encoding {record.encoding} takes {' and '.join(self._arrays)}")
        files = {}
        try:
            for name, tensor in values.items():
                self._write(name, shard, tensor.numpy())
                files[name] = seal(self.split.shard_path(name, shard), self.split.group_path)
            committed = ShardRecord(
                shard=shard, examples=len(self.plan.examples_of(shard)), tokens=tokens, files=files
            )
            self._ledger.commit_shard(committed)
        except OSError as error:
            if full := _disk_error(error, self._root):
                raise full from error
            raise
        return committed

    def _write(self, name: str, shard: int, values: npt.NDArray[Any]) -> None:
        capacity = self.plan.shard_tokens
        whole = np.zeros((capacity, *values.shape[1:]), values.dtype)
        whole[: len(values)] = values
        # the whole shard in one write: a part of one would be read, changed and written again
        self._arrays[name][shard * capacity : (shard + 1) * capacity] = whole


@contextmanager
def open_writer(
    store: Path,
    spec: SplitSpec,
    contents: SplitContents,
    calibrate: Callable[[], ChannelStats],
) -> Iterator[SplitWriter]:
    """Create a split, or take up one that was begun from exactly the same things.

    Args:
        store: folder of the store; made if it does not exist.
        spec: what to write.
        contents: the plan and everything beside the activations.
        calibrate: called when a quantised split is created; gives its channel statistics.

    Yields:
        A writer that holds the split's lock.

    Raises:
        LockedError: another process is writing the split.
        ProvenanceError: the split was begun from something else; the message names the field.
    """
    SnapshotTag(spec.tag)
    check_name(spec.split, "split")
    ledger = Ledger(store, spec.tag, spec.split)
    try:
        with ledger.lock():
            ledger.sweep()
            if ledger.exists:
                record = ledger.read_split()
                _check_same(record, _record(spec, contents, {}, record.examples_sha256), store)
            else:
                record = _create(store, ledger, spec, contents, calibrate)
            with _store_lock(store):
                write_examples(store, spec.split, contents.examples)
                arrays.consolidate(store / "arrays.zarr")
            yield SplitWriter(store, ledger, record)
    except OSError as error:
        if full := _disk_error(error, store):
            raise full from error
        raise


def _create(
    store: Path,
    ledger: Ledger,
    spec: SplitSpec,
    contents: SplitContents,
    calibrate: Callable[[], ChannelStats],
) -> SplitRecord:
    """Write all arrays but the activations, then commit the split's record."""
    plan, encoding = contents.plan, get_encoding(spec.encoding)
    stats = calibrate() if encoding.quantised else None
    with _store_lock(store):
        digest = write_examples(store, spec.split, contents.examples)
    path = store / "arrays.zarr" / spec.tag / spec.split
    if path.exists():
        shutil.rmtree(path)  # no record names it: what an interrupted creation left
    zarr.open_group(store / "arrays.zarr", mode="a").require_group(spec.tag)
    group = zarr.create_group(path)
    digests = {}
    for name, (values, dims) in _metadata_arrays(contents, stats).items():
        arrays.write_array(group, name, values, dims)
        digests[name] = arrays.digest(values)
    axis, layers = plan.n_shards * plan.shard_tokens, len(spec.layers)
    chunk = _chunk_tokens(plan)
    arrays.create_sharded(
        group,
        "hidden_states",
        (axis, layers, spec.hidden_size),
        encoding.zarr_dtype,
        shards=(plan.shard_tokens, layers, spec.hidden_size),
        chunks=(chunk, 1, spec.hidden_size),
        dims=("token", "layer", "hidden"),
    )
    if encoding.quantised:
        arrays.create_sharded(
            group,
            "scale",
            (axis, layers),
            "float32",
            shards=(plan.shard_tokens, layers),
            chunks=(plan.shard_tokens, layers),
            dims=("token", "layer"),
        )
    record = _record(spec, contents, digests, digest)
    group.attrs.update({"bertvision": record.model_dump(mode="json")})
    for file in path.rglob("*"):
        if file.is_file():
            seal(file, store)
    ledger.commit_split(record)
    return record


def _metadata_arrays(
    contents: SplitContents, stats: ChannelStats | None
) -> dict[str, tuple[npt.NDArray[Any], tuple[str, ...]]]:
    plan = contents.plan
    found: dict[str, tuple[npt.NDArray[Any], tuple[str, ...]]] = {}
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


def _record(
    spec: SplitSpec, contents: SplitContents, digests: dict[str, str], examples_sha256: str
) -> SplitRecord:
    plan = contents.plan
    return SplitRecord(
        tag=spec.tag,
        split=spec.split,
        encoding=get_encoding(spec.encoding).name,
        layers=spec.layers,
        hidden_size=spec.hidden_size,
        examples=len(plan),
        tokens=plan.total_tokens,
        shards=plan.n_shards,
        shard_tokens=plan.shard_tokens,
        chunk_tokens=_chunk_tokens(plan),
        permutation_seed=plan.seed,
        plan_sha256=plan.digest,
        arrays_sha256=digests,
        examples_sha256=examples_sha256,
        provenance=dict(spec.provenance),
        versions={
            name: version(name) for name in ("bertvision", "numpy", "torch", "zarr", "zarrs")
        },
    )


def _check_same(stored: SplitRecord, wanted: SplitRecord, store: Path) -> None:
    if difference := stored.difference(wanted):
        field, there, here = difference
        raise ProvenanceError(
            f"{stored.tag}/{stored.split} in {store} was written with {field.strip()} = {there!r}, "
            f"now it is {here!r}: use the same, or another store"
        )


def _store_lock(store: Path) -> filelock.BaseFileLock:
    """Held for moments: what all splits share is written by one of them at a time."""
    return filelock.FileLock(store / "ledger" / ".lock")


def _chunk_tokens(plan: ShardPlan) -> int:
    """The largest divisor of the shard's capacity that is at most `CHUNK_TOKENS`."""
    return next(n for n in range(CHUNK_TOKENS, 0, -1) if plan.shard_tokens % n == 0)


def _disk_error(error: OSError, store: Path) -> DiskSpaceError | None:
    """What a full disk or quota should say; None for any other error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return DiskSpaceError(
        f"the disk of {store} is full: what was committed is whole; free some space and run the "
        "same command again, it goes on from there"
    )
