"""The store as one meets it in a notebook: names, short reprs, batches and the text of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from stores import Made

from bertvision.errors import InputError, UnknownNameError
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.training.datamodule import ActivationDataModule, decoded

LENGTHS = [5, 31, 64, 1, 17, 40]


@pytest.fixture
def store(tmp_path: Path) -> ActivationStore:
    for tag in ("0.3e", "1e", "10e"):
        Made(LENGTHS, tag=tag, encoding="int8").write(tmp_path)
    return ActivationStore.open(tmp_path)


def test_a_number_or_a_whole_name_finds_what_is_stored(store: ActivationStore) -> None:
    assert store["0.3e/train"].name == store[0.3]["train"].name == "0.3e/train"
    assert store[1].tag == "1e"
    assert 0.3 in store
    assert 2 not in store
    assert "1e/dev" not in store
    with pytest.raises(UnknownNameError, match=r"no activations of 2e .* 0\.3e, 1e, 10e"):
        store[2]
    with pytest.raises(UnknownNameError, match="no split 'trian' of 1e .* train"):
        store["1e/trian"]
    with pytest.raises(InputError, match="not a snapshot tag"):
        store[-1]


def test_reprs_are_a_few_short_lines_with_sizes(store: ActivationStore, tmp_path: Path) -> None:
    split = store["1e"]["train"]
    shown = "6 examples of 158 tokens, 3 layers × 16, int8, 0.0 MB"
    assert repr(store).splitlines() == [
        f"<ActivationStore {tmp_path}: 3 snapshots>",
        "  0.3e  train",
        "  1e    train",
        "  10e   train",
    ]
    assert repr(store["1e"]).splitlines() == [
        f"<SnapshotSplits 1e of {tmp_path}: 1 split>",
        f"  train  {shown}",
    ]
    assert repr(split) == f"<ActivationSplit 1e/train: {shown}>\n  labels: start_positions"
    batch = split.read([0, 1], layers=[0, -1])
    of_batch = f"2 examples of {int(batch.lengths.sum())} tokens, 2 layers × 16"
    assert repr(batch).splitlines() == [
        f"<ActivationBatch: {of_batch}, int8 on cpu, 0.0 MB>",
        "  labels: start_positions",
    ]
    assert repr(decoded(batch, torch.bfloat16)).splitlines() == [
        f"<HiddenStates: {of_batch}, bfloat16 on cpu>",
        "  labels: start_positions",
    ]
    loader = ActivationLoader(split, batch_size=4, shuffle=False)
    next(iter(loader))
    assert repr(loader).splitlines() == [
        "<ActivationLoader 1e/train: 2 batches of 4 examples, next is batch 1 of epoch 0>",
        "  SequentialSampler()",
    ]


def test_reprs_of_large_or_damaged_stores_stay_short(tmp_path: Path) -> None:
    for i in range(14):
        Made([3], tag="1e", split=f"a-split-with-a-name-{i:02}").write(tmp_path)
    (tmp_path / "ledger/1e/a-split-with-a-name-03/split.json").write_text("{")
    store = ActivationStore.open(tmp_path)
    assert max(map(len, repr(store).splitlines()[1:])) <= 90
    lines = repr(store["1e"]).splitlines()
    assert len(lines) == 1 + 12 + 1
    assert lines[4].endswith("not readable: `bertvision store verify` says why")
    assert lines[-1] == "  … and 2 more"


def test_a_batch_has_the_names_of_what_a_trainer_gives(store: ActivationStore) -> None:
    batch = store["1e"]["train"].read([2, 0])
    given = decoded(batch, torch.float32)
    assert torch.equal(batch.hidden_states, given.hidden_states)
    for name in given._fields:
        assert hasattr(batch, name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"train": "trian"}, "no split 'trian' of 1e .* train"),
        ({"val": "dve"}, "no split 'dve' of 1e .* train"),
        ({"checkpoint": "2e"}, r"no activations of 2e .* 0\.3e, 1e, 10e"),
        ({"layers": [7]}, "layer 7 is not stored"),
    ],
)
def test_a_data_module_refuses_wrong_names_when_it_is_made(
    store: ActivationStore, tmp_path: Path, names: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ActivationDataModule(tmp_path, **{"checkpoint": "1e", **names})


def write(folder: Path, table: pa.Table, offsets: list[list[int]], **labels: np.ndarray) -> Made:
    """A split whose second stored example has these offsets, and the first has one token."""
    made = Made([1, len(offsets)], seed=None)
    spans = np.array([[-1, -1], *offsets], np.int32)
    made.contents = replace(
        made.contents, per_token={"offset_mapping": spans}, per_example=labels, examples=table
    )
    made.write(folder)
    return made


def test_tokens_of_a_question_stand_beside_the_text_of_its_context(tmp_path: Path) -> None:
    table = pa.table({"id": ["a"], "question": ["Who?"], "context": ["Anna founded Rome."]})
    # [CLS] who ? [SEP] founded rome . [SEP], and two windows of one question
    offsets = [[-1, -1]] * 4 + [[5, 12], [13, 17], [17, 18], [-1, -1]]
    write(tmp_path, table, offsets, question_index=np.zeros(2, np.int32))
    split = ActivationStore.open(tmp_path)["1e/train"]
    assert split.text(1) == ["", "", "", "", "founded", "Rome", ".", ""]
    assert len(split.text(-1)) == len(split[-1])
    assert split.text(0) == [""]
    with pytest.raises(IndexError, match="example 2 is outside 1e/train, which has 2"):
        split.text(2)
    for wrong in ("x", 1.0, None):
        with pytest.raises(TypeError, match=f"{wrong!r} is no example of 1e/train: .* 0 to 1"):
            split[wrong]


@pytest.mark.parametrize("between", [1, 2])  # special tokens, as BERT and RoBERTa have
def test_tokens_of_a_pair_stand_beside_the_text_of_their_own_sentence(
    tmp_path: Path, between: int
) -> None:
    table = pa.table({"id": ["a", "b"], "text": ["x", "One two"], "pair": [None, "Three"]})
    special = [[-1, -1]]
    write(tmp_path, table, [*special, [0, 3], [4, 7], *special * between, [0, 5], *special])
    text = ActivationStore.open(tmp_path)["1e/train"].text(1)
    assert text == ["", "One", "two", *[""] * between, "Three", ""]


def test_splits_without_text_for_their_tokens_say_so(tmp_path: Path) -> None:
    made = Made([1, 1], split="train-mean")
    made.spec.provenance["tokens"] = "mean"  # type: ignore[index]
    made.write(tmp_path)
    with pytest.raises(InputError, match=r"1e/train-mean keeps no token .* mean"):
        ActivationStore.open(tmp_path)["1e/train-mean"].text(0)
    write(tmp_path / "own", pa.table({"id": ["a", "b"], "verse": ["x", "y"]}), [[0, 1]])
    with pytest.raises(InputError, match="no column context or text: it has id, verse"):
        ActivationStore.open(tmp_path / "own")["1e/train"].text(0)
