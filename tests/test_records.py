"""Records: one reader, one form of what is wrong with a file, one way to say where two differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from labs import HEADS, scored_copy

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.records import Record, read_record, write_record
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.workspace.records import (
    BertScores,
    EnsembleScores,
    HeadScores,
    RunConfig,
    RunMetrics,
)
from bertvision.pipelines.workspace.workspace import Workspace


class Inner(Record):
    lr: float


class Outer(Record):
    name: str
    count: int
    training: Inner


WHOLE = {"name": "a", "count": 3, "training": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("there", "here", "fields", "expected"),
    [
        ({"a": 1}, {"a": 1}, None, None),
        ({"a": 1, "b": 2}, {"b": 3, "a": 2}, None, ("a", 1, 2)),
        ({"a": 1, "b": 2}, {"b": 3, "a": 2}, ["b", "a"], ("b", 2, 3)),
        ({"a": 1}, {"a": 1, "b": 2}, None, ("b", None, 2)),
        ({"a": 1, "b": 2}, {"a": 1}, None, ("b", 2, None)),
        ({"a": 1, "b": 2}, {"a": 1}, ["a"], None),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, None, ("a.b.c", 1, 2)),
        ({"a": {"b": 1}}, {"a": None}, None, ("a", {"b": 1}, None)),
    ],
    ids=["same", "first", "order", "new", "gone", "left-out", "inside", "other-kind"],
)
def test_the_first_difference_is_named_with_both_values(
    there: dict[str, Any], here: dict[str, Any], fields: list[str] | None, expected: object
) -> None:
    assert first_difference(there, here, fields) == expected


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({**WHOLE, "count": "3"}, "count: Input should be a valid integer, found '3'"),
        ({**WHOLE, "training": {"lr": None}}, "training.lr: Input should be a valid number"),
        ({"name": "a", "count": 3}, "training: Field required"),
        ([], "Input should be an object"),
    ],
    ids=["text", "inside", "missing", "list"],
)
def test_a_damaged_record_is_told_by_file_field_value_and_remedy(
    tmp_path: Path, values: object, told: str
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(values))
    with pytest.raises(WorkspaceError, match=re.escape(f"{path} is damaged ({told}")) as error:
        read_record(path, Outer, "bertvision x")
    assert str(error.value).endswith("delete it and run `bertvision x` again")
    with pytest.raises(WorkspaceError, match="leave it alone$"):
        read_record(path, Outer, "bertvision x", "leave it alone")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"name": "\xff"}'])
def test_what_is_no_json_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(WorkspaceError, match="is damaged.*JSON"):
        read_record(path, Outer, "bertvision x")


def test_a_missing_record_names_its_command_and_unknown_fields_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(WorkspaceError, match=r"there is no .*record\.json: `bertvision x` makes"):
        read_record(path, Outer, "bertvision x")
    path.write_text(json.dumps({**WHOLE, "later": 1}))
    assert read_record(path, Outer, "bertvision x").to_json() == WHOLE


def test_what_commands_wrote_is_read_and_written_byte_for_byte(
    workspace: Workspace, tmp_path: Path
) -> None:
    lab = scored_copy(workspace, tmp_path / "lab")
    ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    kinds: dict[str, type[Record]] = {
        "bert/*/metrics.json": BertScores,
        "heads/*/*/config.json": RunConfig,
        "heads/*/*/metrics.json": RunMetrics,
        "heads/*/*/eval/*/metrics.json": HeadScores,
        "ensembles/*/*/metrics.json": EnsembleScores,
    }
    for pattern, kind in kinds.items():
        paths = list(lab.root.glob(pattern))
        assert paths
        for path in paths:
            write_record(tmp_path / "again.json", read_record(path, kind, ""))
            assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_two_classes_are_not_said() -> None:
    values = {
        "head": "cls-mean-pooling",
        "kind": "classification",
        "trained_on": "1e",
        "layers": [0, 1],
        "hidden_size": 8,
        "encoding": "int8",
        "classes": 2,
        "training": {
            "epochs": 1,
            "batch_size": 16,
            "lr": 1e-3,
            "precision": "32",
            "best_epoch": False,
            "seed": 0,
            "fraction": 1.0,
        },
        "activations": {"examples": 4},
    }
    three = {**values, "classes": 3}
    assert list(RunConfig.model_validate(three).to_json().items()) == list(three.items())
    del values["classes"]
    assert list(RunConfig.model_validate(values).to_json().items()) == list(values.items())
