"""A dry run says what a job would make, exactly, and leaves every byte as it is."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import hubs
import pytest
from terminal import done, run
from transformers import AutoModel

import bertvision
from bertvision.errors import InputError, ProvenanceError, UnknownNameError, WorkspaceError
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.workspace.workspace import Workspace


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below, with what it holds."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in folder.rglob("*")
    }


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Path:
    """A workspace of one's own, with stored activations and no heads."""
    root = tmp_path / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    return root


JOBS = (
    ["extract", "--checkpoint", "0e,1e", "--pool", "cls,mean", "--precision", "32"],
    ["extract", "--checkpoint", "untrained", "--encoding", "int4"],
    ["train", "learned-pooling@f0.5", "--checkpoint", "1e", "--data-device", "cpu"],
    ["sweep", "learned-pooling", "adapter-64-shared", "--seeds", "2", "--fractions", "0,1"],
)


@pytest.mark.parametrize("words", JOBS, ids=lambda words: " ".join(words[:3]))
def test_a_dry_run_changes_no_byte_of_the_workspace(space: Path, words: list[str]) -> None:
    before = contents(space)
    for form in ([], ["--json"]):
        done(*words, "--dry-run", *form, "-w", space)
    assert contents(space) == before


def test_the_plan_of_an_extraction_is_what_it_writes(space: Path) -> None:
    options = {"split": "tune,dev", "encoding": "float32", "precision": "32", "workspace": space}
    plan = bertvision.dry_run(bertvision.extract, "0e", **options)
    assert {(row.state, row.makes_snapshot) for row in plan.rows} == {("new", True)}
    assert plan.notes == ["Snapshot 0e is not there, and is made first."]
    written = bertvision.extract("0e", **options)
    for row, made in zip(plan.rows, written, strict=True):
        assert (row.tag, row.split, row.windows) == (made.tag, made.split, made.examples)
        assert (row.shards_to_write, row.bytes) == (made.shards_written, made.bytes)
        assert row.layers == (0, 1, 2)
    again = bertvision.dry_run(bertvision.extract, "0e", **options)
    assert {(row.state, row.bytes_to_write) for row in again.rows} == {("there", 0)}
    assert again.seconds == 0
    assert "nothing is left to do" in str(again)


def test_pooled_states_with_their_pooler_output_are_planned_as_they_are_written(
    tiny_bert: Path, tmp_path: Path
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"anna was born in {y}"}) + "\n" for y in (1, 2)))
    root = tmp_path / "states"
    asked = {"task": "text", "data": data, "model": tiny_bert, "workspace": root}
    plan = bertvision.dry_run(bertvision.extract, "0e", **asked, pool="cls,mean")
    assert not root.exists()
    written = bertvision.extract("0e", **asked, pool="cls,mean")
    assert [(r.split, r.windows, r.bytes) for r in plan.rows] == [
        (made.split, made.examples, made.bytes) for made in written
    ]


def test_minutes_are_those_of_an_extraction_of_the_same_data_and_say_where_from(
    space: Path,
) -> None:
    record = json.loads((space / "extraction" / "1e" / "train.json").read_text())
    options = {"precision": "32", "workspace": space}
    plan = bertvision.dry_run(bertvision.extract, "0e", split="train", **options)
    (row,) = plan.rows
    assert row.windows == record["examples"]
    tags = {"extraction/0.5e/train.json", "extraction/1e/train.json"}
    assert row.measured in tags
    assert plan.measured == [row.measured]
    measured = json.loads((space / row.measured).read_text())
    assert plan.seconds == pytest.approx(measured["seconds"])
    assert row.measured in str(plan).replace("\n", " ")
    for record_of_pooled in (space / "extraction").glob("*/*-cls.json"):  # of other tests
        record_of_pooled.unlink()
    pooled = bertvision.dry_run(bertvision.extract, "0e", split="train", pool="cls", **options)
    assert pooled.seconds is None
    assert "not known yet" in str(pooled)


def test_of_a_split_that_was_begun_only_the_rest_is_planned(space: Path) -> None:
    options = {"split": "train", "encoding": "float32", "precision": "32", "workspace": space}
    same = bertvision.ExtractOptions(shard_tokens=512)
    (whole,) = bertvision.dry_run(bertvision.extract, "1e", **options, options=same).rows
    assert (whole.state, whole.shards_to_write) == ("there", 0)
    StoredSplit(space / "activations", "1e", "train").ledger.retract_shard(1)
    (rest,) = bertvision.dry_run(bertvision.extract, "1e", **options, options=same).rows
    assert (rest.state, rest.shards_to_write, rest.shards) == ("begun", 1, whole.shards)
    assert rest.bytes_to_write == whole.bytes // whole.shards


def test_a_pooled_split_is_planned_with_the_shards_it_was_begun_with(space: Path) -> None:
    options = {"split": "dev", "pool": "cls", "precision": "32", "workspace": space}
    small = bertvision.ExtractOptions(shard_tokens=7)
    bertvision.extract("1e", **options, encoding="float32", options=small)
    (row,) = bertvision.dry_run(bertvision.extract, "1e", **options, encoding="float32").rows
    assert (row.state, row.shards_to_write, row.shards) == ("there", 0, 4)
    (made,) = bertvision.extract("1e", **options, encoding="float32")
    assert made.shards_written == 0


def test_a_dry_run_refuses_what_the_job_refuses(space: Path) -> None:
    with pytest.raises(ProvenanceError, match="encoding"):
        bertvision.dry_run(
            bertvision.extract, "1e", encoding="int4", precision="32", workspace=space
        )
    with pytest.raises(UnknownNameError, match=r"no snapshot 0\.7e"):
        bertvision.dry_run(bertvision.extract, "0.7e", workspace=space)
    with pytest.raises(UnknownNameError, match="lerned-pooling"):
        bertvision.dry_run(bertvision.train, "lerned-pooling", checkpoint="1e", workspace=space)
    with pytest.raises(InputError, match="extract, train, sweep, not status"):
        bertvision.dry_run(bertvision.status)


def test_the_plan_of_a_training_is_what_it_takes_then_says_that_it_is_there(space: Path) -> None:
    asked = {"checkpoint": "1e", "epochs": 2, "precision": "32", "workspace": space}
    heads = "learned-pooling,learned-pooling@f0.3,learned-pooling@f0"
    plan = bertvision.dry_run(bertvision.train, heads, **asked)
    assert plan.seconds is None
    assert {row.state for row in plan.rows} == {"new"}
    trained = bertvision.train(heads, **asked)
    for row, made in zip(plan.rows, trained, strict=True):
        assert (row.fraction, row.parameters) == (made.fraction, made.total)
        assert (row.examples, row.steps) == (made.examples, made.steps)
    again = bertvision.dry_run(bertvision.train, heads, **asked)
    assert {row.state for row in again.rows} == {"there"}
    assert again.totals["steps"] == 0
    other = bertvision.dry_run(bertvision.train, "learned-pooling@s1", **asked)
    record = "heads/1e/learned-pooling/metrics.json"
    assert other.measured == [record]
    assert other.seconds == pytest.approx(trained[0].own_seconds)
    with pytest.raises(WorkspaceError, match="epochs = 2, now it is epochs = 1"):
        bertvision.dry_run(bertvision.train, "learned-pooling", **asked | {"epochs": 1})


def test_a_sweep_is_planned_with_the_scores_that_are_missing(space: Path) -> None:
    plan = bertvision.dry_run(
        bertvision.sweep, "learned-pooling", seeds=2, fractions="0,1", workspace=space
    )
    assert len(plan.rows) == 2 * 2 * 2  # fractions × seeds × snapshots
    assert plan.totals["runs_to_train"] == 8
    assert plan.totals["evaluations"] == 16
    assert plan.totals["passes"] == 4  # a seed and a snapshot each
    asked = {"trained_on": "1e", "checkpoint": "1e", "workspace": space}
    bertvision.sweep("learned-pooling", **asked)
    rest = bertvision.dry_run(bertvision.sweep, "learned-pooling", seeds=2, **asked)
    assert [(row.seed, row.state) for row in rest.rows] == [(0, "there"), (1, "new")]
    assert rest.totals["evaluations"] == 1


def test_a_disk_that_is_too_small_is_said(space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertvision.pipelines.planning.free_bytes", lambda _: 10)
    told = run("extract", "--checkpoint", "0e", "--dry-run", "-w", space).stdout
    assert "10 B are free there" in told
    assert "The disk cannot hold it" in " ".join(told.split())


def test_data_that_were_not_added_are_planned_and_stay_unadded(space: Path, tmp_path: Path) -> None:
    data = tmp_path / "other.jsonl"
    data.write_text(json.dumps({"text": "anna lives in rome ."}) + "\n")
    plan = bertvision.dry_run(bertvision.extract, "1e", task="text", data=data, workspace=space)
    assert [(row.split, row.windows, row.tokens) for row in plan.rows] == [("other-all", 1, 7)]
    assert not (space / "datasets").exists()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_plan_downloads_no_weights(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """The configuration, the tokenizer and the names of tensors of an encoder are enough."""
    folder, data = tmp_path / "bert", tmp_path / "texts.jsonl"
    shutil.copytree(tiny_bert, folder)
    if parts > 1:
        (folder / "model.safetensors").unlink()
        AutoModel.from_pretrained(tiny_bert).save_pretrained(folder, max_shard_size="30KB")
    data.write_text(json.dumps({"text": "anna was born in 1"}) + "\n")
    asked = {"task": "text", "data": data, "workspace": tmp_path / "states", "pool": "cls,mean"}
    with hubs.running(monkeypatch, tmp_path / "cache") as hub:
        held = {p.name: hubs.Stored(p.read_bytes(), p.suffix != ".json") for p in folder.iterdir()}
        assert (sum("safetensors" in name for name in held) > 3) == (parts > 1)
        repository = hub.repositories["model", "me/bert"] = hubs.Repository()
        repository.commit("main", held, "a model")
        plan = bertvision.dry_run(bertvision.extract, "0e", **asked, model="me/bert")
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        assert not (tmp_path / "states").exists()
        written = bertvision.extract("0e", **asked, model="me/bert")
    assert [(r.split, r.windows, r.bytes) for r in plan.rows] == [
        (made.split, made.examples, made.bytes) for made in written
    ]


def test_a_plan_refuses_an_encoder_without_safetensors(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that the job would refuse after its download is refused before."""
    kept = [path for path in tiny_bert.iterdir() if path.suffix != ".safetensors"]
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "anna was born in 1"}) + "\n")
    asked = {"task": "text", "data": data, "workspace": tmp_path / "states"}
    with hubs.running(monkeypatch, tmp_path / "cache") as hub:
        repository = hub.repositories["model", "me/bert"] = hubs.Repository()
        held = {path.name: hubs.Stored(path.read_bytes(), False) for path in kept}
        repository.commit("main", held, "a model")
        with pytest.raises(InputError, match="holds no model.safetensors"):
            bertvision.dry_run(bertvision.extract, "0e", **asked, model="me/bert")
