"""Lazy views: labelled axes, a chunk per shard, float32, and the split that was opened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
from stores import Made

from bertvision.errors import InputError, ProvenanceError, StoreNotFoundError, UnknownNameError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore

LENGTHS = [9, 30, 17, 5, 40, 22, 13, 8, 31]
EXAMPLES = 23


@pytest.fixture(autouse=True)
def _threads() -> Any:
    with dask.config.set(scheduler="threads"):
        yield


def pooled(store: Path, pooling: str, **options: Any) -> tuple[Made, ActivationSplit]:
    """A split with one vector per example; another one for every pooling."""
    made = Made([1] * EXAMPLES, shard_tokens=8, split=f"train-{pooling}", **options)
    made.hidden_states = [states + len(pooling) for states in made.hidden_states]
    made.spec.provenance["tokens"] = pooling  # type: ignore[index]
    return made, made.write(store)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_every_encoding_is_read_as_float32_in_chunks_that_follow_the_shards(
    tmp_path: Path, encoding: str
) -> None:
    split = Made(LENGTHS, encoding=encoding).write(tmp_path)
    view = split.dask(layers=[2, 0])
    sizes = tuple(split.plan.tokens_of(shard) for shard in range(split.plan.n_shards))
    assert len(sizes) > 2
    assert view.chunks == (sizes, (2,), (16,))
    assert view.dtype == np.float32
    found = view.compute()
    assert found.dtype == np.float32
    expected = torch.cat([split[i] for i in range(len(split))])[:, :, [2, 0]].permute(0, 2, 1)
    # of int8 and int4 NumPy rounds twice where torch does once
    np.testing.assert_allclose(
        found, expected.numpy(), rtol=0, atol=1e-6 if "int" in encoding else 0
    )


def test_no_task_reads_a_shard_that_another_one_reads(tmp_path: Path) -> None:
    split = Made(LENGTHS).write(tmp_path)
    part = split.dask()[: split.plan.tokens_of(0)]
    keys = [str(key) for key in part.__dask_graph__().cull(part.__dask_keys__())]
    read = [key for key in keys if "read_shard" in key]
    assert len(read) == 1


def test_a_mean_over_many_tokens_is_taken_in_float32_not_in_what_is_stored(tmp_path: Path) -> None:
    # 70 000 in sum is more than float16 holds
    made = Made([64] * 8, encoding="float16", shard_tokens=64, seed=None)
    made.hidden_states = [torch.full((64, 3, 16), 200.0) for _ in range(8)]
    split = made.write(tmp_path)
    assert split.dask().sum(axis=0).compute().max() == 200 * 64 * 8
    dataset = split.to_xarray()
    assert float(dataset.hidden_states.mean("token").max()) == 200


def test_axes_are_labelled_and_tokens_know_their_example(tmp_path: Path) -> None:
    made = Made(LENGTHS)
    split = made.write(tmp_path)
    data = split.to_xarray(layers=[-1, 0])
    assert data.hidden_states.dims == ("token", "layer", "hidden")
    assert data.layer.values.tolist() == [2, 0]
    assert data.hidden_states.chunks == split.dask([2, 0]).chunks
    first = data.hidden_states.sel(layer=0)[data.position.values == 0].values
    expected = [made.of_stored(i)[0, 0].numpy() for i in range(len(split))]
    np.testing.assert_array_equal(first, expected)
    by_example = data.hidden_states.groupby(data.example_of_token).mean().compute()
    expected = [made.of_stored(i).mean(0)[[2, 0]].numpy() for i in range(len(split))]
    np.testing.assert_allclose(by_example.values, expected, rtol=1e-5, atol=1e-6)
    assert data.attrs["weights_sha256"] == "ab"


def test_a_lazy_array_finds_its_store_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Made(LENGTHS).write(tmp_path / "store")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    view = ActivationStore.open("store")["1e"]["train"].dask()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert view.compute().shape == (sum(LENGTHS), 3, 16)


def test_a_split_that_was_written_anew_is_not_read_as_the_old_one(tmp_path: Path) -> None:
    made = Made(LENGTHS, encoding="int8")
    old = made.write(tmp_path)
    view = old.dask()
    view.compute()
    shutil.rmtree(tmp_path)
    with pytest.raises(StoreNotFoundError, match=r"1e/train in .*" + tmp_path.name):
        ActivationSplit(tmp_path, "1e", "train")
    made.hidden_states = [3 * states for states in made.hidden_states]
    new = made.write(tmp_path)
    truth = torch.cat([made.of_stored(i) for i in range(len(new))]).numpy()
    found = new.dask().compute()
    assert np.linalg.norm(found - truth) <= 9e-3 * np.linalg.norm(truth)


def test_a_worker_that_opens_it_later_notices_that_it_was_written_anew(tmp_path: Path) -> None:
    made = Made(LENGTHS)
    view = made.write(tmp_path).dask()
    shutil.rmtree(tmp_path)
    Made(LENGTHS, encoding="bfloat16").write(tmp_path)
    with pytest.raises(ProvenanceError, match="1e/train in .* was written anew .* open it again"):
        view.compute()


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_pooled_splits_are_one_array_with_an_axis_of_poolings(
    tmp_path: Path, encoding: str
) -> None:
    cls, cls_split = pooled(tmp_path, "cls", layers=4, encoding=encoding)
    mean, mean_split = pooled(tmp_path, "mean", layers=3, encoding=encoding)
    store = ActivationStore.open(tmp_path)
    data = store.pooled("1e", "train", ["mean", "cls"])
    states = data.hidden_states
    assert states.dims == ("example", "pooling", "layer", "hidden")
    assert states.dtype == np.float32
    # the states that all poolings have: the pooler's output goes with the [CLS] alone
    assert data.layer.values.tolist() == [0, 1, 2]
    assert data.pooling.values.tolist() == ["mean", "cls"]
    sizes = tuple(map(cls_split.plan.tokens_of, range(cls_split.plan.n_shards)))
    assert states.chunks[0] == sizes
    assert len(sizes) == 3
    np.testing.assert_array_equal(data.start_positions, mean_split.labels["start_positions"])
    found = states.sel(pooling="cls", layer=1).compute()
    truth = np.stack([cls.of_stored(i)[0, 1].numpy() for i in range(EXAMPLES)])
    assert np.linalg.norm(found - truth) <= (9e-3 if encoding == "int8" else 0) * np.linalg.norm(
        truth
    )
    by_row = states.sel(pooling="mean").values[np.argsort(data.example_id.values)]
    truth = torch.stack([vectors[0] for vectors in mean.hidden_states]).numpy()
    np.testing.assert_allclose(by_row, truth, atol=0.05 if encoding == "int8" else 0)
    assert store.pooled("1e", "train", ["cls"]).layer.values.tolist() == [0, 1, 2, 3]
    assert "tokens" not in data.attrs


def test_splits_that_do_not_fit_together_are_refused_by_name(tmp_path: Path) -> None:
    Made(LENGTHS, split="train-all").write(tmp_path)
    pooled(tmp_path, "cls")
    Made([1] * (EXAMPLES + 1), shard_tokens=8, split="train-max").write(tmp_path)
    store = ActivationStore.open(tmp_path)
    with pytest.raises(InputError, match=r"1e/train-all holds 175 tokens .* it is not pooled"):
        store.pooled("1e", "train", ["all"])
    with pytest.raises(ProvenanceError, match="1e/train-cls and 1e/train-max do not hold the same"):
        store.pooled("1e", "train", ["cls", "max"])
    with pytest.raises(UnknownNameError, match="no split 'train-sep' of 1e"):
        store.pooled("1e", "train", ["cls", "sep"])
    with pytest.raises(InputError, match="name at least one pooling"):
        store.pooled("1e", "train", [])
