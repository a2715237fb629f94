"""Lazy views for offline analysis: Dask arrays aligned to the shards, pooled splits as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, ProvenanceError
from bertvision.featurestore.format.encoding import decode_numpy
from bertvision.featurestore.format.examples import table_digest
from bertvision.featurestore.reader import SplitReader

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr


class SplitSource(NamedTuple):
    """How a task finds a split again, in any process of any machine that sees the store.

    Attributes:
        store: absolute path or URL.
        tag: the snapshot.
        split: its name.
        record_sha256: Digest of the split's record: a split that was written anew is another one.
    """

    store: str
    tag: str
    split: str
    record_sha256: str

    @classmethod
    def of(cls, split: SplitReader) -> SplitSource:
        """The source of an open split."""
        store = str(split.storage)
        # workers stand in folders of their own
        where = store if "://" in store else os.path.abspath(store)
        return cls(where, str(split.tag), split.split, _digest(split))

    def open(self) -> SplitReader:
        """The split; opened once per process.

        Raises:
            StoreNotFoundError: it is not there, as seen from this machine.
            ProvenanceError: it was written anew since.
        """
        return _open(self)


def to_dask(split: SplitReader, layers: Sequence[int | str] | None = None) -> da.Array:
    """The real tokens of a split, decoded, as float32 (token, layer, hidden).

    One chunk per shard (their lengths differ: fill is left out), so that no task reads a shard
    that another one reads too. Tasks open the store by path: they can run in threads, processes
    or on other machines that see it.

    Args:
        split: a complete split.
        layers: indices of hidden states, or all.

    Raises:
        IncompleteSplitError: shards are not committed yet.
    """
    positions = tuple(split.layer_positions(layers))
    sizes = tuple(map(split.plan.tokens_of, range(split.plan.n_shards)))
    return map_shards(split, read_shard, positions, chunks=(sizes,), tail=(len(positions),))


def map_shards(
    split: SplitReader,
    function: Callable[..., npt.NDArray[np.float32]],
    *args: object,
    chunks: tuple[tuple[int, ...]],
    tail: tuple[int, ...],
) -> da.Array:
    """A lazy float32 array (rows, …, hidden) of what a function makes of each shard.

    Args:
        split: a complete split.
        function: picklable; called as ``function(shard, source, *args)`` with the number of the
            shard in an array of one element and the `SplitSource`.
        args: Further arguments of the call.
        chunks: rows that come of each shard.
        tail: sizes of the axes between rows and hidden size.

    Raises:
        IncompleteSplitError: shards are not committed yet.
    """
    import dask.array as da

    shards = da.arange(split.require_complete().plan.n_shards, chunks=1)
    shape = (*tail, split.record.hidden_size)
    view: da.Array = shards.map_blocks(
        function,
        SplitSource.of(split),
        *args,
        dtype=np.float32,
        chunks=(*chunks, *((size,) for size in shape)),
        new_axis=list(range(1, 1 + len(shape))),
        meta=np.empty((0,) * (1 + len(shape)), np.float32),
    )
    return view


def read_shard(
    shard: npt.NDArray[np.int64], source: SplitSource, positions: Sequence[int]
) -> npt.NDArray[np.float32]:
    """The real tokens of a shard, decoded: (tokens, layers, hidden), C-contiguous.

    Args:
        shard: its number, in an array of one element.
        source: Source of the split.
        positions: Places on the stored layer axis.
    """
    split = source.open()
    shape = (split.plan.tokens_of(int(shard[0])), len(positions), split.record.hidden_size)
    states = np.empty(shape, np.float32)
    for _ in decoded_layers(split, int(shard[0]), positions, out=states):
        pass
    return states


def decoded_layers(
    split: SplitReader,
    shard: int,
    positions: Sequence[int],
    *,
    any_order: bool = False,
    out: npt.NDArray[np.float32] | None = None,
) -> Iterator[npt.NDArray[np.float32]]:
    """The real tokens of a shard, decoded layer by layer: (tokens, hidden) each.

    Beside the codes only one layer is in memory, where there is no room for all.

    Args:
        split: Split with the shard.
        shard: its number.
        positions: Places on the stored layer axis.
        any_order: Take a split of shuffled tokens as well.
        out: room for all, (tokens, layers, hidden).
    """
    reader = split.open_shard(shard, any_order=any_order)
    codes, scale = split.buffers(reader.tokens, len(positions))
    reader.read(0, len(split.plan.examples_of(shard)), positions, codes, scale)
    reader.close()
    for i, position in enumerate(positions):
        of_layer = None if scale is None else scale[:, i : i + 1]
        stats = split.stats_of([position])
        room = None if out is None else out[:, i : i + 1]
        yield decode_numpy(codes[i][:, None], of_layer, stats, split.encoding, room)[:, 0]


def pooled_dataset(
    splits: Mapping[str, SplitReader], layers: Sequence[int] | None = None
) -> xr.Dataset:
    """Pooled splits of the same examples as one lazy dataset.

    Args:
        splits: Splits by pooling; each complete, with one vector per example and the same plan.
        layers: indices of hidden states; all that every one of the splits holds by default.

    Returns:
        ``hidden_states`` (example, pooling, layer, hidden) float32 on Dask, a chunk per shard and
        pooling; coordinates ``pooling``, ``layer`` and ``example_id`` (example), the row in the
        data; the splits' labels by (example).

    Raises:
        InputError: no split, one with several tokens to an example, or one without a layer.
        ProvenanceError: they are not of the same examples in the same order.
        IncompleteSplitError: shards are not committed yet.
    """
    import dask.array as da
    import xarray as xr

    if not splits:
        raise InputError("name at least one pooling, such as mean")
    first, *others = splits.values()
    for split in splits.values():
        if split.record.tokens != split.record.examples:
            raise InputError(
                f"{split.name} holds {split.record.tokens} tokens of {split.record.examples} "
                "examples: it is not pooled; name splits that were extracted with --pool"
            )
    for other in others:
        check_same_rows(first, other)
    if layers is None:
        layers_of_splits = [set(split.record.layers) for split in splits.values()]
        layers = sorted(set.intersection(*layers_of_splits))
    view = da.stack([to_dask(split, layers) for split in splits.values()], axis=1)  # type: ignore[no-untyped-call]
    shared = {k: v for k, v in provenance_of(first).items() if k != "tokens"}
    return xr.Dataset(
        {
            "hidden_states": (("example", "pooling", "layer", "hidden"), view),
            **{
                name: (first.record.arrays[name].dims, values)
                for name, values in first.labels.items()
            },
        },
        coords={
            "pooling": list(splits),
            "layer": layer_labels(first, layers),
            "example_id": ("example", first.plan.example_id),
        },
        attrs=shared,
    )


def layer_labels(split: SplitReader, layers: Sequence[int | str] | None) -> list[int] | list[str]:
    """Layers as a coordinate: their names where they have some, else indices of hidden states."""
    positions = split.layer_positions(layers)
    if names := split.layer_names:
        return [names[p] for p in positions]
    return [split.record.layers[p] for p in positions]


def check_same_rows(x: SplitReader, y: SplitReader) -> None:
    """Check that row i of two splits is the same token of the same example.

    Equal plans of equal examples put it there.

    Raises:
        ProvenanceError: it is not; the message names the field that differs.
    """
    for field in ("examples_sha256", "plan_sha256"):
        one, other = getattr(x.record, field), getattr(y.record, field)
        if field == "examples_sha256" and x.record.format != y.record.format:
            # digests of two kinds: the tables themselves are compared, each of which is checked
            one, other = table_digest(x.table()), table_digest(y.table())
        if one != other:
            raise ProvenanceError(
                f"{x.name} and {y.name} do not hold the same tokens ({field} differs): take "
                "splits extracted from the same data with the same tokenizer and lengths"
            )


def provenance_of(split: SplitReader) -> dict[str, Any]:
    """Origin of a split, as far as it is known, as attributes of a dataset."""
    return {k: v for k, v in split.record.provenance.items() if v is not None}


def _digest(split: SplitReader) -> str:
    return sha256(split.record.model_dump_json().encode()).hexdigest()


@lru_cache(maxsize=8)
def _open(source: SplitSource) -> SplitReader:
    split = SplitReader(source.store, source.tag, source.split)
    if _digest(split) != source.record_sha256:
        raise ProvenanceError(
            f"{split.name} in {source.store} was written anew since it was opened: open it again"
        )
    return split
