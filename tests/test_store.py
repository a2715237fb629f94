"""The store: what was written reads back, what was not is never invented; names are canonical."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st
from processes import warm_pool
from stores import Made

from bertvision.errors import (
    IncompleteSplitError,
    InputError,
    ProvenanceError,
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.format.layout import ENCODINGS
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.format.records import ShardRecord
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.writer import expected_bytes

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
LENGTHS = [5, 31, 64, 1, 17, 40, 22, 9, 33, 60, 2, 28]


@pytest.fixture
def made() -> Made:
    return Made(LENGTHS)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_examples_read_back_as_seq_hidden_layers(tmp_path: Path, encoding: str) -> None:
    made = Made(LENGTHS, encoding=encoding)
    split = made.write(tmp_path)
    assert len(split) == len(LENGTHS)
    bounds = {"float32": 0.0, "float16": 3e-4, "bfloat16": 2.4e-3, "int8": 9e-3, "int4": 0.15}
    bound = bounds[encoding]
    for i in range(len(split)):
        x = made.of_stored(i).transpose(1, 2)
        assert split[i].shape == x.shape
        assert split[i].dtype == torch.float32
        assert float((split[i] - x).norm() / x.norm()) <= bound
    assert torch.equal(split[-1], split[len(split) - 1])


def record_of(split: ActivationSplit, shard: int) -> ShardRecord | None:
    return split.ledger.find_shard(shard, split.record)


def test_read_packs_examples_and_layers_in_the_order_asked(tmp_path: Path, made: Made) -> None:
    split = made.write(tmp_path)
    batch = split.read([7, 0, 11, 3], layers=[-1, 0])
    expected = torch.cat([made.of_stored(i)[:, [2, 0]] for i in (7, 0, 11, 3)])
    assert torch.equal(batch.decode(), expected)
    assert batch.labels["start_positions"].tolist() == made.plan.example_id[[7, 0, 11, 3]].tolist()
    padded = batch.padded()  # (batch, seq, hidden, layers)
    assert padded.shape == (4, int(batch.lengths.max()), 16, 2)
    for row, part in zip(padded, batch.unpack(), strict=True):
        assert torch.equal(row[: len(part)], part)
        assert not row[len(part) :].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.read([]), "at least one"),
        (lambda s: s.read([99]), "0 to 11"),
        (lambda s: s.read([0], layers=[3]), "layer 3 is not stored.*0, 1, 2"),
        (lambda s: s.read([0], layers=[1, 1]), "each once"),
        (lambda s: s.array("nothing"), "no array 'nothing'"),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, made: Made, call, message: str) -> None:
    split = made.write(tmp_path)
    with pytest.raises(InputError, match=message):
        call(split)


def test_the_store_is_a_mapping_of_snapshots_and_splits(tmp_path: Path) -> None:
    for tag, name in (("1e", "train"), ("0.3e", "dev"), ("10e", "train")):
        Made(LENGTHS, tag=tag, split=name).write(tmp_path)
    store = ActivationStore.open(tmp_path)
    assert list(store) == ["0.3e", "1e", "10e"]
    assert list(store["0.3e"]) == ["dev"]
    assert store["1e"]["train"].name == "1e/train"
    with pytest.raises(UnknownNameError, match=r"no activations of 2e.*0\.3e, 1e, 10e"):
        store["2e"]
    with pytest.raises(UnknownNameError, match="no split 'dev' of 1e.*train"):
        store["1e"]["dev"]
    with pytest.raises(InputError, match="not a snapshot tag"):
        store["../1e"]
    with pytest.raises(StoreNotFoundError, match="bertvision extract"):
        ActivationStore.open(tmp_path / "elsewhere")


def test_plain_zarr_and_xarray_open_the_arrays_without_a_warning(
    tmp_path: Path, made: Made
) -> None:
    split = made.write(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        array = zarr.open(tmp_path / "arrays.zarr")["1e/train/hidden_states"]
        data = xr.open_zarr(tmp_path / "arrays.zarr", group="1e/train")
    assert array.metadata.dimension_names == ("token", "layer", "hidden")
    start = split.plan.first_token[4]
    np.testing.assert_array_equal(
        array[start : start + split.plan.n_tokens[4]], made.of_stored(4).numpy()
    )
    assert data.sizes["hidden"] == 16


def test_dask_and_xarray_views_hold_the_real_tokens_shard_by_shard(tmp_path: Path) -> None:
    made = Made(LENGTHS, encoding="int8")
    split = made.write(tmp_path)
    view = split.dask(layers=[2])
    assert len(view.chunks[0]) == made.plan.n_shards
    truth = torch.cat([made.of_stored(i) for i in range(len(split))])[:, [2]].numpy()
    found = view.compute(scheduler="threads")
    assert found.dtype == np.float32
    assert np.linalg.norm(found - truth) <= 9e-3 * np.linalg.norm(truth)
    with warm_pool():
        np.testing.assert_array_equal(found, view.compute(scheduler="processes"))
    tree = ActivationStore.open(tmp_path).to_xarray()
    data = tree["1e/train"].to_dataset()
    assert data.sizes == {"token": sum(LENGTHS), "layer": 3, "hidden": 16, "example": 12} | {
        "offset": 2
    }
    ends = data.offset_mapping.sel(offset="end")
    np.testing.assert_array_equal(ends - data.offset_mapping.sel(offset="start"), 1)
    third = data.isel(token=data.example_of_token == 3)
    assert third.position.values.tolist() == list(range(made.plan.n_tokens[3]))


def test_expected_size_is_what_is_written(tmp_path: Path) -> None:
    for tag, encoding in (("1e", "int8"), ("2e", "bfloat16")):
        made = Made(LENGTHS, encoding=encoding, tag=tag)
        info = made.write(tmp_path).info()
        assert info["complete"]
        assert info["bytes"] == pytest.approx(expected_bytes(made.plan, made.spec), rel=0.02)


def test_an_incomplete_split_names_what_is_missing_and_the_command(
    tmp_path: Path, made: Made
) -> None:
    split = made.write(tmp_path, shards=2)
    assert not split.is_complete
    assert split.missing_shards() == list(range(2, made.plan.n_shards))
    assert split[0].shape[0] == made.plan.n_tokens[0]
    with pytest.raises(
        IncompleteSplitError, match=r"lacks \d of \d shards \(first: 2\).*bertvision extract"
    ):
        split.require_complete()
    with pytest.raises(IncompleteSplitError, match=r"shard \d is not written"):
        split[len(split) - 1]


def test_resume_writes_only_what_is_missing_and_ends_the_same(tmp_path: Path, made: Made) -> None:
    whole = made.write(tmp_path / "whole")
    made.write(tmp_path / "resumed", shards=3)
    first = sorted((tmp_path / "resumed").rglob("hidden_states/c/0/0/0"))[0]
    before = first.stat().st_mtime_ns
    resumed = made.write(tmp_path / "resumed")
    assert first.stat().st_mtime_ns == before
    for shard in range(made.plan.n_shards):
        assert whole.ledger.find_shard(shard, whole.record) == resumed.ledger.find_shard(
            shard, resumed.record
        )


CHANGES = [
    ("weights_sha256", {"weights_sha256": "cd"}, {}),
    ("model", {"model": "other"}, {}),
    ("max_length", {"max_length": 12}, {}),
    ("encoding", {}, {"encoding": "float16"}),
    ("layers", {}, {"layers": 2}),
    ("permutation_seed", {}, {"seed": 5}),
]


@pytest.mark.parametrize(("field", "provenance", "other"), CHANGES, ids=[c[0] for c in CHANGES])
def test_another_origin_is_refused_by_field(
    tmp_path: Path, made: Made, field: str, provenance: dict, other: dict
) -> None:
    made.write(tmp_path, shards=1)
    changed = Made(LENGTHS, **other)
    object.__setattr__(changed.spec, "provenance", {**changed.spec.provenance, **provenance})
    with pytest.raises(ProvenanceError, match=f"with {field} = "):
        changed.write(tmp_path)
    assert made.write(tmp_path).verify() == []


def test_other_examples_of_the_same_split_are_refused(tmp_path: Path) -> None:
    Made(LENGTHS, tag="1e").write(tmp_path)
    with pytest.raises(ProvenanceError, match="other examples"):
        Made([*LENGTHS, 4], tag="2e").write(tmp_path)


def test_the_same_data_gives_the_same_files(tmp_path: Path) -> None:
    one, two = (Made(LENGTHS, hidden=256).write(tmp_path / name) for name in ("one", "two"))
    for shard in range(one.record.shards):
        assert record_of(one, shard) == record_of(two, shard)


@given(st.integers(0, 99_000_000))
def test_every_fraction_has_one_tag_that_reads_back(millionths: int) -> None:
    tag = SnapshotTag.of(millionths / 1e6)
    assert SnapshotTag(str(tag)) == tag
    assert round(tag.fraction * 1e6) == millionths


@pytest.mark.parametrize(
    "text",
    [
        *("", "é", "1", "1.0e", "01e", "0.30e", ".3e", "1e\n", "../1e", "1E", "-1e", "１e", "nul"),
        *("2e+1e", "1e+1e", "1e+", "+", "1e+untrained", "1e + 2e"),
    ],
)
def test_other_spellings_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"0\.3e|write 0|write 1"):
        SnapshotTag(text)


def test_tags_are_ordered_as_numbers() -> None:
    texts = ("10e", "0.3e", "2e", "0e", "1e+2e", "1e", "0.25e", "0.3e+2e", "untrained")
    tags = [SnapshotTag(t) for t in texts]
    expected = ["untrained", "0e", "0.25e", "0.3e", "1e", "2e", "0.3e+2e", "1e+2e", "10e"]
    assert sorted(tags) == expected


@given(st.text(max_size=70))
def test_only_plain_names_pass(text: str) -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    safe = 0 < len(text) <= 63 and set(text) <= allowed and text[0] not in "_-"
    if safe:
        assert check_name(text, "split") == text
    else:
        with pytest.raises(InputError, match="split name"):
            check_name(text, "split")
