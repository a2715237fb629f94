"""Any selection of layers, through every door, is the same selection of the whole.

Orders, repeats, names, negative indices and masks: the codes of a layer are decoded with the
scales and the statistics of that layer, whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertvision import ActivationLoader, ActivationSplit, ActivationStore
from bertvision.errors import InputError
from bertvision.featurestore.lazy import pooled_dataset
from bertvision.featurestore.shuffling import shuffle_split

ENCODINGS = ["float32", "float16", "bfloat16", "int8", "int4"]
INDICES = [0, 2, 5, 7]  # not 0 to 3: a position on the stored axis is no index
NAMES = ["embed", "mid", "late", "last"]
LENGTHS = [3, 1, 7, 5, 2, 4]

Whole = np.ndarray[Any, np.dtype[np.float32]]


def write(store: Path, tag: str, encoding: str, layers: list[Any]) -> ActivationSplit:
    rng = np.random.default_rng(3)
    with ActivationStore.create(store).writer(
        tag, encoding, hidden_size=64, layers=layers, encoding=encoding, shard_tokens=10
    ) as writer:
        for i, n in enumerate(LENGTHS):
            # norms differ by token and layer, so that the scale of another layer shows
            size = rng.uniform(0.1, 9, (n, len(layers), 1))
            writer.add(i, (rng.normal(size=(n, len(layers), 64)) * size).astype(np.float32))
        return writer.finish()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "store"
    for encoding in ENCODINGS:
        made = write(folder, "0e", encoding, INDICES)
        write(folder, "1e", encoding, NAMES)
        shuffle_split(made, f"{encoding}-shuffled", seed=1)
    return folder


def whole(split: ActivationSplit) -> Whole:
    """(token, layer, hidden) of all examples, each read alone with the layers as they lie."""
    rows = [split.read([i]).decode() for i in range(len(split))]
    return torch.cat(rows).numpy()


def same(values: Whole, expected: Whole) -> bool:
    """Equal but for rounding: torch and NumPy fuse multiply and add differently."""
    return values.shape == expected.shape and np.allclose(values, expected, rtol=1e-6, atol=1e-5)


def of_loader(split: ActivationSplit, layers: list[Any]) -> Whole:
    loader = ActivationLoader(split, batch_size=4, layers=layers, shuffle=False)
    return torch.cat([batch.decode() for batch in loader]).numpy()


def of_tokens(split: ActivationSplit, layers: list[Any]) -> Whole:
    stream = split.tokens(layers, batch_size=4, shuffle=False)
    return torch.cat([batch.vectors for batch in stream]).numpy()


DOORS: dict[str, Callable[[ActivationSplit, list[Any]], Whole]] = {
    "read": lambda split, layers: split.read(range(len(split)), layers).decode().numpy(),
    "loader": of_loader,
    "tokens": of_tokens,
    "dask": lambda split, layers: split.dask(layers).compute(scheduler="sync"),
    "to_xarray": lambda split, layers: split.to_xarray(layers).hidden_states.values,
    "to_dataset": lambda split, layers: np.concatenate(
        split.to_dataset(layers)[:]["hidden_states"]
    ),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chosen=st.lists(st.integers(-4, 3), min_size=1, max_size=4, unique_by=lambda c: c % 4),
    named=st.booleans(),
)
def test_any_selection_is_that_of_the_whole(
    store: Path, door: str, encoding: str, chosen: list[int], named: bool
) -> None:
    split = ActivationStore.open(store)["1e" if named else "0e"][encoding]
    # negative ones count from the end of what is stored, named or not
    layers = [c if c < 0 else (NAMES if named else INDICES)[c] for c in chosen]
    expected = whole(split)[:, chosen]
    assert same(DOORS[door](split, layers), expected)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("layers", [[0, 0, 0, 0], [2, -3], [7, 5, 2, 2]])
def test_a_layer_that_is_named_twice_is_refused(store: Path, door: str, layers: list[int]) -> None:
    with pytest.raises(InputError, match="each once"):
        DOORS[door](ActivationStore.open(store)["0e"]["int8"], layers)


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    key=st.one_of(
        st.lists(st.integers(-4, 3), min_size=1, max_size=6),
        st.lists(st.booleans(), min_size=4, max_size=4),
        # xarray itself fails on an empty slice backwards
        st.slices(4).filter(lambda key: (key.step or 1) > 0 or len(range(*key.indices(4)))),
    )
)
def test_xarray_indexes_layers_like_numpy(store: Path, encoding: str, key: Any) -> None:
    dataset = xr.open_dataset(store, engine="bertvision", group=f"0e/{encoding}")
    expected = whole(ActivationStore.open(store)[f"0e/{encoding}"])
    index = key if isinstance(key, slice) else np.array(key)
    assert same(dataset.hidden_states.isel(layer=index).values, expected[:, index])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layers", [[7, 5, 2, 0], [0, 5, 2, 7], [5, 2]])
def test_shuffled_tokens_keep_their_layers(store: Path, encoding: str, layers: list[int]) -> None:
    split = ActivationStore.open(store)["0e"][f"{encoding}-shuffled"]
    every = of_tokens(split, INDICES)
    chosen = [INDICES.index(layer) for layer in layers]
    assert same(of_tokens(split, layers), every[:, chosen])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pooled_splits_keep_the_order_of_layers(tmp_path: Path, encoding: str) -> None:
    rng = np.random.default_rng(5)
    states = (rng.normal(size=(6, 1, 3, 32)) * rng.uniform(0.1, 9, (6, 1, 3, 1))).astype("f4")
    with ActivationStore.create(tmp_path).writer(
        "0e", "mean", hidden_size=32, layers=[0, 1, 2], encoding=encoding
    ) as writer:
        for i, each in enumerate(states):
            writer.add(i, each)
        split = writer.finish()
    dataset = pooled_dataset({"mean": split}, [2, 0, 1])
    assert same(dataset.hidden_states.values[:, 0], whole(split)[:, [2, 0, 1]])
