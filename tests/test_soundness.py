"""Data that contradict themselves: counted, said once, and marked where their scores are shown."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports import read_table
from test_probe_report import put_probes
from test_probe_run import OPTIONS, write_probing
from workspaces import write_squad

from bertvision.errors import InputError
from bertvision.jobs.readouts import probe_table
from bertvision.pipelines.readouts.probe_results import ProbeFile, probe, probe_rows
from bertvision.pipelines.records import write_record
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.report.probing import probing_sentence
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.soundness import doubts, is_doubtful, soundness
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.creation import feature_workspace, planned_run
from bertvision.pipelines.workspace.dataset import add_dataset
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("charts_left_out")

TRAIN = [("a", 0), ("a", 1), ("a", 1), ("b", 0), ("c", 1), ("c", None)]


def test_contradictions_and_shared_texts_are_counted() -> None:
    found = soundness({"test": [("z", 0), ("a", 1)], "dev": [("z", 1)], "train": TRAIN})
    assert list(found) == ["train", "dev", "test"]
    train = found["train"]
    assert (train.rows, train.contradicting, train.shared) == (6, 3, {})
    assert train.ceiling == pytest.approx(80)  # of five labels, the one 0 of "a" is lost
    assert found["test"].shared == {"train": 1, "dev": 1}
    assert found["test"].ceiling == 100
    assert is_doubtful(found)
    assert doubts(found) == (
        "3 of 6 rows of train have a text under two labels (no classifier can be right on more "
        "than 80.0 % of it); 1 of 2 rows of test have a text that is in train too; 1 of 2 rows of "
        "test have a text that is in dev too"
    )


def test_sound_data_scores_and_parts_of_no_whole_raise_no_doubts() -> None:
    found = soundness({"train": [("a", 0.5), ("b", 1.0)], "dev": [("c", 0.5)]})
    assert doubts(found) == ""
    assert not is_doubtful(found)
    assert found["train"].ceiling is None
    assert soundness({"train": []})["train"].rows == 0
    assert doubts(soundness({"queries": [("a", None)], "passages": [("a", None)]})) == ""
    scores = soundness({"train": [("a", 0.5), ("a", 1.0)]})["train"]
    assert (scores.contradicting, scores.ceiling) == (2, None)
    assert not is_doubtful(soundness({"all": [*[(i, 0) for i in range(38)], ("x", 0), ("x", 1)]}))


def test_what_is_told_apart_is_the_whole_pair_and_the_question_on_its_context() -> None:
    task = load_task("rte")
    pairs = [Sentence("1", "a", "b", 0), Sentence("2", "a", "c", 1), Sentence("3", "a", "b", 1)]
    assert soundness({"train": map(task.example, pairs)})["train"].contradicting == 2
    task = load_task("squad_v2")
    asked = [Question(str(i), "who?", text, (), True) for i, text in enumerate("xyx")]
    again = [*asked[:2], replace(asked[2], is_impossible=False)]
    assert soundness({"train": map(task.example, asked)})["train"].contradicting == 0
    assert soundness({"train": map(task.example, again)})["train"].contradicting == 2


@pytest.fixture
def space(tiny_bert: Path, tmp_path: Path) -> Workspace:
    return feature_workspace(tmp_path / "lab", str(tiny_bert))


@pytest.fixture
def contradicting(tmp_path: Path) -> Path:
    """Sentences of which twenty of train stand under both labels."""
    path = write_probing(tmp_path / "data")
    lines = path.read_text(encoding="utf-8").splitlines()
    train = [line.split("\t") for line in lines if line.startswith("tr")][:20]
    other = {"O": "I", "I": "O"}
    more = ["\t".join([split, other[label], text]) for split, label, text in train]
    path.write_text("\n".join([*lines, *more]) + "\n", encoding="utf-8")
    return path


def test_new_data_are_warned_of_once(
    space: Workspace, contradicting: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bertvision"):
        for _ in range(2):
            add_dataset(space.root, "bigram_shift", str(contradicting))
    [record] = caplog.records
    assert "bigram_shift" in record.getMessage()
    assert "40 of" in record.getMessage()
    assert "two labels" in record.getMessage()


def test_probes_carry_the_doubts_and_those_of_before_are_given_them(
    space: Workspace, contradicting: Path
) -> None:
    add_dataset(space.root, "bigram_shift", str(contradicting))
    arguments = {"layers": [0], "poolings": ["mean"], "options": OPTIONS}
    [file] = probe(space, "bigram_shift", ["0e"], **arguments)  # type: ignore[arg-type]
    assert file.soundness is not None
    assert file.soundness["train"].contradicting == 40
    old = ProbeFile.model_validate(file.model_dump(exclude={"soundness"}))
    assert old.doubts is None
    write_record(old.place(space.root), old)
    probe(space, "bigram_shift", ["0e"], **arguments)  # type: ignore[arg-type]
    assert ProbeFile.read(old.place(space.root)) == file
    table = probe_table(probe_rows([file]))
    assert "bigram_shift†" in table
    assert "† bigram_shift: 40 of" in table
    assert "†" not in probe_table(probe_rows([old]))


def test_doubtful_data_are_marked_in_the_report_and_stay_out_of_its_means(
    space: Workspace,
) -> None:
    put_probes(space, ("odd_man_out", "cr"), ("0e", "1e"), ("cls", "mean"), 3, more=True)
    for file in ProbeFile.read_all(space):
        if file.dataset == "odd_man_out":
            faults = soundness({"train": TRAIN})
            file.model_copy(update={"soundness": faults}).write(space.root)
    report = write_report(space)
    for name in ("probes", "probes_joined", "probes_control"):
        marks = {(r["dataset"], r["mark"]) for r in read_table(report.page, name)}
        assert marks == {("odd_man_out", "†"), ("cr", "")}
    page = report.page.read_text(encoding="utf-8")
    assert "† odd_man_out says little and stays out of means: 3 of 6 rows of train" in page
    assert probing_sentence(space, []).endswith("% on cr.")


def planned(model: Path, root: Path, **options: Any) -> Workspace:
    given = {"model": str(model), "save_at": ("0e",), "max_length": 64, "precision": "32"}
    return planned_run(root, FinetuneOptions(**{**given, **options}), resume=False)


def csv_of(path: Path, rows: list[str]) -> str:
    path.write_text("\n".join(["text,pair,label", *rows]), encoding="utf-8")
    return str(path)


def leaking(folder: Path, task: str) -> dict[str, Any]:
    """Options whose train shares texts with dev: 5 of 20 items of train, 4 of 8 of dev."""
    if task == "csv":
        return {
            "task": "csv",
            "pair": "pair",
            "train": csv_of(folder / "t.csv", [f"a {i},b {i // 2 * 2},{i % 2}" for i in range(20)]),
            "dev": csv_of(
                folder / "d.csv",
                ["A  0,x 0,1", "x 1,b 2,0", "a 1,x 2,1", "a 7,x 8,0"]
                + [f"y {i},z {i},{i % 2}" for i in range(4)],
            ),
        }
    train, dev = (json.loads(Path(write_squad(folder / "s", 20, i)).read_text()) for i in (1, 2))
    for document, count in ((train, 20), (dev, 8)):
        paragraphs = document["data"][0]["paragraphs"][:count]
        for paragraph in paragraphs:
            paragraph["qas"] = paragraph["qas"][:1]
        document["data"][0]["paragraphs"] = paragraphs
    theirs, ours = (x["data"][0]["paragraphs"] for x in (train, dev))
    for i in range(4):
        ours[i]["context"] = theirs[i]["context"]
        ours[i]["qas"][0] |= {"answers": theirs[i]["qas"][0]["answers"], "question": "who ?"}
    theirs[4]["context"] = theirs[0]["context"]
    theirs[4]["qas"][0]["answers"] = theirs[0]["qas"][0]["answers"]
    for name, document in (("t", train), ("d", dev)):
        (folder / f"{name}.json").write_text(json.dumps(document))
    return {"train": str(folder / "t.json"), "dev": str(folder / "d.json")}


@pytest.mark.parametrize("task", ["csv", "squad"])
def test_texts_on_both_sides_are_counted_and_left_out_where_that_is_asked(
    task: str, tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = leaking(tmp_path, task)
    whole = planned(tiny_bert, tmp_path / "whole", tune_fraction=0.0, **options)
    assert len(whole.dataset().items("train")) == 20
    assert "4 of 8 rows of dev have a text that is in train too (such as" in caplog.text
    assert "--skip-shared leaves such rows out of train" in caplog.text
    caplog.clear()
    space = planned(tiny_bert, tmp_path / "new", tune_fraction=0.0, skip_shared=True, **options)
    assert "left out: 5 of 20" in caplog.text
    assert "is in train too" not in caplog.text
    texts = space.dataset().task.texts
    dev = {
        text.casefold().replace("  ", " ")
        for x in space.dataset().items("dev")
        for text in texts(x)
    }
    left = space.dataset().items("train")
    assert len(left) == space.config.data["train"].questions == 15
    assert not dev & {text for item in left for text in texts(item)}
    assert space.config.digest() != whole.config.digest()


def test_why_nothing_is_left_for_a_split_is_said(tiny_bert: Path, tmp_path: Path) -> None:
    rows = [f"same,b {i},{i % 2}" for i in range(40)]
    options = {"task": "csv", "pair": "pair", "data": csv_of(tmp_path / "a.csv", rows)}
    with pytest.raises(InputError, match="its 40 items .* share texts, such as 'same' in 40 of"):
        planned(tiny_bert, tmp_path / "a", dev_fraction=0.3, **options)
    dev = csv_of(tmp_path / "dev.csv", rows[:2])
    options = {"task": "csv", "pair": "pair", "train": options["data"], "dev": dev}
    with pytest.raises(InputError, match="--skip-shared leaves nothing of train: each of its 40"):
        planned(tiny_bert, tmp_path / "b", skip_shared=True, **options)
