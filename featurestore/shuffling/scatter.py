"""Move tokens between shards in two passes over them, however large the split is.

The first pass reads the shards of the source in their order, and appends each token, with all its
layers, to the *bucket* of the target shards that it goes to. The second reads bucket after bucket,
permutes it in memory and writes its shards. Buckets hold no indices: their tokens come in the order
of the source, so the permutation says which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from bertvision.errors import CorruptStoreError, DiskSpaceError
from bertvision.featurestore.delegation import ShardAttempt
from bertvision.featurestore.format.arrays import group_key
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.tokens.selection import tokens_of_shards
from bertvision.featurestore.writing.shards import ShardContent


class Scatter:
    """Writes shards of a copy whose tokens have another order.

    Args:
        source: with the tokens.
        copy: with as many tokens in each shard, whose lock the caller holds.
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
        self._row = np.dtype(fields)
        """A token as it lies in a bucket: its codes (layers, width) and scales (layers, …)."""
        self._at_once = max(1, memory // (int(counts.max()) * self._row.itemsize))

    def run(self, shards: Sequence[int], folder: Path | None) -> None:
        """Write these shards of the copy, each durably, then its record.

        Args:
            shards: ascending numbers.
            folder: for the buckets; None lets them lie beside the shards of a local store.

        Raises:
            CorruptStoreError: the source is damaged, or a bucket changed meanwhile.
            DiskSpaceError: the disk has no room.
        """
        buckets = self._portions(shards)
        storage, group = self._copy.storage, group_key(self._copy.record)
        with ExitStack() as held:
            if folder is None and isinstance(storage, LocalStorage):
                self._check_room(shards)
                # under names that readers ignore and that the next writer sweeps away
                held.callback(storage.sweep, group)
                place = storage.root / group
            else:
                made = TemporaryDirectory(prefix="bertvision-shuffle-", dir=folder)
                place = Path(held.enter_context(made))
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
        reader.read(0, len(self._source.plan.examples_of(shard)), positions, codes, scale)
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
        found = (
            self._source.ledger.find_shard(shard, self._source.record)
            for shard in range(self._source.plan.n_shards)
        )
        return sum(record.nonfinite for record in found if record is not None)


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
