"""Splits as a ``datasets.Dataset``, and stores in xarray by ``engine="bertvision"``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pytest
import torch
import xarray as xr
from datasets import Dataset, Value, concatenate_datasets, load_from_disk
from stores import Made, shard_path
from torch.utils.data import DataLoader

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.format.compiled import KERNELS
from bertvision.featurestore.storage import local
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.views.xarray_engine import StoreEngine

LENGTHS = [9, 30, 17, 5, 40, 22, 13, 8, 31]


def padded(rows: list[dict[str, Any]]) -> tuple[list[int], torch.Tensor]:
    states = [row["hidden_states"] for row in rows]
    return [row["example"] for row in rows], torch.nn.utils.rnn.pad_sequence(states, True)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_rows_have_the_states_of_read_with_text_and_labels(tmp_path: Path, encoding: str) -> None:
    split = Made(LENGTHS, encoding=encoding).write(tmp_path)
    rows = split.to_dataset(layers=[-1, 0])
    assert len(rows) == 9
    ids = split.table()["id"].to_pylist()
    for i in (0, 5, 8):
        row = rows[i]
        truth = split.read([i], layers=[-1, 0]).decode()
        assert torch.equal(row["hidden_states"], truth)
        assert row["id"] == ids[split.plan.example_id[i]]
        assert row["start_positions"] == split.labels["start_positions"][i]
    several = rows[[7, 2, 7]]["hidden_states"]
    assert [len(states) for states in several] == split.plan.n_tokens[[7, 2, 7]].tolist()
    assert torch.equal(several[1], split.read([2], layers=[-1, 0]).decode())


def test_rows_that_are_chosen_shuffled_or_filtered_keep_their_own_states(tmp_path: Path) -> None:
    split = Made(LENGTHS).write(tmp_path)
    rows = split.to_dataset().shuffle(seed=3).filter(lambda key: key != "q4", input_columns="id")
    assert len(rows) == 8
    for row in rows:
        assert torch.equal(row["hidden_states"], split[row["example"]].permute(0, 2, 1))


def test_nothing_is_read_until_a_row_is_asked_for_and_then_its_layers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Made(LENGTHS).write(tmp_path)
    found: list[int] = []
    read = local.LocalFile.read_into

    def counted(file: Any, out: np.ndarray[Any, Any], offset: int) -> None:
        found.append(out.nbytes)
        read(file, out, offset)

    monkeypatch.setattr(local.LocalFile, "read_into", counted)
    monkeypatch.setattr(KERNELS, "get", lambda *_: None)  # which read past it
    rows = split.to_dataset(layers=1)
    assert rows.data.nbytes < 1000
    texts = rows.select_columns(["id", "start_positions"])
    assert texts[2].keys() == {"id", "start_positions"}
    assert len(set(texts["id"])) == 9
    assert found == []
    assert rows[2]["hidden_states"].shape == (n := int(split.plan.n_tokens[2]), 1, 16)
    assert n * 16 * 4 in found
    assert sum(found) < 2 * n * 16 * 4


def test_workers_of_a_loader_open_the_split_for_themselves(tmp_path: Path) -> None:
    split = Made(LENGTHS, encoding="int8").write(tmp_path)
    rows = split.to_dataset(layers=[2])
    sent = pickle.dumps(rows)
    assert len(sent) < split.record.tokens * 16  # no states in it
    assert torch.equal(pickle.loads(sent)[3]["hidden_states"], rows[3]["hidden_states"])
    loader = DataLoader(rows, batch_size=4, num_workers=2, collate_fn=padded)
    batches = list(loader)
    assert [i for examples, _ in batches for i in examples] == list(range(9))
    for examples, states in batches:
        truth = split.read(examples, layers=[2]).padded().permute(0, 1, 3, 2)
        assert torch.equal(states, truth)


def test_labels_of_several_numbers_are_lists(tmp_path: Path) -> None:
    made = Made(LENGTHS)
    made.contents.per_example["logits"] = np.arange(18, dtype=np.float32).reshape(9, 2)  # type: ignore[index]
    split = made.write(tmp_path)
    assert split.to_dataset()[1]["logits"] == split.labels["logits"][1].tolist()


def test_what_cannot_be_rows_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSplitError, match="1e/train lacks"):
        Made(LENGTHS).write(tmp_path / "a", shards=1).to_dataset()
    split = Made([4, 6]).write(tmp_path / "b")
    with pytest.raises(InputError, match="layer 7 is not stored in 1e/train"):
        split.to_dataset(layers=[7])
    made = Made([4, 6])
    examples = pa.table({"id": ["a", "b"], "hidden_states": ["x", "y"]})
    made.contents = replace(made.contents, examples=examples)
    with pytest.raises(InputError, match="a column hidden_states of its own"):
        made.write(tmp_path / "c").to_dataset()


def every(rows: Any) -> list[dict[str, Any]]:
    return list(rows)


OPERATIONS: dict[str, Callable[[Dataset, Path], Any]] = {
    "with_format torch": lambda rows, _: rows.with_format("torch"),
    "with_format numpy": lambda rows, _: rows.with_format("numpy"),
    "with_format None": lambda rows, _: rows.with_format("torch").with_format(None),
    "with_transform": lambda rows, _: rows.with_transform(lambda batch: batch),
    "to_iterable_dataset": lambda rows, _: rows.to_iterable_dataset(),
    "save_to_disk": lambda rows, to: rows.save_to_disk(to / "rows") or load_from_disk(to / "rows"),
    "to_parquet": lambda rows, to: (
        rows.to_parquet(to / "rows.parquet")
        and Dataset.from_parquet(str(to / "rows.parquet"), cache_dir=str(to))
    ),
    "from_generator": lambda rows, _: Dataset.from_list(rows.to_list(), features=rows.features),
    "concatenated": lambda rows, _: concatenate_datasets([rows.select([0, 1]), rows.skip(2)]),
    "map": lambda rows, _: rows.map(lambda row: {"n": len(row["hidden_states"])}),
    "cast_column": lambda rows, _: rows.cast_column("start_positions", Value("int64")),
    "flatten_indices": lambda rows, _: rows.select(range(9)).flatten_indices(),
    "sort": lambda rows, _: rows.sort("id"),
    "train_test_split": lambda rows, _: concatenate_datasets(
        [*rows.train_test_split(0.3, seed=1).values()]
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_of_datasets_keep_the_hidden_states(tmp_path: Path, operation: str) -> None:
    split = Made(LENGTHS, encoding="int8").write(tmp_path / "store")
    rows = split.to_dataset(layers=[2, 0])
    if operation == "from_generator":
        rows = rows.cast_column(
            "hidden_states", replace(rows.features["hidden_states"], decode=False)
        )
        made = OPERATIONS[operation](rows, tmp_path).cast_column(
            "hidden_states", replace(rows.features["hidden_states"], decode=True)
        )
    else:
        made = OPERATIONS[operation](rows, tmp_path)
    seen = every(made)
    assert sorted(int(row["example"]) for row in seen) == list(range(9))
    for row in seen:
        expected = split.read([int(row["example"])], layers=[2, 0]).decode()
        assert torch.equal(torch.as_tensor(row["hidden_states"]), expected)


def test_computed_states_take_the_place_of_stored_ones_in_their_own_type(tmp_path: Path) -> None:
    split = Made(LENGTHS).write(tmp_path)

    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        return {"hidden_states": (row["hidden_states"] * 2).numpy()}

    rows = split.to_dataset()
    made = rows.map(doubled)
    for row in made:
        expected = split[row["example"]].permute(0, 2, 1) * 2
        assert torch.equal(torch.tensor(row["hidden_states"]), expected)
    with pytest.raises(TypeError, match="Couldn't cast"):  # as numbers of examples
        rows.map(doubled, features=rows.features, load_from_cache_file=False)


def test_a_number_that_is_computed_is_no_example(tmp_path: Path) -> None:
    rows = Made(LENGTHS).write(tmp_path).to_dataset()
    made = rows.map(lambda row: {"hidden_states": row["hidden_states"].shape[0]})
    assert made["hidden_states"][:] == [row["hidden_states"].shape[0] for row in rows]


ENCODINGS = ["float32", "bfloat16", "float16", "int8", "int4"]


def opened(store: Path, group: str = "1e/train", **options: Any) -> xr.Dataset:
    return xr.open_dataset(store, engine=StoreEngine, group=group, **options)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the bytes of each stretch of hidden states that is read from a file."""
    found: list[int] = []
    read = local.LocalFile.read_into

    def counted(file: Any, out: np.ndarray[Any, Any], offset: int) -> None:
        found.append(out.nbytes)
        read(file, out, offset)

    monkeypatch.setattr(local.LocalFile, "read_into", counted)
    monkeypatch.setattr(KERNELS, "get", lambda *_: None)  # which read past it
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
    whole = [size for size in bytes_read if size == (n[0] + n[1]) * row]
    assert len(whole) == 1  # one layer of two examples that lie side by side
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
    "no tag": ({"group": "1/train"}, InputError, "not a snapshot tag"),
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
