"""Stores in xarray by ``engine="bertvision"``: the values, what is read for them, the errors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from stores import Made, shard_path

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.storage import local
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.views.xarray_engine import StoreEngine

LENGTHS = [9, 30, 17, 5, 40, 22, 13, 8, 31]  # ragged, in several shards
ENCODINGS = ["float32", "bfloat16", "float16", "int8", "int4"]


def opened(store: Path, group: str = "1e/train", **options: Any) -> xr.Dataset:
    return xr.open_dataset(store, engine=StoreEngine, group=group, **options)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the bytes of each stretch of hidden states that is read from a file."""
    found: list[int] = []
    read = local._LocalFile.read_into

    def counted(file: Any, out: np.ndarray[Any, Any], offset: int) -> None:
        found.append(out.nbytes)
        read(file, out, offset)

    monkeypatch.setattr(local._LocalFile, "read_into", counted)
    return found


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_are_those_of_read_bit_for_bit(
    tmp_path: Path, encoding: str, compression: str
) -> None:
    split = Made(LENGTHS, encoding=encoding, compression=compression).write(tmp_path)
    states = opened(tmp_path).hidden_states
    truth = split.read(range(len(split))).decode().numpy()
    assert states.dtype == np.float32
    np.testing.assert_array_equal(states.values, truth)
    tokens = [170, 3, 3, 44]
    some = states.isel(token=tokens, layer=[2, 0], hidden=slice(1, None, 3))
    np.testing.assert_array_equal(some.values, truth[tokens][:, [2, 0], 1::3])
    np.testing.assert_array_equal(states[-1, 1].values, truth[-1, 1])
    assert float(states[40, 2, 7]) == truth[40, 2, 7]
    assert states[10:10].values.shape == (0, 3, 16)


def test_a_split_of_some_layers_is_indexed_by_their_numbers(tmp_path: Path) -> None:
    made = Made(LENGTHS, layers=2)
    made.spec = made.spec.__class__(**{**vars(made.spec), "layers": (0, 8)})
    split = made.write(tmp_path)
    states = opened(tmp_path).hidden_states
    assert states.layer.values.tolist() == [0, 8]
    truth = split.read([1], layers=[8]).decode().numpy()[:, 0]
    begin = int(split.plan.n_tokens[0])
    np.testing.assert_array_equal(states.sel(layer=8)[begin : begin + len(truth)].values, truth)


def test_dimensions_and_coordinates_say_which_token_of_which_example_it_is(tmp_path: Path) -> None:
    split = Made(LENGTHS).write(tmp_path)
    data = opened(tmp_path)
    assert data.hidden_states.dims == ("token", "layer", "hidden")
    assert data.sizes == {"token": 175, "layer": 3, "hidden": 16, "example": 9, "offset": 2}
    keys = split.table()["id"].to_pylist()
    assert data.id.values.tolist() == [keys[i] for i in split.plan.example_id]
    example = int(np.flatnonzero(data.id == "q4")[0])
    own = data.isel(token=data.example_of_token == example)
    assert own.position.values.tolist() == list(range(40))
    assert int(own.token.size) == int(data.n_tokens[example])
    begin = int(data.first_token[example])
    np.testing.assert_array_equal(own.hidden_states, data.hidden_states[begin : begin + 40])
    np.testing.assert_array_equal(own.hidden_states, split[example].permute(0, 2, 1))
    np.testing.assert_array_equal(data.start_positions, split.labels["start_positions"])
    first = split.plan.first_token[example]
    np.testing.assert_array_equal(own.input_ids, split.array("input_ids")[first : first + 40])
    assert data.attrs["weights_sha256"] == "ab"


def test_only_the_examples_and_layers_that_are_indexed_are_read(
    tmp_path: Path, bytes_read: list[int]
) -> None:
    split = Made(LENGTHS).write(tmp_path)
    states = opened(tmp_path).hidden_states
    n = split.plan.n_tokens.tolist()
    picked = states.sel(layer=1).isel(token=[0, 1, n[0] + 2])
    assert bytes_read == []  # neither by opening nor by indexing
    assert picked.values.shape == (3, 16)
    row = 16 * 4
    whole = [size for size in bytes_read if size in (n[0] * row, n[1] * row)]
    assert sorted(whole) == sorted([n[0] * row, n[1] * row])  # one layer of two examples
    assert sum(bytes_read) - sum(whole) < row * min(n)  # and the index of the shard's file


def test_a_tree_has_the_complete_splits_and_leaves_out_the_others(tmp_path: Path) -> None:
    split = Made(LENGTHS, encoding="int8").write(tmp_path)
    Made([4, 6], tag="0.3e", split="dev").write(tmp_path)
    Made(LENGTHS, tag="2e").write(tmp_path, shards=1)
    tree = xr.open_datatree(tmp_path, engine=StoreEngine)
    assert [node.path for node in tree.leaves] == ["/0.3e/dev", "/1e/train"]
    truth = split.read(range(len(split))).decode().numpy()
    np.testing.assert_array_equal(tree["1e/train/hidden_states"], truth)
    assert list(xr.open_groups(tmp_path, engine=StoreEngine)) == ["/", "/0.3e/dev", "/1e/train"]


def test_chunks_that_are_asked_for_are_shards_and_travel_as_the_place_of_the_split(
    tmp_path: Path,
) -> None:
    split = Made(LENGTHS).write(tmp_path)
    data = opened(tmp_path, chunks={})
    sizes = tuple(split.plan.tokens_of(shard) for shard in range(split.plan.n_shards))
    assert data.chunks["token"] == sizes
    assert len(sizes) > 2
    sent = pickle.dumps(data)
    assert len(sent) < split.record.tokens * 3 * 16 * 4 / 2  # no states in it
    with dask.config.set(scheduler="threads"):
        mean = pickle.loads(sent).hidden_states.mean("token").compute()
    truth = split.read(range(len(split))).decode()
    np.testing.assert_allclose(mean, truth.mean(0), atol=1e-6)


@pytest.mark.parametrize("chunks", ["auto", {"token": "auto"}, {"token": 50}, -1], ids=str)
def test_chunks_of_any_size_hold_the_same_values(tmp_path: Path, chunks: Any) -> None:
    split = Made(LENGTHS, encoding="int8").write(tmp_path)
    data = opened(tmp_path, chunks=chunks)
    truth = torch.cat([split.read([i]).decode() for i in range(len(split))]).numpy()
    np.testing.assert_allclose(data.hidden_states.values, truth, atol=1e-5)
    ids = split.table()["id"].to_pylist()
    assert data.id.values.tolist() == [ids[row] for row in split.plan.example_id]


def test_an_array_that_was_read_is_not_pickled_and_read_again_elsewhere(tmp_path: Path) -> None:
    Made([200] * 9, shard_tokens=400).write(tmp_path)
    data = opened(tmp_path, cache=False)
    before = len(pickle.dumps(data))
    ids = data.input_ids.values
    assert len(pickle.dumps(data)) == before
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(data)).input_ids.values, ids)


def test_a_split_of_named_layers_without_text_has_its_names_and_keys(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path)
    with store.writer("0e", "clips", hidden_size=8, layers=["in", "out"]) as writer:
        for key, n in ((7, 3), (2, 5)):
            writer.add(key, torch.full((n, 2, 8), float(key)))
        writer.finish()
    data = opened(tmp_path, "0e/clips")
    assert data.layer.values.tolist() == ["in", "out"]
    kept = dict(zip(data.id.values.tolist(), data.first_token.values.tolist(), strict=True))
    assert sorted(kept) == ["2", "7"]
    assert float(data.hidden_states.sel(layer="out")[kept["7"], 0]) == pytest.approx(7, rel=1e-2)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no group": ({"group": None}, InputError, "name a split .* as tag/split; it holds 1e/train"),
    "a snapshot": ({"group": "1e"}, InputError, "name a split .* as tag/split"),
    "another tag": ({"group": "3e/train"}, UnknownNameError, "no activations of 3e .* holds 1e"),
    "another split": ({"group": "1e/trian"}, UnknownNameError, "no split 'trian' .* train"),
    "no tag": ({"group": "first/train"}, InputError, "not a snapshot tag"),
    "a path": ({"group": "1e/../train"}, InputError, "split"),
    "incomplete": ({"group": "2e/train"}, IncompleteSplitError, "2e/train lacks .* shards"),
}


@pytest.mark.parametrize(("given", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_what_is_not_there_is_said_by_name(
    tmp_path: Path, given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    Made(LENGTHS).write(tmp_path)
    Made(LENGTHS, tag="2e").write(tmp_path, shards=1)
    with pytest.raises(kind, match=message):
        opened(tmp_path, **given)


def test_no_store_and_a_damaged_shard_are_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="no activation store at"):
        opened(tmp_path)
    split = Made(LENGTHS).write(tmp_path)
    file = shard_path(split, "hidden_states", 1)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    states = opened(tmp_path).hidden_states
    assert states[0].values.shape == (3, 16)  # another shard is whole
    with pytest.raises(CorruptStoreError, match="1e/train shard 1: example 0 .* checksum"):
        _ = states.values


def test_the_engine_need_not_be_named_for_the_folder_of_a_store(tmp_path: Path) -> None:
    assert not StoreEngine().guess_can_open(tmp_path)
    Made([4, 6]).write(tmp_path)
    assert StoreEngine().guess_can_open(tmp_path)
    assert not StoreEngine().guess_can_open(b"CDF")
    assert "input_ids" not in opened(tmp_path, drop_variables=["input_ids", "unknown"])


def test_no_layers_give_an_empty_array(tmp_path: Path) -> None:
    Made(LENGTHS).write(tmp_path)
    assert opened(tmp_path).hidden_states.isel(layer=[]).values.shape == (175, 0, 16)


@pytest.mark.parametrize("index", [-13, -20, -25, 12])
@pytest.mark.parametrize("form", ["one", "some", "twice"])
def test_an_index_outside_is_an_error(tmp_path: Path, form: str, index: int) -> None:
    """Also below zero by more than the length, where xarray counts from the end twice."""
    Made([5, 4, 3], shard_tokens=16).write(tmp_path)
    dataset = opened(tmp_path)
    key = [0, index] if form == "some" else index
    for array in (dataset.hidden_states, dataset.input_ids, dataset.position):
        with pytest.raises(IndexError, match=r"out of bounds|out of range"):
            _ = (array[1:] if form == "twice" else array)[key]
