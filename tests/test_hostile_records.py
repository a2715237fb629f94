"""Records of a workspace that are damaged or hostile: one message, never a traceback or a hang."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from byhand import fields
from labs import HEADS, scored_copy

from bertvision.errors import BertvisionError, WorkspaceError
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.results.compare import compare
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.error_analysis import errors
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.rows import read_costs
from bertvision.pipelines.training.evaluate import is_evaluated
from bertvision.pipelines.training.trained_head import load_head
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

HEAD = HEADS[0]
SYSTEM = f"{HEAD}:0.5e:1e"
RECORDS = [
    "bert/1e/metrics.json",
    "bert/1e/predictions.json",
    "snapshots/1e/snapshot.json",
    f"heads/0.5e/{HEAD}/config.json",
    f"heads/0.5e/{HEAD}/metrics.json",
    f"heads/0.5e/{HEAD}/eval/1e/metrics.json",
    f"heads/0.5e/{HEAD}/eval/1e/predictions.json",
    "extraction/0.5e/train.json",
]
SLOW = pytest.mark.slow
DEEP = 100_000
WHOLE_FILES: list[bytes] = [
    *(b"", b"{", b"null", b"[]", b"{}", b"0", b'""', b"\xff\xfe", b"\x00" * 64, b"NaN"),
    *(b"1" * 9999, b"[" * DEEP, b'{"rules":' * DEEP, b"[" * DEEP + b"]" * DEEP),
    b'{"head": "\\ud800"}',
]
VALUES: list[str] = [
    *("null", "[]", "{}", '""', '"\\ud800"', "true", "-1", "1e999", "NaN", "-Infinity", "0.5"),
    *("9" * 4000, "[null]", "[[]]", '{"": null}', "[true, false, 2]", "[" * 3000 + "]" * 3000),
]


@pytest.fixture(scope="module")
def lab(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return scored_copy(workspace, tmp_path_factory.mktemp("hostile") / "lab")


@pytest.fixture(params=RECORDS)
def record(lab: Workspace, request: pytest.FixtureRequest) -> Iterator[Path]:
    """One of the records, put back afterwards."""
    path: Path = lab.root / request.param
    whole = path.read_bytes()
    yield path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(whole)


def uses(lab: Workspace) -> list[Callable[[], object]]:
    """Calls that read records."""
    return [
        lambda: status(lab),
        lambda: read_costs(lab, read_results(lab)),
        lambda: compare(lab, "bert:1e", SYSTEM, resamples=10),
        lambda: load_head(lab.head_dir("0.5e", HEAD)),
        lambda: is_evaluated(lab, "0.5e", HEAD, tag="1e"),
    ]


def refusals(lab: Workspace) -> list[BertvisionError]:
    """The errors of all uses, none of which is of any other kind."""
    found = []
    for use in uses(lab):
        try:
            use()
        except BertvisionError as error:
            found.append(error)
    return found


def test_whole_records_are_read(lab: Workspace) -> None:
    assert refusals(lab) == []


def test_a_file_of_anything_else_is_refused_in_a_sentence(
    lab: Workspace, record: Path, tried: Callable[[int, str], None]
) -> None:
    tried(len(WHOLE_FILES), "files")
    for content in WHOLE_FILES:
        record.write_bytes(content)
        found = refusals(lab)
        assert found, content[:20]
        assert all(len(str(error)) < 1000 for error in found)
        assert any(str(record) in str(error) for error in found), content[:20]


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=SLOW)])
def test_a_field_of_another_kind_is_refused_or_harmless(
    lab: Workspace, record: Path, step: int, tried: Callable[[int, str], None]
) -> None:
    values = fields(record)
    for i, name in enumerate(list(values)[: 20 if step == 1 else 6]):
        text = json.dumps({**values, name: "HERE"})
        for value in VALUES[i % step :: step]:
            record.write_text(text.replace('"HERE"', value), encoding="utf-8")
            assert all(len(str(error)) < 1000 for error in refusals(lab))
        tried(len(VALUES[i % step :: step]), "values of fields")


def test_what_is_no_file_is_not_waited_for(lab: Workspace, record: Path) -> None:
    makes: list[Callable[[Path], object]] = [os.mkfifo, Path.mkdir]
    for make in makes:
        record.unlink()
        make(record)
        # a snapshot without its record is none, and what an extraction cost is then unknown
        assert refusals(lab) or record.parts[-3] in ("snapshots", "extraction")
        shutil.rmtree(record) if record.is_dir() else record.unlink()
        record.write_bytes(b"")


@pytest.mark.parametrize("flips", [8, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("place", [name for name in RECORDS if "predictions" not in name])
def test_no_flipped_bit_of_a_record_is_read(
    lab: Workspace, place: str, flips: int, tried: Callable[[int, str], None]
) -> None:
    path = lab.root / place
    whole = path.read_bytes()
    before = str(status(lab)), [str(result) for result in read_results(lab)]
    seal = whole.rfind(b'"record_sha256"')
    try:
        for i in range(0, len(whole) - 1, len(whole) // flips + 1):
            if seal <= i < seal + len(b'"record_sha256"'):
                continue  # without its name there is no seal, and everything else is as it was
            path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
            found = refusals(lab)
            assert found, (i, whole[i - 9 : i + 9])
            tried(1, "flipped bits")
    finally:
        path.write_bytes(whole)
    assert (str(status(lab)), [str(result) for result in read_results(lab)]) == before


@pytest.mark.parametrize("name", ["predictions.json", "dev.safetensors", "tune.safetensors"])
def test_no_flipped_bit_of_what_is_kept_beside_scores_is_used(
    lab: Workspace, name: str, tried: Callable[[int, str], None]
) -> None:
    def use() -> object:
        if name == "predictions.json":
            return errors(lab, SYSTEM)
        return ensemble(lab, [HEAD], with_bert=True, trained_on="0.5e", tag="1e")

    path = lab.head_dir("0.5e", HEAD) / "eval" / "1e" / name
    whole = path.read_bytes()
    try:
        for i in range(0, len(whole), len(whole) // 7):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
            with pytest.raises(WorkspaceError, match="as (it was|they were) written"):
                use()
            tried(1, "flipped bits")
    finally:
        path.write_bytes(whole)


def test_scores_of_other_weights_are_left_out_and_named(
    lab: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of one workspace was copied into another."""
    mixed = Workspace.find(shutil.copytree(lab.root, tmp_path / "mixed"))
    shutil.copytree(lab.bert_dir("1e"), mixed.bert_dir("0.5e"), dirs_exist_ok=True)
    scores = mixed.head_dir("0.5e", HEAD) / "eval"
    shutil.rmtree(scores / "1e")
    shutil.copytree(scores / "0.5e", scores / "1e")
    whole = {(r.run, r.checkpoint): r for r in read_results(lab)}
    named: list[str] = []
    read_results(mixed, left_out=named)
    found = {(r.run, r.checkpoint): r for r in read_results(mixed)}
    assert set(whole) - set(found) == {("bert", "0.5e"), (HEAD, "1e")}
    for place, again in (("bert/0.5e", "bertvision finetune"), (f"{HEAD}/eval/1e", "evaluate")):
        assert any(
            place in line and "is of other weights than" in line and again in line
            for line in caplog.messages
        )
    assert set(named) <= set(caplog.messages)
    assert len(named) == 2


def test_an_ensemble_of_left_out_scores_is_left_out_and_none_is_made(
    lab: Workspace, tmp_path: Path
) -> None:
    mixed = Workspace.find(shutil.copytree(lab.root, tmp_path / "mixed"))
    ensemble(mixed, [HEAD], with_bert=True, trained_on="0.5e", tag="1e")
    assert "ensemble" in {result.system for result in read_results(mixed)}
    shutil.rmtree(mixed.snapshot_dir("1e"))
    shutil.copytree(lab.snapshot_dir("0.5e"), mixed.snapshot_dir("1e"))
    assert {r.checkpoint for r in read_results(mixed)} == {"0.5e"}
    assert "ensemble" not in {result.system for result in read_results(mixed)}
    with pytest.raises(WorkspaceError, match="are of other weights than those that stand"):
        ensemble(mixed, [HEAD], with_bert=True, trained_on="0.5e", tag="1e")
    scored = [str(row["tag"]) for row in status(mixed)["snapshots"] if row["bert"]]
    assert scored == ["0.5e"]


@pytest.mark.parametrize("name", ["predictions.json", "dev.safetensors"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_berts_damaged_answers_are_made_again_by_the_command_that_is_named(
    lab: Workspace, tmp_path: Path, name: str, how: str
) -> None:
    copy = Workspace.find(shutil.copytree(lab.root, tmp_path / "copy"))
    path = copy.bert_dir("1e") / name
    whole = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(whole[:99] + b"?" + whole[100:])
    assert evaluate_bert(copy, "1e").rules == evaluate_bert(lab, "1e").rules
    assert path.read_bytes() == whole or name != "predictions.json"
    compare(copy, "bert:1e", SYSTEM, resamples=10)


def test_a_damaged_head_hinders_no_other_result(lab: Workspace, tmp_path: Path) -> None:
    copy = Workspace.find(shutil.copytree(lab.root, tmp_path / "copy"))
    (copy.head_dir("0.5e", HEAD) / "metrics.json").write_text("{")
    assert len(read_results(copy)) == len(read_results(lab))
