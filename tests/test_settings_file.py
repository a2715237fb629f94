"""``bertvision.yaml`` is the user's to comment, and has a schema that says what stands in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from docs_scripts import DOCS
from hypothesis import example, given
from hypothesis import strategies as st

from bertvision.errors import WorkspaceError
from bertvision.pipelines.plain_yaml import with_value
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)
from bertvision.pipelines.workspace.workspace import FILE, Workspace

SCHEMA = json.loads((DOCS / "reference" / "bertvision.schema.json").read_text())


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    data = DataConfig(source="/data/train.json", sha256="0", questions=5)
    model = ModelConfig(
        name_or_path="tiny", weights_sha256="0", hidden_size=16, num_hidden_layers=2
    )
    config = WorkspaceConfig(
        model=model,
        task=TaskConfig(),
        data={"train": data, "dev": data},
        finetune=FinetuneConfig(variant=("freeze:1",)),
    )
    return Workspace.create(tmp_path / "space", config)


def test_another_store_is_kept_and_comments_stay(space: Workspace, tmp_path: Path) -> None:
    path = space.root / FILE
    before = "# run 7, asked by Ada\r\n" + path.read_text().replace(
        "activations: null", "activations: null  # on the small disk\r\n# and then:"
    )
    path.write_text(before, newline="")
    Workspace.find(space.root).keep_at(str(tmp_path / "store: #1"))
    place = str(tmp_path / "store: #1")
    with path.open(newline="") as file:
        assert file.read() == before.replace("activations: null", f"activations: '{place}'")
    assert Workspace.find(space.root).activations == Path(place)
    shutil.rmtree(tmp_path / "store: #1", ignore_errors=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a: 1\nkey: 'x'  # y\nb: 2\n", "a: 1\nkey: new  # y\nb: 2\n"),
        ("a: 1\nkey:\nb: 2\n", "a: 1\nkey: new\nb: 2\n"),
        ("a: 1 # last", "a: 1 # last\nkey: new\n"),
        ("a:\n  key: 1\nkey: old\n", "a:\n  key: 1\nkey: new\n"),
    ],
)
def test_a_value_is_changed_and_nothing_else(before: str, after: str) -> None:
    assert with_value(before, "key", "new") == after


@example("\x85\u2028\u2029", "a: 1\n")
@given(st.text(max_size=30), st.sampled_from(["a: 1\nkey: 2\n", "a: 1\nkey:\n", "a: 1\n"]))
def test_any_text_is_read_again_as_it_was_given(value: str, before: str) -> None:
    found = yaml.safe_load(with_value(before, "key", value))
    assert found == {"a": 1, "key": value}


def test_a_file_in_which_no_line_can_be_changed_is_left_as_it_is(
    space: Workspace, tmp_path: Path
) -> None:
    path = space.root / FILE
    flow = json.dumps(yaml.safe_load(path.read_text()))
    path.write_text(flow)
    with pytest.raises(WorkspaceError, match=r"no mapping with a key in each line; write `activ"):
        Workspace.find(space.root).keep_at(str(tmp_path / "elsewhere"))
    assert path.read_text() == flow


def test_a_workspace_fits_its_schema_and_a_wrong_one_does_not(space: Workspace) -> None:
    values = yaml.safe_load((space.root / FILE).read_text())
    jsonschema.validate(values, SCHEMA)
    for section, name, wrong in (
        ("finetune", "lr", -1),
        ("finetune", "leraning_rate", 1),
        ("finetune", "decay", "cosine"),
        ("task", "max_length", "long"),
    ):
        other = {**values, section: {**values[section], name: wrong}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(other, SCHEMA)


def test_the_schema_says_what_fields_mean() -> None:
    finetune = SCHEMA["$defs"]["FinetuneConfig"]["properties"]
    assert finetune["accumulate"]["description"] == "Batches per optimiser step."
    assert SCHEMA["properties"]["activations"]["description"].startswith("Folder or URL")
