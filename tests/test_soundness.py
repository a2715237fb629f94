"""Data that contradict themselves: counted, said once, and marked where their scores are shown."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from reports import read_table
from test_probe_report import put_probes
from test_probe_run import OPTIONS, write_probing

from bertvision.pipelines.probing.results import ProbeFile
from bertvision.pipelines.probing.run import probe
from bertvision.pipelines.probing.summary import probe_rows
from bertvision.pipelines.records import write_record
from bertvision.pipelines.report.analyses.probing import probing_sentence
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.soundness import doubts, is_doubtful, soundness
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.dataset import add_dataset
from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.analyses.probe import probe_table

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
