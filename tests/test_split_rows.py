"""Splits as a ``datasets.Dataset``: the values, nothing copied, workers, and the errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Value, concatenate_datasets, load_from_disk
from stores import Made
from torch.utils.data import DataLoader

from bertvision.errors import IncompleteSplitError, InputError
from bertvision.featurestore.storage import local

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
    read = local._LocalFile.read_into

    def counted(file: Any, out: np.ndarray[Any, Any], offset: int) -> None:
        found.append(out.nbytes)
        read(file, out, offset)

    monkeypatch.setattr(local._LocalFile, "read_into", counted)
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
