"""ActivationSplit: read the activations of one split of one snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bertvision.errors import InputError
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.storage.storage import Storage

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr


class ActivationSplit(SplitReader, Sequence[torch.Tensor]):
    """The activations of one split of one snapshot.

    Indexing gives the float32 tensor (seq, hidden, layers) of an example, in stored order; its
    row in the data it was made from is ``plan.example_id[i]``.
    """

    def __init__(self, store: str | Path | Storage, tag: str, split: str) -> None:
        super().__init__(store, tag, split)
        self._last: tuple[int, ShardReader] | None = None

    def __repr__(self) -> str:
        r = self.record
        return (
            f"<ActivationSplit {self.name}: {r.examples} examples, {len(r.layers)} layers of "
            f"{r.hidden_size}, {r.encoding}>"
        )

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

    def _shard(self, shard: int) -> ShardReader:
        """The shard that was read last stays open: neighbours are often read together."""
        if self._last is None or self._last[0] != shard:
            self._last = shard, self.open_shard(shard)
        return self._last[1]

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

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = int(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"example {i} is outside {self.name}, which has {len(self)}")
        return self.read([i % len(self)]).unpack()[0]

    def dask(self, layers: Sequence[int] | None = None) -> da.Array:
        """Real tokens as a lazy float32 array (token, layer, hidden), a chunk per shard."""
        from bertvision.featurestore.lazy import to_dask

        return to_dask(self, layers)

    def to_xarray(self, layers: Sequence[int] | None = None) -> xr.Dataset:
        """The split as a lazy dataset (see `lazy.to_dataset`)."""
        from bertvision.featurestore.lazy import to_dataset

        return to_dataset(self, layers)

    def verify(self) -> list[str]:
        """Read everything again and compare it with the ledger.

        Returns:
            What is wrong, a line each, naming the shard; empty when all is well.
        """
        from bertvision.featurestore.damage import find_damage

        return [damage.what for damage in find_damage(self)]
