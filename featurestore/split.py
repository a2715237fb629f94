"""ActivationSplit: read the activations of one split of one snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import zarr

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    UnknownNameError,
)
from bertvision.featurestore import arrays
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.encoding import ChannelStats, get_encoding
from bertvision.featurestore.examples import read_examples
from bertvision.featurestore.ledger import Ledger
from bertvision.featurestore.plan import ShardPlan
from bertvision.featurestore.schema import SnapshotTag, SplitRecord, check_name

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr

PLAN_ARRAYS = ("example_id", "n_tokens", "first_token", "shard")


class ActivationSplit(Sequence[torch.Tensor]):
    """The activations of one split of one snapshot.

    Indexing gives the float32 tensor (seq, hidden, layers) of an example, in stored order; its
    row in the data it was made from is ``plan.example_id[i]``.
    """

    def __init__(self, store: Path, tag: str, split: str) -> None:
        self.store = store
        self.tag = SnapshotTag(tag)
        self.split = check_name(split, "split")
        self.ledger = Ledger(store, self.tag, self.split)
        self.record: SplitRecord = self.ledger.read_split()
        self.encoding = get_encoding(self.record.encoding)
        self.group_path = store / "arrays.zarr" / self.tag / self.split
        self._checked: set[int] = set()

    @property
    def name(self) -> str:
        """``tag/split``."""
        return f"{self.tag}/{self.split}"

    @cached_property
    def _group(self) -> zarr.Group:
        try:
            return zarr.open_group(self.group_path, mode="r")
        except FileNotFoundError:
            raise CorruptStoreError(f"the arrays of {self.name} are missing") from None

    def array(self, name: str) -> npt.NDArray[Any]:
        """A per-example or per-token array of the split, whole: (examples, …) or (token axis, …).

        Raises:
            UnknownNameError: the split has no such array.
        """
        if name not in self.record.arrays_sha256:
            raise UnknownNameError(
                f"{self.name} has no array {name!r}: it has "
                f"{', '.join(sorted(self.record.arrays_sha256))}"
            )
        stored = arrays.open_any(self._group, name)
        out: npt.NDArray[Any] = np.empty(stored.shape, stored.dtype)
        arrays.read_into(stored, (slice(None),) * out.ndim, out)
        return out

    @cached_property
    def plan(self) -> ShardPlan:
        """Where each example lies; checked against the digest in the ledger."""
        record = self.record
        plan = ShardPlan(
            **{name: self.array(name) for name in PLAN_ARRAYS},
            shard_tokens=record.shard_tokens,
            seed=record.permutation_seed,
        )
        if plan.digest != record.plan_sha256:
            raise CorruptStoreError(f"the plan of {self.name} is not the one the ledger recorded")
        return plan

    @cached_property
    def stats(self) -> ChannelStats | None:
        """Channel statistics of the quantised encodings, (layers, hidden) each."""
        if not self.encoding.quantised:
            return None
        mean, std = (self.array(f"channel_{name}") for name in ("mean", "std"))
        return ChannelStats(torch.from_numpy(mean), torch.from_numpy(std))

    def stats_of(self, positions: Sequence[int]) -> ChannelStats | None:
        """Channel statistics at these positions of the stored layer axis."""
        if self.stats is None or list(positions) == list(range(len(self.record.layers))):
            return self.stats
        index = torch.as_tensor(positions)
        return ChannelStats(self.stats.mean[index], self.stats.std[index])

    @cached_property
    def _codes(self) -> zarr.Array[Any]:
        r = self.record
        shape = (r.shards * r.shard_tokens, len(r.layers), r.hidden_size)
        return arrays.open_array(self._group, "hidden_states", shape, self.encoding.zarr_dtype)

    @cached_property
    def _scale(self) -> zarr.Array[Any]:
        shape = (self.record.shards * self.record.shard_tokens, len(self.record.layers))
        return arrays.open_array(self._group, "scale", shape, "float32")

    @property
    def is_complete(self) -> bool:
        """Whether every shard of the plan is committed."""
        return not self.missing_shards()

    def missing_shards(self) -> list[int]:
        """Shards of the plan that the ledger does not name."""
        return sorted(set(range(self.record.shards)) - self.ledger.shards())

    def require_complete(self) -> ActivationSplit:
        """Return the split itself, if it is complete.

        Raises:
            IncompleteSplitError: shards are not committed yet.
        """
        if missing := self.missing_shards():
            raise IncompleteSplitError(
                f"{self.name} lacks {len(missing)} of {self.record.shards} shards (first: "
                f"{missing[0]}): run `bertvision extract --checkpoint {self.tag} "
                f"--split {self.split}` again to finish it"
            )
        return self

    def layer_positions(self, layers: Sequence[int] | None) -> list[int]:
        """Positions on the stored layer axis of hidden-state indices (negative ones from the end).

        Raises:
            InputError: a layer is not stored, or named twice.
        """
        stored = self.record.layers
        if layers is None:
            return list(range(len(stored)))
        wanted = [stored[layer] if -len(stored) <= layer < 0 else layer for layer in layers]
        for given, layer in zip(layers, wanted, strict=True):
            if layer not in stored:
                raise InputError(
                    f"layer {given} is not stored in {self.name}: "
                    f"it holds {', '.join(map(str, stored))}"
                )
        if len(set(wanted)) != len(wanted) or not wanted:
            raise InputError(f"layers {list(layers)} are {wanted}: name at least one, each once")
        return [stored.index(layer) for layer in wanted]

    def read_chunks(
        self,
        shard: int,
        tokens: slice,
        positions: Sequence[int],
        codes: npt.NDArray[Any],
        scale: npt.NDArray[np.float32] | None,
    ) -> None:
        """Read whole chunks of one shard into memory that is already there.

        Only whole chunks, because a checksum is over a chunk: zarrs reads a part of one without
        looking at it.

        Args:
            shard: of the plan.
            tokens: within the shard; start and stop are multiples of ``record.chunk_tokens``.
            positions: on the stored layer axis, from `layer_positions`.
            codes: (stop − start, layers, hidden), C-contiguous, in the encoding's Zarr dtype.
            scale: (stop − start, layers) float32, for quantised encodings.

        Raises:
            IncompleteSplitError: the shard is not committed.
            CorruptStoreError: its files are missing, of another length, or fail their checksum.
        """
        self._check_shard(shard)
        capacity = self.record.shard_tokens
        rows = slice(shard * capacity + tokens.start, shard * capacity + tokens.stop)
        first, last = positions[0], positions[-1]
        try:
            if list(positions) == list(range(first, last + 1)):
                arrays.read_into(self._codes, (rows, slice(first, last + 1)), codes)
            else:
                layer = np.empty((codes.shape[0], 1, codes.shape[2]), codes.dtype)
                for i, position in enumerate(positions):
                    arrays.read_into(self._codes, (rows, slice(position, position + 1)), layer)
                    codes[:, i] = layer[:, 0]
            if scale is not None:
                whole = np.empty((capacity, len(self.record.layers)), np.float32)
                arrays.read_into(
                    self._scale, (slice(shard * capacity, (shard + 1) * capacity),), whole
                )
                scale[...] = whole[tokens, list(positions)]
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{self.name} shard {shard}: {error}") from None

    def read(
        self, examples: Sequence[int] | npt.NDArray[np.integer], layers: Sequence[int] | None = None
    ) -> ActivationBatch:
        """Read some examples, packed in the order given.

        Args:
            examples: positions in the split.
            layers: indices of hidden states (0 is the embedding output, −1 the last), or all.

        Raises:
            InputError: an example or layer is not there.
            IncompleteSplitError: an example's shard is not committed.
            CorruptStoreError: what is stored is damaged.
        """
        wanted = np.asarray(examples, dtype=np.int64).reshape(-1)
        if wanted.size == 0 or wanted.min() < 0 or wanted.max() >= len(self):
            raise InputError(
                f"examples {wanted[:5].tolist()}: name at least one, each from 0 to {len(self) - 1}"
            )
        positions = self.layer_positions(layers)
        plan = self.plan
        lengths = plan.n_tokens[wanted].astype(np.int64)
        out_start = np.cumsum(lengths) - lengths
        shape = (int(lengths.sum()), len(positions))
        codes = np.empty((*shape, self.record.hidden_size), self.encoding.zarr_dtype)
        scale = np.empty(shape, np.float32) if self.encoding.quantised else None
        shard_of = plan.shard[wanted]
        for shard in np.unique(shard_of):
            members = np.flatnonzero(shard_of == shard)
            start = plan.first_token[wanted[members]] - int(shard) * plan.shard_tokens
            chunk = self.record.chunk_tokens
            low = int(start.min()) // chunk * chunk
            high = -(-int((start + lengths[members]).max()) // chunk) * chunk
            part = np.empty((high - low, *codes.shape[1:]), codes.dtype)
            part_scale = None if scale is None else np.empty(part.shape[:2], np.float32)
            self.read_chunks(int(shard), slice(low, high), positions, part, part_scale)
            for i, s in zip(members, start - low, strict=True):
                target = slice(out_start[i], out_start[i] + lengths[i])
                codes[target] = part[s : s + lengths[i]]
                if scale is not None and part_scale is not None:
                    scale[target] = part_scale[s : s + lengths[i]]
        return self.batch(codes, scale, wanted, positions, self.labels)

    @cached_property
    def labels(self) -> dict[str, npt.NDArray[Any]]:
        """The per-example arrays beside the plan's own, by name: each (examples, …)."""
        names = (n for n in self.record.arrays_sha256 if n not in PLAN_ARRAYS)
        return {n: self.array(n) for n in names if self.dims(n)[0] == "example"}

    def dims(self, name: str) -> tuple[str, ...]:
        """Dimension names of a stored array."""
        metadata = arrays.open_any(self._group, name).metadata
        return tuple(str(d) for d in getattr(metadata, "dimension_names", None) or ("",))

    def batch(
        self,
        codes: npt.NDArray[Any],
        scale: npt.NDArray[np.float32] | None,
        examples: npt.NDArray[np.int64],
        positions: Sequence[int],
        labels: Mapping[str, npt.NDArray[Any]],
    ) -> ActivationBatch:
        """Wrap packed codes of ``examples`` as a batch; nothing is copied but the labels."""
        tensor = torch.from_numpy(codes)
        return ActivationBatch(
            codes=tensor.view(torch.bfloat16) if self.encoding.name == "bfloat16" else tensor,
            scale=None if scale is None else torch.from_numpy(scale),
            stats=self.stats_of(positions),
            lengths=torch.from_numpy(self.plan.n_tokens[examples].astype(np.int64)),
            examples=torch.from_numpy(examples),
            labels={name: torch.from_numpy(values[examples]) for name, values in labels.items()},
        )

    def __len__(self) -> int:
        return self.record.examples

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = int(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"example {i} is outside {self.name}, which has {len(self)}")
        return self.read([i % len(self)]).unpack()[0]

    def table(self) -> pa.Table:
        """The text side of the split; rows are those that the task's index arrays point to."""
        return read_examples(self.store, self.split, self.record.examples_sha256)

    def dask(self, layers: Sequence[int] | None = None) -> da.Array:
        """Real tokens as a lazy float32 array (token, layer, hidden), a chunk per shard."""
        from bertvision.featurestore.lazy import to_dask

        return to_dask(self, layers)

    def to_xarray(self, layers: Sequence[int] | None = None) -> xr.Dataset:
        """The split as a lazy dataset (see `lazy.to_dataset`)."""
        from bertvision.featurestore.lazy import to_dataset

        return to_dataset(self, layers)

    def info(self) -> dict[str, Any]:
        """What the split holds, in JSON types (see `inspect.info`)."""
        from bertvision.featurestore.inspect import info

        return info(self)

    def verify(self) -> list[str]:
        """Read everything again and compare it with the ledger (see `inspect.verify`)."""
        from bertvision.featurestore.inspect import verify

        return verify(self)

    def shard_path(self, name: str, shard: int) -> Path:
        """The file of one array's shard."""
        ndim = 3 if name == "hidden_states" else 2
        return self.group_path / arrays.shard_key(name, shard, ndim)

    def _check_shard(self, shard: int) -> None:
        """Once per shard: it is committed, and its files have the recorded lengths.

        zarr reads a missing or empty shard file as zeros without a word, so this is what stands
        between a lost file and invented data; inside the file the checksums take over.
        """
        if shard in self._checked:
            return
        record = self.ledger.find_shard(shard)
        if record is None:
            raise IncompleteSplitError(
                f"{self.name} shard {shard} is not written: run `bertvision extract "
                f"--checkpoint {self.tag} --split {self.split}` again to finish it"
            )
        for name, file in record.files.items():
            path = self.shard_path(name, shard)
            size = path.stat().st_size if path.is_file() else None
            if size != file.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CorruptStoreError(
                    f"{self.name} shard {shard}: {name} {found}, the ledger says {file.bytes}; "
                    "`bertvision store verify` lists all damage"
                )
        self._checked.add(shard)
