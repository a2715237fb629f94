"""A split as a labelled dataset of xarray: dimensions, coordinates, and arrays read when indexed.

The arrays are what xarray asks of a backend (its guide "How to add a new backend"). They are
pickled as the place of the split, so that workers of Dask in any process open it for themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from bertvision.featurestore.format.keeping import KEPT_POSITION
from bertvision.featurestore.format.logits import OUTPUTS
from bertvision.featurestore.lazy import SplitSource, layer_labels, provenance_of
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.views.decoded import decoded_tokens

Indices: TypeAlias = npt.NDArray[np.int64]
Load: TypeAlias = Callable[[SplitReader], npt.NDArray[Any]]


def labelled(split: SplitReader) -> xr.Dataset:
    """A split as a dataset over its real tokens; beside the plan nothing is read yet.

    Args:
        split: complete.

    Returns:
        ``hidden_states`` (token, layer, hidden) float32; the split's own arrays by (example) and
        (token), of which ``offset_mapping`` also has a dimension ``offset``: start and end, and
        log-probabilities of next tokens ``topk``, the most probable first;
        ``n_tokens`` and ``example_id`` (example). Coordinates are ``layer``, the index of the
        hidden state or its name; ``example_of_token`` and ``position`` (token), the example that a
        token belongs to and its place in what the model read of that; ``first_token`` (example),
        where on the token axis an example begins; ``id`` (example), its key in the data, unless
        windows hold tokens of several rows. Chunks, where they are asked for with ``chunks={}``,
        are shards.

    Raises:
        IncompleteSplitError: shards are not committed yet.
        InputError: its tokens were shuffled.
        CorruptStoreError: the plan is damaged.
    """
    plan, record = split.require_complete().plan, split.record
    n = plan.n_tokens.astype(np.int64)
    sizes = {"token": plan.total_tokens, "example": len(plan)}
    sizes |= {"layer": len(record.layers), "hidden": record.hidden_size}
    shards = tuple(map(plan.tokens_of, range(plan.n_shards)))
    source = SplitSource.of(split)

    def variable(array: Callable[[SplitSource, tuple[int, ...]], Any], *dims: str) -> xr.Variable:
        made = array(source, tuple(sizes[dim] for dim in dims))
        # all chunked alike, or the dataset as a whole has no chunks
        hint = {"preferred_chunks": {"token": shards}} if dims[0] == "token" else None
        return xr.Variable(dims, Bounded(made), encoding=hint)

    data = {"hidden_states": variable(States, "token", "layer", "hidden")}
    coords: dict[str, Any] = {
        "layer": layer_labels(split, None),
        "example_of_token": variable(partial(Whole, np.int64, _examples_of_tokens), "token"),
        "position": variable(partial(Whole, np.int64, _places_of_tokens), "token"),
        "first_token": ("example", np.cumsum(n) - n),
    }
    for name, info in record.arrays.items():
        dims = info.dims
        if name == "offset_mapping" and len(dims) == 2:
            # stored as offset_mapping_1, a name that records keep
            dims = ("token", "offset")
            coords["offset"] = ["start", "end"]
        load = _token_array if dims[0] == "token" else _label
        if dims[0] == "token" or name in split.label_names:
            sizes |= dict(zip(dims[1:], info.shape[1:], strict=True))
            data[name] = variable(partial(Whole, info.dtype, partial(load, name)), *dims)
    for name, shape in record.top.shapes.items() if record.top else ():
        sizes |= dict(zip(("topk",), shape, strict=False))
        whole = partial(Whole, OUTPUTS[name], partial(_token_array, name))
        data[name] = variable(whole, "token", *("topk",) * len(shape))
    if "text_row" not in record.arrays:
        coords["id"] = variable(Ids, "example")
    plans = {"n_tokens": ("example", plan.n_tokens), "example_id": ("example", plan.example_id)}
    return xr.Dataset({**data, **plans}, coords, attrs=provenance_of(split))


class Bounded(indexing.LazilyIndexedArray):
    """An array that is read when its values are asked for, within its bounds.

    xarray adds the length of an axis to an index below zero, and once more on the way to a
    backend, without a comparison: -13 of 12 tokens would be the last one.
    """

    def __getitem__(self, indexer: indexing.ExplicitIndexer) -> Any:
        _check_bounds(indexer, self.shape)
        return super().__getitem__(indexer)

    def _oindex_get(self, indexer: indexing.OuterIndexer) -> Any:
        _check_bounds(indexer, self.shape)
        return super()._oindex_get(indexer)


def _check_bounds(indexer: indexing.ExplicitIndexer, shape: tuple[int, ...]) -> None:
    """Refuse what lies outside of an axis.

    Raises:
        IndexError: an index does, as of NumPy.
    """
    for axis, (key, size) in enumerate(zip(indexer.tuple, shape, strict=True)):
        indices = np.empty(0) if isinstance(key, slice) else np.asarray(key)
        outside = indices[(indices < -size) | (indices >= size)]
        if outside.size:
            raise IndexError(
                f"index {outside.flat[0]} is out of bounds for axis {axis} with size {size}"
            )


class OnDemand(BackendArray):
    """An array of a split that is read when it is indexed.

    Attributes:
        source: Place of the split.
        shape: Shape of the array.
        dtype: Dtype of its values.
    """

    def __init__(self, source: SplitSource, shape: tuple[int, ...], dtype: Any) -> None:
        self.source, self.shape, self.dtype = source, shape, np.dtype(dtype)

    @abstractmethod
    def take(self, *indices: Indices) -> npt.NDArray[Any]:
        """Values at some indices of each axis, each combined with each of the others."""

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.OUTER
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._outer)

    def _outer(self, key: tuple[Any, ...]) -> npt.NDArray[Any]:
        indices = [_indices(each, size) for each, size in zip(key, self.shape, strict=True)]
        values = self.take(*map(np.atleast_1d, indices))
        return values[tuple(slice(None) if each.ndim else 0 for each in indices)]


class States(OnDemand):
    """The hidden states (token, layer, hidden), decoded to float32."""

    def __init__(self, source: SplitSource, shape: tuple[int, ...]) -> None:
        super().__init__(source, shape, np.float32)

    def take(self, *indices: Indices) -> npt.NDArray[Any]:
        """See `decoded_tokens` for what is read."""
        tokens, layers, channels = indices
        split = self.source.open()
        n = split.plan.n_tokens.astype(np.int64)
        ends = np.cumsum(n)
        examples = np.searchsorted(ends, tokens, side="right")
        places = tokens - (ends - n)[examples]
        states = decoded_tokens(split, examples, places, layers.tolist())
        every = len(channels) == self.shape[2] and bool((np.diff(channels) == 1).all())
        return states if every else states[:, :, channels]


class Whole(OnDemand):
    """An array that lies under one checksum: read whole when it is first indexed, and kept.

    Attributes:
        load: Function that reads it from its split.
    """

    def __init__(self, dtype: Any, load: Load, source: SplitSource, shape: tuple[int, ...]) -> None:
        super().__init__(source, shape, dtype)
        self.load = load
        self._values: npt.NDArray[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the values: another process reads them where it needs them."""
        return type(self), (self.dtype, self.load, self.source, self.shape)

    def take(self, *indices: Indices) -> npt.NDArray[Any]:
        """Values out of the array."""
        if self._values is None:
            self._values = self.load(self.source.open())
        return self._values[np.ix_(*indices)]


class Ids(Whole):
    """The keys of examples, as texts of one width, which ``chunks="auto"`` can tell the size of.

    The width, and with it the type, is known once the table was read: when it is first asked for.
    """

    def __init__(self, source: SplitSource, shape: tuple[int, ...]) -> None:
        self.source, self.shape, self.load = source, shape, _ids
        self._values = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the values: another process reads them where it needs them."""
        return type(self), (self.source, self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the keys, or of the rows of a table without keys."""
        if self._values is None:
            self._values = self.load(self.source.open())
        return self._values.dtype


def _indices(key: Any, size: int) -> Indices:
    """Indices that an integer, a slice or an array selects on an axis of that size."""
    return np.arange(*key.indices(size)) if isinstance(key, slice) else np.asarray(key)


def _examples_of_tokens(split: SplitReader) -> npt.NDArray[Any]:
    return np.repeat(np.arange(len(split.plan)), split.plan.n_tokens)


def _positions_of_tokens(split: SplitReader) -> npt.NDArray[Any]:
    n = split.plan.n_tokens.astype(np.int64)
    return np.arange(split.plan.total_tokens) - np.repeat(np.cumsum(n) - n, n)


def _places_of_tokens(split: SplitReader) -> npt.NDArray[Any]:
    if split.keep is None:
        return _positions_of_tokens(split)
    return _token_array(KEPT_POSITION, split).astype(np.int64)


def _token_array(name: str, split: SplitReader) -> npt.NDArray[Any]:
    # without the fill between the shards
    real = np.repeat(split.plan.first_token, split.plan.n_tokens) + _positions_of_tokens(split)
    values: npt.NDArray[Any] = split.array(name)[real]
    return values


def _label(name: str, split: SplitReader) -> npt.NDArray[Any]:
    return split.array(name)


def _ids(split: SplitReader) -> npt.NDArray[Any]:
    """The key of each example; its row in a table that has no keys."""
    rows, table = split.table_rows, split.table()
    if "id" not in table.column_names:
        return rows
    ids: npt.NDArray[Any] = table["id"].to_numpy(zero_copy_only=False)[rows].astype(np.str_)
    return ids
