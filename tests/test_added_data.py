"""Data sets that are added to a workspace: what fits no window, and calls that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from workspaces import write_squad

import bertvision
from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.workspace.workspace import Workspace

FAR = "anna " * 30 + "london"


def phrases(folder: Path) -> Path:
    """Four pairs of phrases of which the second has one beyond a window of 16 tokens."""
    near = dict(text="in london", pair="in rome", first=[3, 9], second=[3, 7], label="other")
    rows = [{**near, "id": str(i)} for i in range(4)]
    rows[1] |= {"text": FAR, "first": [len(FAR) - 6, len(FAR)]}
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def paragraphs(folder: Path) -> Path:
    """Two paragraphs of which the first has more sentences than 16 tokens have room for."""
    path = folder / "train.txt"
    many = "".join(f"anna lived {letter} .\n" for letter in "abcdefghijkl")
    path.write_text(f"{many}\nanna lived .\nboris wrote .\n")
    return path


def given(model: Path, folder: Path, task: str, **options: Any) -> dict[str, Any]:
    source = (phrases if task == "phrases" else paragraphs)(folder)
    place = {"model": model, "workspace": folder / "w", "checkpoint": "0e"}
    return {**place, "task": task, "data": source, "max_length": 16, "precision": "32", **options}


@pytest.mark.parametrize(
    ("task", "left", "message"),
    [
        ("phrases", ["0", "2", "3"], "1 of 4 items of train do not fit, the first: the phrase"),
        ("ordering", ["paragraph 2"], "1 of 2 paragraphs of train do not fit, the first: "),
    ],
)
def test_what_fits_no_window_is_refused_or_left_out_with_its_number(
    task: str,
    left: list[str],
    message: str,
    tiny_bert: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The refused call leaves nothing that the next one would have to agree with."""
    call = given(tiny_bert, tmp_path, task)
    with pytest.raises(InputError, match=f"{message}.*--skip-bad leaves such .* out"):
        bertvision.extract(**call)
    assert not (tmp_path / "w").exists()
    (written,) = bertvision.extract(**call, skip_bad=True)
    assert written.examples == len(left)
    assert f"left out: {message}" in caplog.text
    again = Workspace.find(tmp_path / "w").dataset(task)
    assert [item.id for item in again.items("train")] == left
    assert again.data["train"].questions == len(left)


def test_other_data_of_the_workspaces_own_task_stand_beside_its_own(
    workspace: Workspace, tmp_path: Path
) -> None:
    root = shutil.copytree(workspace.root, tmp_path / "w")
    own = workspace.config.data["dev"].source
    copy = shutil.copy(own, tmp_path / "dev_copy.json")
    options: dict[str, Any] = {"task": "squad_v2", "workspace": root, "precision": "32"}
    (dev,) = bertvision.extract("1e", data=copy, split="dev", encoding="float32", **options)
    assert (dev.split, dev.shards_written) == ("dev", 0)
    other = write_squad(tmp_path / "news.json", 3, 9)
    (news,) = bertvision.extract("1e", data=other, split="all", **options)
    assert (news.split, news.examples) == ("squad_v2_news-all", 9)
    assert Workspace.find(root).dataset("squad_v2").source("dev") == own
    bertvision.train("learned-pooling", checkpoint="1e", epochs=1, workspace=root)
    (row,) = bertvision.evaluate("learned-pooling", split="squad_v2_news-all", workspace=root)
    assert (row.trained_on, row.checkpoint) == ("1e", "1e")
    scored = {"split": "squad_v2_news-all", "workspace": root}
    named = {table.table: table.title for table in bertvision.table(**scored)}
    assert named["results"] == "All results on squad_v2_news-all, in per cent"
    (head, _) = bertvision.table("results", **scored)  # the other is never answering
    assert head.name == "learned-pooling"
    assert head.f1_low <= head.f1 <= head.f1_high
    with pytest.raises(WorkspaceError, match="no results on tune: `bertvision evaluate HEAD"):
        bertvision.table(split="tune", workspace=root)


def test_what_cannot_name_a_data_set_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")  # of no model
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "dev.jsonl").write_text('{"text": "anna"}\n')
    monkeypatch.chdir(folder)
    for data in (folder / "dev.jsonl", folder, "."):
        with pytest.raises(InputError, match=r"'(dev|all)' cannot be one's name: rename"):
            bertvision.extract(task="text", data=data, model=tmp_path, workspace=tmp_path / "w")


def test_a_planned_extraction_leaves_out_what_the_extraction_does(
    tiny_bert: Path, tmp_path: Path
) -> None:
    call = given(tiny_bert, tmp_path, "phrases", skip_bad=True)
    (row,) = bertvision.dry_run(bertvision.extract, **call).rows
    assert row["windows"] == 3


@pytest.mark.parametrize("verb", ["extract", "probe"])
def test_a_refused_call_does_not_fix_the_settings_of_its_data(
    verb: str, tiny_bert: Path, tmp_path: Path
) -> None:
    """An encoder of 512 positions refuses 600 tokens only once there are windows."""
    source = tmp_path / "long.csv"
    source.write_text(
        "text,label\n" + "".join(f"{'anna ' * (600 + i)},{i % 2}\n" for i in range(40))
    )
    call = {"model": tiny_bert, "workspace": tmp_path / "w", "checkpoint": "0e", "task": "csv"}
    call |= {"data": source, "precision": "32"}
    function = getattr(bertvision, verb)
    with pytest.raises(InputError, match="a window of the data has 600 tokens"):
        function(**call, max_length=600)
    assert not list((tmp_path / "w").glob("datasets/*"))
    function(**call, max_length=16)
    held = Workspace.find(tmp_path / "w").dataset("long")
    assert held.config.max_length == 16
    with pytest.raises(WorkspaceError, match="was added with max_length = 16"):
        function(**call, max_length=32)
    assert Workspace.find(tmp_path / "w").dataset("long").config.max_length == 16


def test_data_that_are_stored_stay_known_when_a_later_snapshot_is_missing(
    tiny_bert: Path, tmp_path: Path
) -> None:
    """Stored splits are read by the record of their data set."""
    call = given(tiny_bert, tmp_path, "phrases", skip_bad=True)
    bertvision.extract(**call)
    with pytest.raises(UnknownNameError, match="has no snapshot 1e"):
        bertvision.extract(**{**call, "checkpoint": "0e,1e"})
    assert Workspace.find(tmp_path / "w").dataset("phrases").data["train"].misfits == ("1",)


def test_malformed_rows_of_added_data_are_counted(
    tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = given(tiny_bert, tmp_path, "phrases", skip_bad=True)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("[1]\n")
    bertvision.extract(**call)
    assert "skipped 1 malformed parts of train, the first: " in caplog.text
