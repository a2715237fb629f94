"""The commands as a user types them: what stands on stdout and stderr, and the exit status."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from stores import shard_path
from terminal import cells, done, run

from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.text import format_table
from bertvision.pipelines.workspace.workspace import Workspace

EXTRACT = ["--encoding", "float32", "--precision", "32"]


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "workspace")
    return tmp_path / "workspace"


def test_a_finished_finetune_has_nothing_to_do_and_shows_the_status(trained: Path) -> None:
    result = run("finetune", "--save-at", "1,0.5", "-w", trained)
    assert result.exit_code == 0
    assert result.stderr == f"every snapshot of {trained} is there: nothing to do\n"
    assert result.stdout == done("status", "-w", trained)
    found = json.loads(done("finetune", "--resume", "-w", trained, "--json"))
    assert found.pop("steps") == found.pop("seconds") == 0
    assert found == json.loads(done("status", "-w", trained, "--json"))


def test_status_says_what_is_there_and_what_can_be_run_next(trained: Path) -> None:
    top, table, heads, following = done("status", "-w", trained).split("\n\n")
    assert cells(top)[0] == ["workspace", str(trained)]
    rows = cells(table)
    assert rows[0] == ["snapshot", "made", "BERT EM", "BERT F1", "activations"]
    assert [row[0] for row in rows[1:]] == ["0.5e", "1e"]
    assert all(row[4] == "dev, train, tune" for row in rows[1:])
    assert cells(heads) == [
        ["head", "trained on", "runs"],
        ["adapter-64-shared", "0.5e", "1"],
        ["learned-pooling", "0.5e, 1e", "2"],
    ]
    assert "bertvision evaluate learned-pooling --trained-on 1e --checkpoint 1e" in following
    assert "extract" not in following


def test_status_offers_to_finish_what_was_begun_with_the_same_options(copy: Path) -> None:
    (copy / "activations/ledger/1e/train/00001.json").unlink()
    text = done("status", "-w", copy)
    assert "dev, tune, train (unfinished)" in text
    command = (
        "bertvision extract --checkpoint 1e --split train --encoding float32 --layers 0,1,2 "
        f"--precision 32 --workspace {copy}"
    )
    found = json.loads(done("status", "-w", copy, "--json"))
    assert command in found["next"]
    assert found["unfinished"] == {"1e": ["train"]}
    assert "train" not in found["stored"]["1e"]
    shards = json.loads(done("store", "info", "1e/train", "-w", copy, "--json"))["shards"]
    assert f"{shards - 1} of {shards} shards" in done("store", "ls", "-w", copy)
    for command in ("verify", "repair"):  # what is there is intact, and the split is not whole
        judged = run("store", command, "1e/train", "-w", copy)
        assert judged.exit_code == 1
        assert judged.stdout.startswith(f"1e/train lacks 1 of {shards} shards (first: 1): run ")
        assert judged.stdout.count("\n") == 1


def test_extract_of_several_snapshots_writes_once(trained: Path, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(trained, root, ignore=shutil.ignore_patterns("activations"))
    args = ["extract", "--checkpoint", "0.5e,1", "--split", "dev,tune", *EXTRACT, "-w", root]
    first = run(*args)
    assert first.exit_code == 0
    rows = cells(first.stdout)
    assert rows[0][:4] == ["split", "examples", "shards written", "size"]
    assert [row[0] for row in rows[1:]] == ["0.5e/dev", "0.5e/tune", "1e/dev", "1e/tune"]
    assert {row[2] for row in rows[1:]} == {"1"}
    assert "free on the disk" in first.stderr
    assert "extract 1e/tune (4 of 4 splits): 100%" in first.stderr
    again = run(*args, "--json")
    assert [split["shards_written"] for split in json.loads(again.stdout)] == [0, 0, 0, 0]
    names = ("0.5e/dev", "0.5e/tune", "1e/dev", "1e/tune")
    assert again.stderr.splitlines() == [
        f"{name} is complete: nothing to extract" for name in names
    ]
    assert all(row[5:] == ["-", "-"] for row in cells(done(*args))[1:])


def test_heads_are_trained_once(trained: Path) -> None:
    args = ["train", "learned-pooling", "--checkpoint", 1, "-w", trained]
    same = [*args, "--precision", "32", "--epochs", 2, "--batch-size", 8]
    result = run(*same)
    assert result.stderr == "learned-pooling was trained on 1e before: nothing to do\n"
    assert cells(result.stdout)[1][:5] == ["learned-pooling", "1e", "1", "0", "70"]
    assert json.loads(done(*same, "--json"))[0]["total"] == 70
    other = run(*args, "--precision", "32", "--epochs", 3, "--batch-size", 8)
    assert other.exit_code == 2
    assert "epochs = 2, now it is epochs = 3: give --overwrite" in other.stderr


def test_evaluate_scores_on_the_own_and_on_another_snapshot(copy: Path, dev_json: Path) -> None:
    names = ["learned-pooling", "adapter-64-shared"]
    text = done("evaluate", *names, "-w", copy)  # both only on 0.5e: no need to name it
    table, legend = text.split("\n\n")
    assert "the mean of HasAns F1 and NoAns" in legend
    rows = cells(table)
    assert rows[0][:5] == ["head", "trained on", "evaluated on", "EM", "F1"]
    assert rows[0][5:8] == ["HasAns EM", "HasAns F1", "NoAns"]
    assert [row[:3] for row in rows[1:-1]] == [[name, "0.5e", "0.5e"] for name in names]
    assert rows[-1][0] == "(never answering)"
    cross = ["evaluate", names[1], "--checkpoint", "1e", "-w", copy, "--json"]
    result = run(*cross)
    (found,) = json.loads(result.stdout)
    assert (found["trained_on"], found["checkpoint"]) == ("0.5e", "1e")
    assert "evaluate on 1e/dev" in result.stderr
    following = json.loads(done("status", "-w", copy, "--json"))["next"]
    command = "bertvision evaluate learned-pooling --trained-on 1e --checkpoint 1e"
    assert following == [f"{command} --workspace {copy}"]
    predictions = copy / f"heads/0.5e/{names[1]}/eval/1e/predictions.json"
    official = json.loads(done("score", predictions, dev_json, "--json"))
    assert official == found["rules"]["n-best"]["metrics"]


def test_heads_gives_sizes_of_any_encoder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, sizes = done("heads").split("\n\n")
    rows = cells(table)
    assert rows[0] == ["head", "parameters", "% BERT-large", "M mult./token", "description"]
    assert ["learned-pooling", "2,076"] in [row[:2] for row in rows]
    assert any(row[0].endswith(" *") for row in rows)
    assert "for BERT-large: 25 hidden states of width 1,024" in sizes
    small = json.loads(done("heads", "--hidden", 32, "--layers", 3, "--json"))
    assert len(small) == len(rows) - 1
    assert {head["name"]: head["total"] for head in small}["learned-pooling"] == 70
    monkeypatch.chdir(trained)
    assert "for the workspace's encoder: 3 hidden states of width 32" in done("heads")
    one = done("heads", "learned-pooling")
    assert "70 trained" in one
    assert "bertvision.models.heads" in one
    assert "no head" in run("heads", "learned-poling").stderr


def test_score_names_what_is_no_file(dev_json: Path, tmp_path: Path) -> None:
    for words, message in (
        ((tmp_path / "no.conll", dev_json), "no.conll: there is no such file"),
        ((dev_json, tmp_path), f"{tmp_path}: is a folder: name a file in it"),
    ):
        refused = run("score", *words)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.split())


def test_score_prints_the_official_keys(trained: Path, dev_json: Path) -> None:
    predictions = trained / "bert/1e/predictions.json"
    found = json.loads(done("score", predictions, dev_json, "--json"))
    assert {"exact", "f1", "total", "HasAns_f1", "NoAns_f1"} <= found.keys()
    assert cells(done("score", predictions, dev_json))[3] == ["total", "24"]
    na = dev_json.with_name("na.json")
    na.write_text(json.dumps(dict.fromkeys(json.loads(predictions.read_text()), 0.5)))
    with_na = json.loads(done("score", predictions, dev_json, "--na-prob", na, "--json"))
    assert with_na["best_f1_thresh"] == 0.5
    none = done("score", predictions, dev_json, "--na-prob", na, "--na-prob-thresh", 0.1, "--json")
    assert json.loads(none)["HasAns_f1"] == 0


@pytest.mark.filterwarnings("default::bertvision.errors.BertvisionWarning")
def test_a_warning_is_one_line(trained: Path, dev_json: Path) -> None:
    predictions = json.loads((trained / "bert/1e/predictions.json").read_text())
    more = dev_json.with_name("more.json")
    more.write_text(json.dumps({**predictions, "unknown": ""}))
    document = json.loads(dev_json.read_text())
    document["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 10**6
    dev_json.write_text(json.dumps(document))
    result = run("score", more, dev_json, "--skip-bad")
    assert result.exit_code == 0
    unknown, skipped = result.stderr.splitlines()
    assert unknown.startswith("Warning: ")
    assert "2 of 25 predictions are for ids that are not" in unknown
    assert skipped.startswith("Warning: skipped 1 malformed parts, the first: ")


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        (["cka", "0.5e", 1], {"cka", "cka_dropped", "n_tokens"}),
        (["isotropy", "1e", "--max-tokens", 0], {"mean_cosine", "explained_variance"}),
    ],
    ids=["cka", "isotropy"],
)
def test_analyses_print_a_table_and_write_a_plot(
    copy: Path, args: list[Any], keys: set[str]
) -> None:
    shutil.rmtree(copy / "analysis", ignore_errors=True)  # of other tests of the same workspace
    result = run(*args, "-w", copy)
    assert result.exit_code == 0
    parts = [part.strip("\n").split("\n")[-4:] for part in result.stdout.split("\n\n")[1:]]
    tables = [rows for rows in (cells("\n".join(lines)) for lines in parts) if rows[-1][0] == "2"]
    assert len(tables) > 0  # what is left is a legend
    for rows in tables:
        assert [row[0] for row in rows[1:]] == ["0", "1", "2"]
    record, plot = sorted((copy / "analysis").iterdir())
    assert (record.suffix, plot.suffix) == (".json", ".svg")  # the first is for the report
    assert f"plot: {plot}" in result.stderr
    own = copy / "own.svg"
    assert keys <= json.loads(done(*args, "-w", copy, "--plot", own, "--json")).keys()
    assert own.read_text() == plot.read_text()


def test_store_commands_tell_what_is_held(trained: Path) -> None:
    listed, total = done("store", "ls", "-w", trained).split("\n\n")
    rows = cells(listed)
    assert re.fullmatch(r"[0-9.]+ [kM]B in all\n", total)
    names = [f"{tag}/{split}" for tag in ("0.5e", "1e") for split in ("dev", "train", "tune")]
    assert rows[0][:4] == ["split", "examples", "encoding", "layers"]
    assert [row[0] for row in rows[1:]] == names
    listed = json.loads(done("store", "ls", "-w", trained, "--json"))
    info = json.loads(done("store", "info", "1e/train", "-w", trained, "--json"))
    assert info.pop("encoding_error") == {}  # stored in float32
    assert info in listed
    assert ["provenance.precision", "32"] in cells(done("store", "info", "1/train", "-w", trained))
    verified = [f"{name}: whole" for name in names]
    assert done("store", "verify", "-w", trained).splitlines() == verified
    one = json.loads(done("store", "verify", "1e/dev", "-w", trained, "--json"))
    assert one == {"1e/dev": []}


def test_verify_names_every_damaged_shard_and_exits_with_1(copy: Path) -> None:
    split = Workspace.find(copy).split("1e", "train")
    path = shard_path(split, "hidden_states", 1)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    shard_path(split, "hidden_states", 2).unlink()
    (copy / "activations/ledger/0.5e/dev/split.json").write_text("{")
    result = run("store", "verify", "-w", copy)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    lines = result.stdout.splitlines()
    assert "1e/train shard 1: hidden_states was changed on the disk" in lines
    assert "1e/train shard 2: hidden_states is missing" in lines
    assert "0.5e/dev" in lines[0]
    assert "split.json is damaged" in lines[0]
    assert "1e/dev: whole" in lines
    as_json = run("store", "verify", "1e/train", "-w", copy, "--json")
    assert as_json.exit_code == 1
    assert len(json.loads(as_json.stdout)["1e/train"]) == 2


def test_malformed_data_are_refused_or_skipped_and_counted(
    tiny_bert: Path, dev_json: Path, tmp_path: Path
) -> None:
    document = json.loads(dev_json.read_text())
    document["data"][0]["paragraphs"][1]["qas"][0]["answers"][0]["answer_start"] = 10**6
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document))
    args = ["finetune", "--model", tiny_bert, "--train", bad, "--dev", dev_json]
    args += ["--save-at", 0, "--precision", "32", "-w", tmp_path / "new"]
    refused = run(*args)
    assert refused.exit_code == 2
    assert "data[0].paragraphs[1].qas[0]: answers[0].answer_start" in refused.stderr
    assert not (tmp_path / "new").exists()
    skipped = run(*args, "--skip-bad", "--json")
    assert skipped.exit_code == 0
    assert f"skipped 1 malformed parts of train, the first: {bad}, data[0]" in skipped.stderr
    assert sum(json.loads(skipped.stdout)["items"].values()) == 23 + 24


def test_a_second_finetune_in_one_workspace_is_refused(trained: Path) -> None:
    with exclusive(trained / ".finetune.lock", "fine-tuning"):
        result = run("finetune", "-w", trained)
    assert result.exit_code == 2
    assert f"another process is fine-tuning in {trained}: wait" in result.stderr
    assert run("finetune", "-w", trained).exit_code == 0


def test_tables_put_numbers_to_the_right_and_names_to_the_left() -> None:
    text = format_table(["tag", "n", "share"], [["0.3e", "1,234", "5%"], ["10e", "7", "-"]])
    assert text.splitlines() == ["tag       n  share", "0.3e  1,234     5%", "10e       7      -"]
