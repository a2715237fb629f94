"""Move tokens between shards in two passes over them, however large the split is.

The first pass reads the shards of the source in their order, and appends each token, with all its
layers, to the *bucket* of the target shards that it goes to. The second reads bucket after bucket,
permutes it in memory and writes its shards. Buckets hold no indices: their tokens come in the order
of the source, so the permutation says which is which.

Copy a split with its tokens in the order of a seeded permutation.

The copy has the plan of its source: as many tokens in each shard, the same examples, labels and
texts beside them. Only what lies where differs, and two arrays say it: of each stored token the
example that it is of, and its position in that. A copy that was killed is resumed by the same
call, which takes the order from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from bertvision.errors import CorruptStoreError, DiskSpaceError, InputError, whole_number
from bertvision.featurestore.creation import (
    Values,
    commit_new,
    library_versions,
    store_lock,
    write_root,
)
from bertvision.featurestore.delegation import ShardAttempt, withdraw
from bertvision.featurestore.format.arrays import group_key
from bertvision.featurestore.format.examples import examples_digest
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.logits import OUTPUTS, TOP_LOGITS, TopLogits
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
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import full_disk_named
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.tokens.order import tokens_of_shards
from bertvision.featurestore.writing.buffer import ShardContent
from bertvision.featurestore.writing.origin import check_record


class Scatter:
    """Writes shards of a copy whose tokens have another order.

    Args:
        source: Source with the tokens.
        copy: Copy with as many tokens in each shard, whose lock the caller holds.
        order: (tokens,) the number of each token of the copy among those of the source.
        memory: bytes of codes that are in memory at a time, at least those of a shard.
    """

    def __init__(
        self,
        source: ActivationSplit,
        copy: ActivationSplit,
        order: npt.NDArray[np.int64],
        memory: int,
    ) -> None:
        self._source, self._copy, self._order = source, copy, order
        counts = tokens_of_shards(source.plan)
        self._starts = np.concatenate([[0], np.cumsum(counts)])  # of each shard among all tokens
        codes, scale = source.buffers(1, len(source.record.layers))
        fields: list[Any] = [("codes", codes.dtype, (codes.shape[0], codes.shape[2]))]
        if scale is not None:
            fields.append(("scale", scale.dtype, scale.shape[1:]))
        for name, shape in source.record.top.shapes.items() if source.record.top else ():
            fields.append((name, OUTPUTS[name], shape))
        self._row = np.dtype(fields)
        """A token as it lies in a bucket: its codes (layers, width) and scales (layers, …)."""
        self._at_once = max(1, memory // (int(counts.max()) * self._row.itemsize))

    def run(self, shards: Sequence[int], folder: Path | None) -> None:
        """Write these shards of the copy, each durably, then its record.

        Args:
            shards: ascending numbers.
            folder: Folder of the buckets; None lets them lie beside the shards of a local store.

        Raises:
            CorruptStoreError: the source is damaged, or a bucket changed meanwhile.
            DiskSpaceError: the disk has no room.
        """
        buckets = self._portions(shards)
        storage, group = self._copy.storage, group_key(self._copy.record)
        with ExitStack() as locks:
            if folder is None and isinstance(storage, LocalStorage):
                self._check_room(shards)
                # under names that readers ignore and that the next writer sweeps away
                locks.callback(storage.sweep, group)
                place = storage.root / group
            else:
                made = TemporaryDirectory(prefix="bertvision-shuffle-", dir=folder)
                place = Path(locks.enter_context(made))
            files = [_Bucket(place / f".bucket-{i:05d}.tmp") for i in range(len(buckets))]
            self._fill(buckets, files)
            replaced = self._replaced()
            for bucket, file in zip(buckets, files, strict=True):
                self._empty(bucket, file, replaced)

    def _portions(self, shards: Sequence[int]) -> list[Sequence[int]]:
        """As many shards at a time as fit in memory."""
        return [shards[i : i + self._at_once] for i in range(0, len(shards), self._at_once)]

    def _check_room(self, shards: Sequence[int]) -> None:
        storage = self._copy.storage
        tokens = sum(int(self._starts[shard + 1] - self._starts[shard]) for shard in shards)
        needed, free = 2 * tokens * self._row.itemsize, storage.free_bytes()
        if free is not None and free < needed:
            raise DiskSpaceError(
                f"shuffling {self._source.name} takes up to {needed:,} bytes, half of them for a "
                f"while, and {storage} has room for {free:,}: free some space, or name a folder of "
                "another disk for the buckets (--scratch)"
            )

    def _fill(self, buckets: Sequence[Sequence[int]], files: Sequence[_Bucket]) -> None:
        """Append each token of the source to the bucket that it goes to."""
        none = len(buckets)
        bucket_of = np.full(len(self._order), none, np.min_scalar_type(none))
        for i, bucket in enumerate(buckets):
            bucket_of[self._order[self._tokens(bucket)]] = i
        for shards in self._portions(range(self._source.plan.n_shards)):
            first, last = self._starts[shards[0]], self._starts[shards[-1] + 1]
            rows = np.empty(last - first, self._row)
            for shard in shards:
                begin, end = self._starts[shard : shard + 2] - first
                self._read(shard, rows[begin:end])
            to = bucket_of[first:last]
            order = np.argsort(to, kind="stable")
            ends = np.searchsorted(to[order], np.arange(none + 1))
            for file, begin, end in zip(files, ends, ends[1:], strict=False):
                if begin < end:
                    file.append(rows[order[begin:end]])

    def _read(self, shard: int, rows: npt.NDArray[Any]) -> None:
        """Read a shard of the source, every byte against its checksum."""
        positions = range(len(self._source.record.layers))
        codes, scale = self._source.buffers(len(rows), len(positions))
        reader = self._source.open_shard(shard)
        examples = len(self._source.plan.examples_of(shard))
        reader.read(0, examples, positions, codes, scale)
        if self._source.record.top is not None:
            reader.read_logits(0, examples, TopLogits(*(rows[name] for name in OUTPUTS)))
        reader.close()
        rows["codes"] = codes.transpose(1, 0, 2)
        if scale is not None:
            rows["scale"] = scale

    def _empty(self, bucket: Sequence[int], file: _Bucket, replaced: int) -> None:
        """Write the shards of a bucket, then remove it."""
        stored = file.read(self._row)
        # the number in the bucket of each of its tokens, in the order of the copy
        rank = np.argsort(np.argsort(self._order[self._tokens(bucket)]))
        ends = np.cumsum([self._starts[shard + 1] - self._starts[shard] for shard in bucket])
        for shard, part in zip(bucket, np.split(rank, ends[:-1]), strict=True):
            self._write(shard, stored[part], replaced if shard == 0 else 0)
        file.remove()

    def _write(self, shard: int, rows: npt.NDArray[Any], replaced: int) -> None:
        record, ledger, plan = self._copy.record, self._copy.ledger, self._copy.plan
        runs = plan.examples_of(shard)
        codes = np.ascontiguousarray(rows["codes"].transpose(1, 0, 2))
        scale = None
        if self._copy.encoding.quantised:
            scale = torch.from_numpy(np.ascontiguousarray(rows["scale"]))
        content = ShardContent(
            record,
            shard,
            plan.n_tokens[runs.start : runs.stop].tolist(),
            torch.from_numpy(codes).transpose(0, 1),
            scale,
            replaced,
            self._copy.transform,
            TopLogits(*(rows[name] for name in OUTPUTS)) if record.top else None,
        )
        pieces = content.files()
        keys = {name: shard_key(record, name, shard) for name in pieces}
        written = ShardAttempt(ledger, shard, keys, yields=False)
        for name, chunks in pieces.items():
            written.write(name, chunks)
        written.commit(content.record(record.identity, written.files))

    def _tokens(self, shards: Sequence[int]) -> npt.NDArray[np.int64]:
        """The tokens of shards of the copy, by their numbers among all of it."""
        return np.concatenate([np.arange(*self._starts[shard : shard + 2]) for shard in shards])

    def _replaced(self) -> int:
        """Values of the source that were replaced: it is known by shard, not by token."""
        replaced = (
            self._source.ledger.find_shard(shard, self._source.record)
            for shard in range(self._source.plan.n_shards)
        )
        return sum(record.nonfinite for record in replaced if record is not None)


class _Bucket:
    """A file of tokens, which is not flushed: it is thrown away with whoever wrote it."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest = path, xxhash.xxh3_128()

    def append(self, rows: npt.NDArray[Any]) -> None:
        data = rows.view(np.uint8).data
        self._digest.update(data)
        with open(self._path, "ab") as file:
            file.write(data)

    def read(self, row: np.dtype[Any]) -> npt.NDArray[Any]:
        """All rows, in the order they were appended.

        Raises:
            CorruptStoreError: they are others than those.
        """
        rows = np.fromfile(self._path, row)
        if xxhash.xxh3_128_digest(rows.view(np.uint8).data) != self._digest.digest():
            raise CorruptStoreError(
                f"{self._path} was changed on the disk while it was used: run the same command "
                "again, it goes on from the shards that are whole"
            )
        return rows

    def remove(self) -> None:
        self._path.unlink()


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
        seed: Seed of the permutation.
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
        "requires": tuple(sorted({*FEATURES, SHUFFLED, *({TOP_LOGITS} & {*record.requires})})),
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
    """Maker and dimensions of each array of the copy."""
    plan = source.plan
    order = np.random.default_rng(seed).permutation(plan.total_tokens)
    on_axis = _on_axis(plan)
    entries: Values = {}
    for name, array in source.record.arrays.items():
        make = partial(source.array, name)
        if array.dims[0] == "token":
            make = partial(_moved, source, name, on_axis, order)
        entries[name] = make, array.dims
    n = plan.n_tokens.astype(np.int64)

    def placed(values: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
        out = np.zeros(plan.n_shards * plan.shard_tokens, np.min_scalar_type(most))
        out[on_axis] = values
        return out

    def examples() -> npt.NDArray[Any]:
        return placed(np.repeat(np.arange(len(plan)), n)[order], len(plan))

    def positions() -> npt.NDArray[Any]:
        return placed(order - np.repeat(np.cumsum(n) - n, n)[order], int(n.max()))

    return entries | dict(
        zip(PLACES, ((examples, ("token",)), (positions, ("token",))), strict=True)
    )


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
