"""Every store that is written can be read: where it could not, nothing is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import Made

from bertvision.errors import CorruptStoreError, InputError, ProvenanceError
from bertvision.featurestore.format import arrays, examples, shard
from bertvision.featurestore.format.examples import table_digest
from bertvision.featurestore.split import ActivationSplit

TEXTS = st.text(max_size=6)
ANSWERS = st.lists(st.fixed_dictionaries({"text": TEXTS, "answer_start": st.integers(-9, 9)}))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXTS,
            "context": st.none() | TEXTS,
            "answers": st.none() | ANSWERS,
            "is_impossible": st.none() | st.booleans(),
            "label": st.none() | st.floats(width=32, allow_nan=False),
        }
    ),
    max_size=12,
)
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "context": pa.large_string(),
        "answers": pa.list_(pa.struct({"text": pa.string(), "answer_start": pa.int32()})),
        "is_impossible": pa.bool_(),
        "label": pa.float32(),
    }
)


@given(rows=ROWS, cuts=st.lists(st.integers(0, 12), max_size=3))
def test_a_digest_is_of_what_a_table_holds_and_not_of_how_it_lies(
    rows: list[dict[str, Any]], cuts: list[int]
) -> None:
    table = pa.Table.from_pylist(rows, SCHEMA)
    ends = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [table.slice(a, b - a) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    assert table_digest(pa.concat_tables(parts)) == table_digest(table)
    digest = table_digest(table)
    for column in SCHEMA.names:
        for i in range(len(rows)):
            other = [dict(row) for row in rows]
            other[i][column] = {"id": "other text", "context": "other text", "label": 0.5}.get(
                column, [{"text": "other", "answer_start": 5}] if column == "answers" else None
            )
            if other != rows:
                assert table_digest(pa.Table.from_pylist(other, SCHEMA)) != digest


def test_neighbouring_texts_do_not_run_into_each_other() -> None:
    tables = [{"a": ["ab", "c"]}, {"a": ["a", "bc"]}, {"a": ["abc", ""]}, {"a": ["", "abc"]},
              {"a": ["abc"]}, {"a": ["abc", None]}, {"b": ["ab", "c"]},
              {"a": [["ab"], ["c"]]}, {"a": [["ab", "c"], []]}, {"a": [[], ["ab", "c"]]},
             ]  # fmt: skip
    assert len({table_digest(pa.table(columns)) for columns in tables}) == len(tables)


def test_a_column_that_no_store_holds_is_named() -> None:
    table = pa.table({"when": pa.array([1], pa.timestamp("s"))})
    with pytest.raises(InputError, match=r"'when' of the examples is timestamp\[s\]"):
        table_digest(table)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    examples_in_all=st.integers(1, 60),
    layers=st.integers(1, 3),
    width=st.integers(1, 40),
    row=st.integers(1, 60),
    words=st.integers(0, 400),
)
def test_what_is_accepted_is_read_again_at_every_limit(
    tmp_path_factory: pytest.TempPathFactory,
    examples_in_all: int,
    layers: int,
    width: int,
    row: int,
    words: int,
) -> None:
    """The limits are made small, so that what is drawn lies on both sides of each of them."""
    folder = tmp_path_factory.mktemp("limits")
    made = Made([1] * examples_in_all, layers=layers, hidden=width, shard_tokens=64)
    label = np.zeros((examples_in_all, row), np.float32)
    table = pa.table({"id": ["x" * words] * examples_in_all})
    made.contents = replace(made.contents, per_example={"label": label}, examples=table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "SMALL_BYTES", 5000)
        patch.setattr(arrays, "_MAX_CHUNK_BYTES", 160)
        patch.setattr(arrays, "_CHUNK", 16)
        patch.setattr(examples, "_LARGEST_RATIO", 4)
        patch.setattr(examples, "_UNSUSPICIOUS_BYTES", 6000)
        try:
            split = made.write(folder)
        except InputError:
            assert row * 4 > 160 or words * examples_in_all > 5000 or examples_in_all * layers > 80
            assert not (folder / "ledger/1e/train/split.json").exists()
        else:
            assert split.verify() == []
            assert (split.labels["label"] == 0).all()
            assert split.table().equals(table)


def test_a_record_of_a_shard_is_never_larger_than_what_is_read(tmp_path: Path) -> None:
    """One vector for each of very many examples, in many layers, would make it so."""
    made = Made([1] * 3000, layers=25, hidden=1, shard_tokens=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "SMALL_BYTES", 500_000)
        with pytest.raises(InputError, match=r"take fewer tokens to a shard \(shard_tokens\)"):
            made.write(tmp_path / "refused")
    made.write(tmp_path / "store")
    path = tmp_path / "store/ledger/1e/train/00000.json"
    assert 500_000 < path.stat().st_size < 3000 * 25 * 8 * 4 / 3 + 4096


def test_a_table_that_is_refused_is_in_nobodys_way(tmp_path: Path) -> None:
    made = Made([3, 4, 5])
    right = made.contents
    when = pa.array([1, 2, 3], pa.timestamp("s"))
    made.contents = replace(right, examples=right.examples.append_column("when", when))
    with pytest.raises(InputError, match="'when' of the examples is timestamp"):
        made.write(tmp_path)
    made.contents = replace(right, per_example={"scale": np.zeros(3, np.float32)})
    with pytest.raises(InputError, match="cannot be stored"):
        made.write(tmp_path)
    assert not (tmp_path / "examples/train.parquet").exists()
    made.contents = right
    assert made.write(tmp_path).verify() == []


def test_one_long_context_with_thousands_of_questions_is_read_again(tmp_path: Path) -> None:
    """A real data set may have it; packed it is so small that it looked like a bomb."""
    made = Made([1] * 6000, shard_tokens=4096)
    table = pa.table({"context": ["some words of a text " * 530] * 6000})
    assert table.nbytes > 66_000_000
    made.contents = replace(made.contents, examples=table)
    split = made.write(tmp_path)
    assert (tmp_path / "examples/train.parquet").stat().st_size * 500 < table.nbytes
    assert split.table().equals(table)
    assert split.verify() == []


def test_a_split_of_other_examples_is_refused_and_a_damaged_table_named(tmp_path: Path) -> None:
    made = Made([3, 4, 5])
    made.write(tmp_path)
    other = Made([3, 4, 5], tag="2e")
    other.contents = replace(other.contents, examples=pa.table({"id": ["q0", "q1", "other"]}))
    with pytest.raises(ProvenanceError, match="other examples"):
        other.write(tmp_path)
    begun = Made([3, 4, 5], tag="3e", shard_tokens=7)
    begun.write(tmp_path / "begun", shards=1)
    begun.contents = replace(begun.contents, examples=other.contents.examples)
    with pytest.raises(ProvenanceError, match="examples_sha256"):  # a second half of other texts
        begun.write(tmp_path / "begun")
    (tmp_path / "examples/train.parquet").write_bytes(b"PAR1")
    with pytest.raises(CorruptStoreError, match=r"train\.parquet is damaged"):
        ActivationSplit(tmp_path, "1e", "train").table()
