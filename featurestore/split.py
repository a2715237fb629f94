"""ActivationSplit: read the activations of one split of one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

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
from bertvision.featurestore.place import Place, place_of
from bertvision.featurestore.plan import PLAN_ARRAYS, ShardPlan
from bertvision.featurestore.schema import SnapshotTag, SplitRecord, check_name
from bertvision.featurestore.shard import ShardReader

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr

Empty: TypeAlias = Callable[[tuple[int, ...], str], npt.NDArray[Any]]


class ActivationSplit(Sequence[torch.Tensor]):
    """The activations of one split of one snapshot.

    Indexing gives the float32 tensor (seq, hidden, layers) of an example, in stored order; its
    row in the data it was made from is ``plan.example_id[i]``.
    """

    def __init__(self, store: str | Path | Place, tag: str, split: str) -> None:
        self.place = place_of(store)
        self.tag = SnapshotTag(tag)
        self.split = check_name(split, "split")
        self.ledger = Ledger(self.place, self.tag, self.split)
        self.record: SplitRecord = self.ledger.read_split()
        self.encoding = get_encoding(self.record.encoding)
        self._last: tuple[int, ShardReader] | None = None

    def __repr__(self) -> str:
        r = self.record
        return (
            f"<ActivationSplit {self.name}: {r.examples} examples, {len(r.layers)} layers of "
            f"{r.hidden_size}, {r.encoding}>"
        )

    @property
    def name(self) -> str:
        """``tag/split``."""
        return f"{self.tag}/{self.split}"

    def array(self, name: str) -> npt.NDArray[Any]:
        """A per-example or per-token array of the split, whole: (examples, …) or (token axis, …).

        Raises:
            UnknownNameError: the split has no such array.
            CorruptStoreError: it is missing or damaged.
        """
        if name not in self.record.arrays:
            raise UnknownNameError(
                f"{self.name} has no array {name!r}: it has {', '.join(sorted(self.record.arrays))}"
            )
        record = self.record.arrays[name]
        try:
            return arrays.read_array(self.place, arrays.group_key(self.record), name, record)
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{self.name}: {error}") from None

    @cached_property
    def plan(self) -> ShardPlan:
        """Where each example lies.

        Raises:
            CorruptStoreError: the ledger or the plan's arrays are damaged.
        """
        record = self.record
        plan = ShardPlan(
            **{name: self.array(name) for name in PLAN_ARRAYS},
            shard_tokens=record.shard_tokens,
            seed=record.permutation_seed,
        )
        try:
            plan.check()
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{self.name}: {error}") from None
        if (len(plan), plan.n_shards) != (record.examples, record.shards):
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

    @property
    def is_complete(self) -> bool:
        """Whether every shard of the plan is committed."""
        return not self.missing_shards()

    def missing_shards(self) -> list[int]:
        """Shards of the plan that the ledger does not name."""
        # of the plan, which is checked: a record alone may claim any number
        return sorted(set(range(self.plan.n_shards)) - self.ledger.shards())

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

    def open_shard(self, shard: int) -> ShardReader:
        """Open a committed shard.

        Raises:
            IncompleteSplitError: it is not committed.
            CorruptStoreError: its files are missing, of another length, or fail their checksum.
        """
        committed = self.ledger.find_shard(shard)
        if committed is None:
            raise IncompleteSplitError(
                f"{self.name} shard {shard} is not written: run `bertvision extract "
                f"--checkpoint {self.tag} --split {self.split}` again to finish it"
            )
        examples = self.plan.examples_of(shard)
        lengths = self.plan.n_tokens[examples.start : examples.stop]
        return ShardReader(self.place, self.record, committed, lengths)

    def buffers(
        self, tokens: int, layers: int, empty: Empty = np.empty
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Memory to read into: codes (layers, tokens, width), scale (tokens, layers, …) or None.

        Args:
            tokens: how many.
            layers: how many.
            empty: makes an uninitialised array of a shape and type.
        """
        encoding, hidden = self.encoding, self.record.hidden_size
        codes = empty((layers, tokens, encoding.codes_size(hidden)), encoding.zarr_dtype)
        if not encoding.quantised:
            return codes, None
        scale_shape = (tokens, layers, *encoding.scale_shape(hidden))
        return codes, empty(scale_shape, encoding.scale_dtype)

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
        lengths = self.plan.n_tokens[wanted].astype(np.int64)
        self._shard(int(self.plan.shard[wanted[0]]))  # what it lacks is said before memory is taken
        codes, scale = self.buffers(int(lengths.sum()), len(positions))
        self.gather(wanted, self._shard, positions, codes, scale)
        return self.batch(codes, scale, wanted, positions, self.labels)

    def gather(
        self,
        examples: npt.NDArray[np.int64],
        shard_of: Callable[[int], ShardReader],
        positions: Sequence[int],
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
    ) -> None:
        """Read examples one after another into the memory of `buffers`."""
        plan = self.plan
        ends = np.cumsum(plan.n_tokens[examples], dtype=np.int64).tolist()
        # shard by shard, so that one is open at a time where `shard_of` keeps no more
        for i in np.argsort(plan.shard[examples], kind="stable").tolist():
            example, end = int(examples[i]), ends[i]
            begin, shard = end - int(plan.n_tokens[example]), int(plan.shard[example])
            first = example - int(plan.shard_starts[shard])
            scales = None if scale is None else scale[begin:end]
            shard_of(shard).read(first, first + 1, positions, codes[:, begin:end], scales)

    def _shard(self, shard: int) -> ShardReader:
        """The shard that was read last stays open: neighbours are often read together."""
        if self._last is None or self._last[0] != shard:
            self._last = shard, self.open_shard(shard)
        return self._last[1]

    @cached_property
    def labels(self) -> dict[str, npt.NDArray[Any]]:
        """The per-example arrays beside the plan's own, by name: each (examples, …)."""
        held = self.record.arrays.items()
        names = [n for n, a in held if a.dims[0] == "example" and n not in PLAN_ARRAYS]
        return {name: self.array(name) for name in names}

    def batch(
        self,
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
        examples: npt.NDArray[np.int64],
        positions: Sequence[int],
        labels: Mapping[str, npt.NDArray[Any]],
    ) -> ActivationBatch:
        """Wrap the filled memory of `buffers` as a batch; nothing is copied but the labels."""
        tensor = torch.from_numpy(codes).transpose(0, 1)
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
        return read_examples(self.place, self.split, self.record.examples_sha256)

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
        """Read everything again and compare it with the ledger.

        Returns:
            What is wrong, a line each, naming the shard; empty when all is well.
        """
        from bertvision.featurestore.inspect import find_damage

        return [damage.what for damage in find_damage(self)]
