"""Hidden states that any code makes become a split: whatever their order, lengths and ends."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import terminal
import torch
from stores import Made, record_path
from torch import Tensor

import bertvision
from bertvision import (
    ActivationLoader,
    ActivationSplit,
    ActivationStore,
    ShardPlan,
    Workspace,
)
from bertvision.errors import (
    CorruptStoreError,
    DiskSpaceError,
    IncompleteSplitError,
    InputError,
    LockedError,
    NonFiniteError,
    ProvenanceError,
)
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.storage import OpenFile
from bertvision.pipelines.workspace.heads import head_activations

LAYERS, HIDDEN = 3, 8
SHAPE: dict[str, Any] = {"hidden_size": HIDDEN, "layers": list(range(LAYERS)), "shard_tokens": 64}
LENGTHS = {"d": 40, "a": 17, "f": 1, "b": 64, "e": 30, "c": 33, "g": 9}
"""Keys and lengths in the order in which they are added: four shards."""


def states(key: str) -> Tensor:
    """Hidden states (seq, layers, hidden) that are a function of the key."""
    generator = torch.Generator().manual_seed(ord(key[0]))
    return torch.randn(LENGTHS[key], LAYERS, HIDDEN, generator=generator)


def write(store: ActivationStore, permute: int | None = None, **options: Any) -> list[str]:
    """Add what is not there yet; returns the keys that were added."""
    added = []
    with store.writer("0e", "train", **(SHAPE | {"encoding": "float32"} | options)) as writer:
        for key in LENGTHS:
            if key not in writer:
                writer.add(key, states(key))
                added.append(key)
        writer.finish(permute)
    return added


def check(split: ActivationSplit, tolerance: float = 0.0) -> None:
    """Every example is there under its key, once, with the values that were given."""
    keys = split.table()["id"].to_pylist()
    assert keys == sorted(LENGTHS)
    stored = [keys[row] for row in split.plan.example_id.tolist()]
    assert sorted(stored) == keys
    for key, found in zip(stored, split, strict=True):
        truth = states(key).transpose(1, 2)
        assert float((found - truth).norm()) <= tolerance * float(truth.norm()), key
    assert split.verify() == []


@pytest.fixture
def store(tmp_path: Path) -> ActivationStore:
    return ActivationStore.create(tmp_path / "store")


@pytest.mark.parametrize(
    ("encoding", "tolerance"),
    [("float32", 0), ("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 1e-2), ("int4", 2e-1)],
)
def test_what_is_added_is_read_again_in_every_encoding(
    store: ActivationStore, encoding: str, tolerance: float
) -> None:
    write(store, encoding=encoding)
    split = ActivationStore.open(str(store.storage))["0e/train"]
    check(split, tolerance)
    assert split.plan.n_shards == 4


def test_a_finished_split_is_one_that_readers_of_today_know(store: ActivationStore) -> None:
    write(store)
    split = store["0e/train"]
    assert set(split.record.requires) == {"split_sha256", "table_digest"}
    assert split.info()["complete"]
    batches = list(ActivationLoader(split, batch_size=3, seed=1))
    assert sorted(int(i) for batch in batches for i in batch.examples) == list(range(7))
    assert split.dask(layers=[1]).compute().shape == (sum(LENGTHS.values()), 1, HIDDEN)
    assert store.to_xarray()["0e/train"]["hidden_states"].shape[0] == sum(LENGTHS.values())
    assert not list(Path(str(store.storage)).rglob("*.safetensors"))


def test_a_split_that_grows_is_refused_by_name_and_shown_as_such(store: ActivationStore) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        writer.add("a", states("a"))
    with pytest.raises(IncompleteSplitError, match=r"0e/train .* is still being written, 1 shard"):
        store["0e/train"]
    assert "still being written" in repr(store["0e"])
    assert store.splits() == store.stored_splits() == []
    listed = terminal.run("store", "ls", "--store", store.storage)
    assert "still being written, 1 shard" in listed.stdout
    (info,) = json.loads(terminal.run("store", "ls", "--store", store.storage, "--json").stdout)
    assert (info["examples"], info["tokens"], info["complete"]) == (1, LENGTHS["a"], False)
    shown = terminal.run("store", "info", "0e/train", "--store", store.storage, "--json")
    assert json.loads(shown.stdout) == info
    which = terminal.run("store", "info", "--store", store.storage)
    assert "name one: 0e/train" in which.stderr
    write(store, encoding="int8")
    assert len(store.stored_splits()) == 1


def test_token_ids_labels_and_fields_lie_beside_the_states(store: ActivationStore) -> None:
    def beside(key: str) -> dict[str, Any]:
        n = LENGTHS[key]
        return {
            "input_ids": list(range(n)),
            "labels": {"label": ord(key), "pair": np.array([n, n + 1], np.int16)},
            "fields": {
                "loss_mask": torch.arange(n) % 2 == 0,
                "aux": torch.full((n, 2), float(n), dtype=torch.float16),
            },
        }

    keys = "dafbecg"
    for part in (keys[:4], keys[4:]):  # in two sittings
        with store.writer("0e", "train", **SHAPE) as writer:
            for key in part:
                writer.add(key, states(key), **beside(key))
    with store.writer("0e", "train", **SHAPE) as writer:
        split = writer.finish()
    names = sorted(LENGTHS)
    assert split.label_names == ["label", "pair"]
    arrays = {name: split.array(name) for name in ("input_ids", "loss_mask", "aux")}
    assert [array.dtype for array in arrays.values()] == [np.int32, np.bool_, np.float16]
    for i, row in enumerate(split.plan.example_id):
        key = names[row]
        given, n, first = beside(key), LENGTHS[key], int(split.plan.first_token[i])
        assert split.labels["label"][i] == ord(key)
        assert split.labels["pair"][i].tolist() == [n, n + 1]
        assert arrays["input_ids"][first : first + n].tolist() == given["input_ids"]
        for name, value in given["fields"].items():
            assert np.array_equal(arrays[name][first : first + n], value.numpy())
    assert split.verify() == []
    assert split.read([0]).labels["label"].tolist() == [ord(names[split.plan.example_id[0]])]


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
def test_a_split_may_be_finished_in_another_order(store: ActivationStore, encoding: str) -> None:
    lengths = [LENGTHS[key] for key in sorted(LENGTHS)]
    with store.writer("0e", "train", **SHAPE, encoding=encoding) as writer:
        for key in LENGTHS:
            writer.add(
                key,
                states(key),
                input_ids=[ord(key)] * LENGTHS[key],
                labels={"label": ord(key)},
            )
        split = writer.finish(permute=5)
    # the plan is that of an extraction of the same examples, in the order of their keys
    expected = ShardPlan.make(lengths, shard_tokens=64, seed=5)
    assert split.plan.digest == expected.digest == split.record.plan_sha256
    check(split, {"float32": 0, "bfloat16": 1e-2, "int8": 1e-2, "int4": 2e-1}[encoding])
    ids, keys = split.array("input_ids"), split.table()["id"].to_pylist()
    for i, row in enumerate(split.plan.example_id):
        first, n = int(split.plan.first_token[i]), int(split.plan.n_tokens[i])
        assert ids[first : first + n].tolist() == [ord(keys[row])] * n
        assert split.labels["label"][i] == ord(keys[row])
    with (
        store.writer("0e", "train", **SHAPE, encoding=encoding) as writer,
        pytest.raises(InputError, match="complete already, with permute=5"),
    ):
        writer.finish()


def test_an_order_that_has_no_room_is_refused_before_anything_moves(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.writer("0e", "train", **SHAPE, encoding="float32") as writer:
        for key in LENGTHS:
            writer.add(key, states(key))
        with monkeypatch.context() as full:
            full.setattr(LocalStorage, "free_bytes", lambda self: 100)
            with pytest.raises(DiskSpaceError, match="has room for 100; free some space"):
                writer.finish(permute=1)
    # its finish was begun, and is ended by whoever opens it next
    check(store.writer("0e", "train", **SHAPE, encoding="float32").finish(permute=1))


def test_layers_may_have_names_that_are_read_by(store: ActivationStore) -> None:
    options = SHAPE | {"layers": ["embed", "mlp.out", "resid"]}
    write(store, **options)
    split = store["0e/train"]
    assert split.layer_names == ["embed", "mlp.out", "resid"]
    assert torch.equal(split.read([0], layers=["resid"]).codes, split.read([0], layers=[2]).codes)
    with pytest.raises(InputError, match="layer mlp is not stored .* holds embed, mlp.out, resid"):
        split.read([0], layers=["mlp"])


def test_examples_of_one_token_are_taken_for_poolings(store: ActivationStore) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        for i in range(100):
            writer.add(i, states("a")[i % 17 : i % 17 + 1])
        split = writer.finish()
    assert split.error_names == ["pooled"]
    assert float(split.encoding_error["pooled"].max()) < 0.01
    assert len(split) == 100


def test_channel_statistics_may_be_given(store: ActivationStore) -> None:
    given = (np.full((LAYERS, HIDDEN), 0.5), np.full((LAYERS, HIDDEN), 2.0))
    with store.writer("0e", "train", **SHAPE, channel_stats=given) as writer:
        writer.add("a", states("a"))
    other = (given[0] + 1, given[1])
    with pytest.raises(InputError, match="begun with other channel statistics"):
        store.writer("0e", "train", **SHAPE, channel_stats=other)
    with store.writer("0e", "train", **SHAPE) as writer:
        split = writer.finish()
    assert split.stats is not None
    assert torch.equal(split.stats.std, torch.full((LAYERS, HIDDEN), 2.0))


def test_nan_is_refused_by_key_or_replaced_and_counted(store: ActivationStore) -> None:
    bad = states("a")
    bad[3, 1, 2] = torch.nan
    with store.writer("0e", "train", **SHAPE) as writer:
        with pytest.raises(NonFiniteError, match="example 'a'"):
            writer.add("a", bad)
        writer.add("b", states("b"))
        writer.add("c", states("c"))  # the shard before it is encoded by now
        with pytest.raises(NonFiniteError, match="example 'a'"):
            writer.add("a", bad)
    with store.writer("0e", "train", **SHAPE, nonfinite="record") as writer:
        writer.add("a", bad)
        split = writer.finish()
    assert split.info()["nonfinite"] == 1
    assert len(split) == 3


@pytest.mark.parametrize("begun", [False, True], ids=["new", "gone on with"])
@pytest.mark.parametrize(
    ("encoding", "value"),
    [("int8", 1e39), ("int4", 3e38), ("float16", 1e5)],
    ids=str,
)
def test_a_value_that_does_not_fit_costs_its_own_example_alone(
    store: ActivationStore, encoding: str, value: float, begun: bool
) -> None:
    """Whoever goes on after the error stores nothing that was not given."""
    options = SHAPE | {"encoding": encoding}
    if begun:
        with store.writer("0e", "train", **options) as writer:
            writer.add("d", states("d"))
    refused = []
    with store.writer("0e", "train", **options) as writer:
        for key in LENGTHS:
            given = states(key).double()
            if key == "f":
                given[0, 1, 2] = value
            if key not in writer:
                try:
                    writer.add(key, given)
                except NonFiniteError as error:
                    refused.append(str(error))
        split = writer.finish()
    assert len(refused) == 1
    assert refused[0].startswith("example 'f'")
    keys = split.table()["id"].to_pylist()
    assert keys == sorted(set(LENGTHS) - {"f"})
    for row, found in zip(split.plan.example_id.tolist(), split, strict=True):
        truth = states(keys[row]).transpose(1, 2)
        assert float((found - truth).norm()) <= 0.2 * float(truth.norm()), keys[row]
    assert split.verify() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", torch.zeros(4, HIDDEN, LAYERS)), r"dims=\('seq', 'hidden', 'layers'\) says"),
        (("x", torch.zeros(4, LAYERS, HIDDEN, dtype=torch.long)), "give floats"),
        (("x", torch.zeros(65, LAYERS, HIDDEN)), "larger shard_tokens"),
        (("x", torch.zeros(0, LAYERS, HIDDEN)), "0 tokens"),
        (("", torch.zeros(4, LAYERS, HIDDEN)), "'' is no key"),
        (("a\x1b[2J", torch.zeros(4, LAYERS, HIDDEN)), "cannot be printed"),
        ((True, torch.zeros(4, LAYERS, HIDDEN)), "True is no key"),
        (("x", torch.zeros(4, LAYERS, HIDDEN).to(torch.float8_e4m3fn)), "give floats"),
        (("x", torch.zeros(4, LAYERS, HIDDEN, device="meta")), "give a dense tensor"),
        (("x", torch.zeros(4, LAYERS, HIDDEN).to_sparse()), "give a dense tensor"),
        (("x", None), "no array"),
        (("x", "text"), "no array"),
        (("x", np.zeros((4, LAYERS, HIDDEN), object)), "no array"),
        (("x", np.zeros((4, LAYERS, HIDDEN), np.longdouble)), "no array"),
        (("a", torch.zeros(4, LAYERS, HIDDEN)), "has an example 'a' already"),
    ],
)
def test_what_cannot_be_an_example_is_refused(
    store: ActivationStore, arguments: tuple[Any, Any], message: str
) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        writer.add("a", states("a"))
        with pytest.raises(InputError, match=message):
            writer.add(*arguments)
        assert len(writer) == 1


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"input_ids": [1, 2]}, "first axis must be that of the 17 tokens"),
        ({"input_ids": [0.5] * 17}, "whole numbers"),
        ({"labels": {"Label": 1}}, "no name of an array"),
        ({"labels": {"n_tokens": 1}}, "the store uses itself"),
        ({"labels": {"text": "hello"}}, "numbers and truth values"),
        ({"labels": {"m": 1}, "fields": {"m": [1] * 17}}, "given twice"),
        ({"fields": {"aux": torch.zeros(17, dtype=torch.bfloat16)}}, "cast it"),
        ({"labels": [1]}, "no arrays by name"),
        ({"labels": {"label": torch.zeros(2).to_sparse()}}, "give a dense tensor"),
        ({}, "has no 'label', the examples before it have int64 of each example"),
        ({"labels": {"label": 1.0}}, "float64 of each example"),
    ],
)
def test_arrays_that_cannot_be_stored_or_differ_are_refused(
    store: ActivationStore, beside: dict[str, Any], message: str
) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        writer.add("d", states("d"), labels={"label": 2})
        with pytest.raises(InputError, match=message):
            writer.add("a", states("a"), **beside)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, "layers are"),
        ({"layers": [2, 1]}, "layers do not increase"),
        ({"layers": ["a", 1]}, "one of names"),
        ({"layers": ["a", "a"]}, "name each once"),
        ({"encoding": "int9"}, "unknown encoding"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 7, "encoding": "int4"}, "cannot hold 7"),
        ({"compression": "lzma"}, "compression"),
        ({"compression": "pcodec"}, "pcodec takes values of two bytes"),
        ({"provenance": {"model": [1]}}, "provenance.model"),
        ({"part": -1}, "part is -1"),
        ({"nonfinite": "ignore"}, "choose error or record"),
        ({"tokenizer": "bert"}, "no fast tokenizer"),
        ({"channel_stats": ([0.0], [1.0])}, r"\(3, 8\)"),
        ({"channel_stats": 5}, "no pair of arrays"),
        ({"part": 1.0}, "part is 1.0: give a whole number"),  # its lock would be one of its own
        ({"part": "0"}, "part is '0'"),
        ({"part": True}, "part is True"),
        ({"layers": 3}, "layers are 3"),
        ({"layers": [None, 1]}, "a layer is None"),
        ({"layers": [0.5, 1.5, 2.9]}, "a layer is 0.5"),
        ({"layers": ["a", "b", "\x1b[2J"]}, "can be printed"),
        ({"hidden_size": 8.0}, "hidden_size is 8.0"),
        ({"shard_tokens": "64"}, "shard_tokens is '64'"),
        ({"provenance": "x"}, "provenance is 'x'"),
    ],
)
def test_what_cannot_be_a_split_is_refused_before_anything_is_written(
    store: ActivationStore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        store.writer("0e", "train", **(SHAPE | options))
    assert store.tags() == []


def test_going_on_with_something_else_is_refused_by_the_field(store: ActivationStore) -> None:
    options = SHAPE | {"provenance": {"model": "tiny"}}
    with store.writer("0e", "train", **options) as writer:
        writer.add("a", states("a"))
    for changed, field in (
        ({"provenance": {"model": "other"}}, "model = 'tiny'"),
        ({"encoding": "float16"}, "encoding"),
        ({"shard_tokens": 128}, "shard_tokens"),
        ({"layers": ["x", "y", "z"]}, "layer_names"),
    ):
        with pytest.raises(ProvenanceError, match=field):
            store.writer("0e", "train", **(options | changed))


def test_a_complete_split_is_left_as_it_is(store: ActivationStore) -> None:
    write(store)
    assert write(store) == []
    with store.writer("0e", "train", **SHAPE, encoding="float32") as writer:
        assert list(writer) == sorted(LENGTHS)
        with pytest.raises(InputError, match=r"complete and takes no more .*store.remove\("):
            writer.add("z", states("a"))
    with pytest.raises(ProvenanceError, match="encoding"):
        store.writer("0e", "train", **SHAPE, encoding="int8")
    check(store["0e/train"])


def test_other_snapshots_of_a_split_have_the_same_examples(store: ActivationStore) -> None:
    write(store)
    with store.writer("1e", "train", **SHAPE) as writer:
        with pytest.raises(InputError, match="'z' is no example of train in other snapshots"):
            writer.add("z", states("a"))
        for key in "abcdef":  # in another order
            writer.add(key, states(key))
        with pytest.raises(InputError, match="lacks 1 of the 7 examples .* 'g' first"):
            writer.finish()
        writer.add("g", states("g"))
        check(writer.finish(), 1e-2)
    assert [split.name for split in store.splits()] == ["0e/train", "1e/train"]


def test_a_split_that_was_extracted_is_no_other_snapshot_of_one_by_keys(tmp_path: Path) -> None:
    made = Made([5, 9])
    table = pa.table({"id": ["a", "b"], "text": ["one", "two"]})
    made.contents = replace(made.contents, examples=table)
    store = ActivationStore(made.write(tmp_path / "store").storage)  # 1e/train
    with pytest.raises(InputError, match="a split 'train' of other examples, in 1e"):
        store.writer("0e", "train", **SHAPE)
    assert store.tags() == ["1e"]


def test_a_writer_that_ends_by_an_error_drops_the_shard_it_was_filling(
    store: ActivationStore,
) -> None:
    with pytest.raises(ZeroDivisionError), store.writer("0e", "train", **SHAPE) as writer:  # noqa: PT012
        for key in "dafb":
            writer.add(key, states(key))
        raise ZeroDivisionError
    with pytest.raises(InputError, match="is closed"):
        writer.add("b", states("b"))
    with pytest.raises(InputError, match="closed by an error, and what it held was dropped"):
        writer.finish()
    with store.writer("0e", "train", **SHAPE) as writer:
        assert list(writer) == ["a", "d", "f"]


def test_a_part_has_one_writer_and_who_wants_all_waits_for_none(store: ActivationStore) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        writer.add("a", states("a"))
        with pytest.raises(LockedError, match="part 0 of 0e/train"):
            store.writer("0e", "train", **SHAPE)
        with pytest.raises(LockedError, match="adding examples to 0e/train"):
            store.remove("0e", "train")
        with store.writer("0e", "train", **SHAPE, part=1) as other:
            other.add("b", states("b"))
            with pytest.raises(LockedError, match="adding examples to 0e/train"):
                other.finish()
        assert len(writer.finish()) == 2


def test_a_growing_split_can_be_removed(store: ActivationStore) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        writer.add("a", states("a"), labels={"label": 1})
    assert store.remove("0e", "train") > 0
    assert store.tags() == []
    write(store)
    check(store["0e/train"])


def test_verify_reads_the_shards_of_a_growing_split_too(store: ActivationStore) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        for key in "da":
            writer.add(key, states(key), labels={"label": 1})
    for files in ("hidden_states/c/0/0/0", "scale/c/0/0", "00000.safetensors"):
        (path,) = Path(str(store.storage)).rglob(files)
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        found = terminal.run("store", "verify", "--store", store.storage)
        assert found.exit_code == 1
        assert "0e/train shard 0: " in found.stdout
        path.write_bytes(whole)
    found = terminal.run("store", "verify", "--store", store.storage)
    assert found.exit_code == 1  # it is not whole
    assert found.stdout == "0e/train is still being written: 1 shard\n"


@pytest.mark.parametrize("file", ["hidden_states/c/1/0/0", "scale/c/1/0", "00001.safetensors"])
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
@pytest.mark.parametrize("whose", ["own", "another's"])
def test_a_damaged_shard_is_found_before_it_can_be_replaced_no_more(
    store: ActivationStore, file: str, damage: str, whose: str
) -> None:
    def add(writer: Any, keys: str) -> None:
        for key in keys:
            writer.add(key, states(key), labels={"label": 1})
        writer.flush()

    writer = store.writer("0e", "train", **SHAPE)
    for keys in ("da", "b", "ec"):
        add(writer, keys)
    if whose == "another's":
        writer.close()
        writer = store.writer("0e", "train", **SHAPE)
    (path,) = Path(str(store.storage)).rglob(file)
    whole = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(whole[:-1] if damage == "cut" else bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(CorruptStoreError, match=r"shard 1: .*: remove .*00001.json and add"):
        writer.finish()
    Path(str(store.storage), "ledger/0e/train/00001.json").unlink()
    with store.writer("0e", "train", **SHAPE) as writer:
        assert list(writer) == list("acde")
        add(writer, "b")
        split = writer.finish()
    assert split.verify() == []
    assert split.table()["id"].to_pylist() == list("abcde")


@pytest.mark.parametrize("own", [True, False])
def test_what_others_wrote_is_read_again_before_a_split_is_finished_and_the_own_is_not(
    tmp_path: Path, own: bool
) -> None:
    opened = []

    class Noting(LocalStorage):
        def open(self, key: str) -> Any:
            opened.append(key)
            return super().open(key)

    store = ActivationStore(Noting(tmp_path / "store"))
    writer = store.writer("0e", "train", **SHAPE)
    for key in "dafb":  # shards that are nearly full stay as they are
        writer.add(key, states(key))
    writer.flush()
    if not own:
        writer.close()
        writer = store.writer("0e", "train", **SHAPE)
    for key in "ec":
        writer.add(key, states(key))
    writer.finish()
    shards = {key for key in opened if "/hidden_states/" in key}
    assert {key.rsplit("/c/")[1] for key in shards} == (set() if own else {"0/0/0", "1/0/0"})


@pytest.mark.parametrize(("encoding", "permute"), [("float32", None), ("int8", 5)])
@pytest.mark.parametrize(
    ("shard_tokens", "flushes"), [(4096, 0), (16, 0), (64, 3), (64, 40)], ids=str
)
def test_a_small_split_takes_what_it_holds(
    tmp_path: Path, encoding: str, shard_tokens: int, flushes: int, permute: int | None
) -> None:
    """One part in ten of its shards may be fill, however it was filled."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 6, 40).tolist()
    given = [torch.from_numpy(rng.normal(size=(n, 2, 64))) for n in lengths]
    store = ActivationStore.create(tmp_path)
    shape: dict[str, Any] = {"hidden_size": 64, "layers": [0, 1], "shard_tokens": shard_tokens}
    writer = store.writer("0e", "s", encoding=encoding, **shape)
    for i, hidden_states in enumerate(given):
        writer.add(i, hidden_states, labels={"y": i}, fields={"at": np.arange(lengths[i])})
        if flushes and i % (40 // flushes) == 0:
            writer.flush()
    split = writer.finish(permute)
    assert split.plan.fill <= 0.1
    assert split.verify() == []
    ids = split.table()["id"].to_pylist()
    size = {"float32": 4, "int8": 1}[encoding]
    token = 2 * 64 * size + (2 * 4 if encoding == "int8" else 0)  # codes, and a scale for a layer
    shards = [path for path in (tmp_path / "arrays.zarr/0e/s").glob("[hs]*/c/*/**/*")]
    stored = sum(path.stat().st_size for path in shards if path.is_file())
    assert stored <= 1.1 * sum(lengths) * token + 200 * split.plan.n_shards
    for i, row in enumerate(split.plan.example_id.tolist()):
        key = int(ids[row])
        first, n = int(split.plan.first_token[i]), lengths[key]
        assert torch.allclose(split[i].permute(0, 2, 1), given[key].float(), atol=0.1)
        assert split.array("at")[first : first + n].tolist() == list(range(n))
        assert int(split.array("y")[i]) == key
    # it is known as complete, whatever the capacity that it was begun with
    with pytest.raises(InputError, match="is complete and takes no more examples"):
        store.writer("0e", "s", encoding=encoding, **shape).add("new", given[0])


def test_what_lies_beside_the_states_is_read_once_whatever_the_number_of_arrays(
    tmp_path: Path,
) -> None:
    read = 0

    class Counted:
        def __init__(self, file: OpenFile) -> None:
            self._file, self.size, self.close = file, file.size, file.close

        def read_into(self, out: np.ndarray[Any, Any], offset: int) -> None:
            nonlocal read
            read += out.nbytes
            self._file.read_into(out, offset)

    class Counting(LocalStorage):
        def open(self, key: str) -> Any:
            file = super().open(key)
            return Counted(file) if "/rows/" in key else file

    store = ActivationStore(Counting(tmp_path / "store"))
    with store.writer("0e", "train", **SHAPE) as writer:
        for key in LENGTHS:
            fields = {f"f{i}": torch.full((LENGTHS[key], 100), i) for i in range(8)}
            writer.add(key, states(key), fields=fields)
        split = writer.finish()
    held = sum(LENGTHS.values()) * 100 * 8 * 8
    assert held <= read <= 1.1 * held  # the checksum was taken when they were written
    assert all((split.array(f"f{i}")[:40] == i).all() for i in range(8))


@pytest.mark.parametrize("wrong", [{"permute": -1}, {"permute": "a"}, {"examples": 1.0}])
def test_a_wrong_finish_leaves_the_writer_open(
    store: ActivationStore, wrong: dict[str, Any]
) -> None:
    with store.writer("0e", "train", **SHAPE) as writer:
        writer.add("a", states("a"))
        with pytest.raises(InputError, match="give a whole number from 0 on"):
            writer.finish(**wrong)
        writer.add("d", states("d"))
        assert len(writer.finish(permute=10**30)) == 2


def test_a_finished_split_that_lost_a_shard_is_not_whole_to_its_writer_either(
    store: ActivationStore,
) -> None:
    """And who can mend it is said: no command can compute the states of others' code."""
    write(store)
    record_path(store["0e/train"], 0).unlink()
    advice = "0e/train lacks 1 of .*: no command wrote it .*`bertvision store rm 0e/train`, and"
    with pytest.raises(IncompleteSplitError, match=advice):
        write(store)
    with pytest.raises(IncompleteSplitError, match=advice):
        store["0e/train"].tokens(0)
    with pytest.raises(IncompleteSplitError, match="shard 0 is not written: no command"):
        store["0e/train"].read([0])


def test_nothing_to_finish_is_said(store: ActivationStore) -> None:
    with (
        store.writer("0e", "train", **SHAPE) as writer,
        pytest.raises(InputError, match="no example yet"),
    ):
        writer.finish()


def test_a_folder_of_other_things_is_no_place_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes.txt and is no activation store"):
        ActivationStore.create(tmp_path)
    made = ActivationStore.create(tmp_path / "new/store")
    assert ActivationStore.open(str(made.storage)).tags() == []


def test_a_store_in_an_object_store_is_written_likewise() -> None:
    store = ActivationStore.create("memory://writer-test")
    with store.writer("0e", "train", **SHAPE, encoding="float32") as writer:
        writer.add("a", states("a"))
    assert "a" not in write(store, permute=1)
    check(store["0e/train"])


def test_heads_of_a_task_are_not_trained_on_states_without_its_labels(
    workspace: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "space"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("activations"))
    space = Workspace.find(root)
    store = ActivationStore.create(space.activations)
    with store.writer("1e", "train", **SHAPE) as writer:
        writer.add("a", states("a"))
    with pytest.raises(IncompleteSplitError, match="1e/train .* is still being written"):
        head_activations(space, "1e", "all", "train")
    status = bertvision.status(workspace=root)
    assert status.growing == {"1e": ["train"]}
    assert "train (being written)" in str(status)
    with store.writer("1e", "train", **SHAPE) as writer:
        writer.finish()
    with pytest.raises(ProvenanceError, match="1e/train was written by `store.writer`"):
        head_activations(space, "1e", "all", "train")
    assert bertvision.status(workspace=root)


@pytest.mark.parametrize("exponent", [0, -5, -12, -13, -20, -30])
@pytest.mark.parametrize(
    ("encoding", "most"), [("int8", 0.015), ("int4", 0.25), ("bfloat16", 0.01)]
)
def test_values_of_any_size_keep_as_much_of_themselves(
    tmp_path: Path, encoding: str, most: float, exponent: int
) -> None:
    rng = np.random.default_rng(4)
    given = [
        rng.normal(size=(6, 2, 64)).astype("f4") * np.float32(10.0**exponent) for _ in range(9)
    ]
    with ActivationStore.create(tmp_path).writer(
        "0e", "s", hidden_size=64, layers=[0, 1], encoding=encoding
    ) as writer:
        for i, hidden_states in enumerate(given):
            writer.add(i, hidden_states)
        split = writer.finish()
    stored = np.concatenate([split[i].permute(0, 2, 1).numpy() for i in range(9)]).astype(float)
    true = np.concatenate([given[i] for i in split.plan.example_id]).astype(float)
    lost = np.linalg.norm(stored - true, axis=-1) / np.linalg.norm(true, axis=-1)
    assert lost.max() < most
    for errors in split.encoding_error.values():
        assert (errors > 0.003).all()  # measured against values of that size


def test_a_constant_channel_stays_exact_beside_small_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    given = (rng.normal(size=(20, 1, 64)) * 1e-20).astype("f4")
    given[:, :, 3], given[:, :, 5] = 7.25, 0
    with ActivationStore.create(tmp_path).writer("0e", "s", hidden_size=64, layers=[0]) as writer:
        writer.add(0, given)
        stored = writer.finish()[0].permute(0, 2, 1).numpy()
    assert (stored[:, :, 3] == 7.25).all()
    assert (stored[:, :, 5] == 0).all()
    others = [c for c in range(64) if c not in (3, 5)]
    assert abs(stored - given)[..., others].max() < 1e-21


@pytest.mark.parametrize(
    ("encoding", "size", "said"),
    [
        ("float16", 1e-7, "lose 1[0-9]% of themselves in float16"),
        ("float16", 1e-10, None),
        ("int8", 1e-4, "lose 100% of themselves in int8"),
        ("int4", 1e-4, "lose 100% of themselves in int4"),
    ],
)
def test_values_that_an_encoding_loses_are_said_or_refused(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    encoding: str,
    size: float,
    said: str | None,
) -> None:
    """Gradients become so: of a usual size in the first shard, small in the others."""
    rng = np.random.default_rng(4)
    writer = ActivationStore.create(tmp_path).writer(
        "0e", "s", hidden_size=64, layers=[0, 1], encoding=encoding, shard_tokens=64
    )
    for i in range(16):
        writer.add(i, rng.normal(size=(6, 2, 64)) + 0.1)
    assert not caplog.records
    small = rng.normal(size=(6, 2, 64)) * size
    if said:
        writer.add("small", small)
        assert re.search(said, caplog.text)
        if encoding != "float16":  # one example may be small; a drift of all of them is refused
            for i in range(14):
                writer.add(f"small-{i}", small)
            with pytest.raises(NonFiniteError, match="choose encoding bfloat16"):
                writer.add("one more", small)
            assert len(caplog.records) == 1
    else:
        with pytest.raises(NonFiniteError, match="example 'small'.*choose encoding bfloat16"):
            writer.add("small", small)
        assert "small" not in writer
        writer.add("zeros", np.zeros((6, 2, 64)))  # which have nothing to lose
    writer.finish()


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_a_channel_that_is_off_in_the_sample_does_not_take_all_when_it_is_on(
    tmp_path: Path, encoding: str
) -> None:
    rng = np.random.default_rng(4)
    states = rng.normal(size=(40, 1, 64))
    states[:, :, 7] = rng.normal(size=(40, 1)) * 1e-17
    with ActivationStore.create(tmp_path).writer(
        "0e", "s", hidden_size=64, layers=[0], encoding=encoding, shard_tokens=64
    ) as writer:
        for i in range(8):
            writer.add(i, states[5 * i : 5 * i + 5])
        writer.flush()
        on = states[:5].copy()
        on[:, :, 7] = 2.5
        writer.add("on", on)
        split = writer.finish()
    row = split.table()["id"].to_pylist().index("on")
    (stored,) = np.flatnonzero(split.plan.example_id == row)
    lost = split[int(stored)].permute(0, 2, 1).numpy() - on
    assert np.linalg.norm(lost) / np.linalg.norm(on) < (0.02 if encoding == "int8" else 0.25)


def test_what_was_added_beside_a_refused_example_is_not_replaced(tmp_path: Path) -> None:
    """`add` says that another example, which waited, does not fit; its own is there."""
    store = ActivationStore.create(tmp_path)
    writer = store.writer("0e", "s", hidden_size=64, layers=[0], encoding="int4", shard_tokens=8)
    rng = np.random.default_rng(0)
    writer.add("usual", rng.normal(size=(7, 1, 64)))
    writer.add("x", rng.normal(size=(7, 1, 64)))
    with pytest.raises(InputError, match="has an example 'x' already"):
        writer.add("x", np.zeros((7, 1, 64)))
    with pytest.raises(InputError, match="has an example 'usual' already"):
        writer.add("usual", np.zeros((7, 1, 64)))
    writer.finish()


@pytest.mark.parametrize("dims", list(permutations(("seq", "layers", "hidden"))))
def test_an_example_goes_in_with_its_axes_in_any_order(tmp_path: Path, dims: Sequence[str]) -> None:
    order = [("seq", "layers", "hidden").index(dim) for dim in dims]
    with ActivationStore.create(tmp_path).writer("0e", "train", **SHAPE, encoding="float32") as out:
        out.add("a", states("a").permute(order), dims=dims)
        out.add("b", states("b").numpy().transpose(order), dims=dims)
        with pytest.raises(InputError, match="give 'seq', 'layers', 'hidden' in the array's order"):
            out.add("c", states("c"), dims=(*dims[:2], "token"))
        split = out.finish()
    for example, key in zip(split, "ab", strict=True):
        assert torch.equal(example.transpose(1, 2), states(key))
