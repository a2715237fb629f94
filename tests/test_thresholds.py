"""A no-answer threshold that was tuned and one that was not: said, marked, never mixed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from byhand import fields, rewrite
from labs import HEADS, scored_copy

from bertvision.errors import BertvisionWarning
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.squad import spans
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.workspace.workspace import Workspace

HEAD = HEADS[0]


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    """BERT and the second head are tuned on 1e, the first head is not."""
    space = scored_copy(workspace, tmp_path / "lab")
    shutil.rmtree(space.root / "activations" / "ledger" / "1e" / "tune")
    with pytest.warns(BertvisionWarning, match="stays at 0"):
        evaluate(space, [HEAD], trained_on="0.5e", tag="1e", precision="32")
    return space


def test_a_threshold_that_stays_at_zero_is_said_with_the_command_that_tunes_it(
    lab: Workspace,
) -> None:
    command = "`bertvision extract --checkpoint 1e --split tune`"
    with pytest.warns(BertvisionWarning, match=command):
        (found,) = evaluate(lab, [HEAD], trained_on="0.5e", tag="1e", precision="32")
    assert found.threshold_tuned_on is None
    assert found.rules["n-best"]["threshold"] == 0
    evaluate(lab, [HEAD], trained_on="0.5e", tag="0.5e", precision="32")  # with tune: no warning


def test_every_result_says_whether_its_threshold_was_tuned(lab: Workspace) -> None:
    found = {(r.run, r.checkpoint): (r.threshold_tuned_on, r.untuned) for r in read_results(lab)}
    assert found.pop((HEAD, "1e")) == (None, True)
    assert set(found.values()) == {("tune", False)}
    assert len(found) == 5


def test_of_an_older_record_berts_threshold_was_tuned_where_tune_was_run(lab: Workspace) -> None:
    path = lab.bert_dir("1e") / "metrics.json"
    values = fields(path)
    assert values.pop("threshold_tuned_on") == "tune"
    for seconds, tuned_on in ((values["seconds"], "tune"), ({"dev": 1.0}, None)):
        rewrite(path, {**values, "seconds": seconds})
        (bert,) = (r for r in read_results(lab) if (r.run, r.checkpoint) == ("bert", "1e"))
        assert bert.threshold_tuned_on == tuned_on


def test_a_part_without_unanswerable_questions_tunes_nothing(
    lab: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertvision.pipelines.results.systems import read_windows

    windows = read_windows(lab, "0.5e", "tune")
    logits = Logits.load(lab.bert_dir("0.5e") / "tune.safetensors", windows, "")
    task = load_task("squad_v2")
    assert task.score(logits, logits).tuned
    some = next(q.answers for q in windows.items if q.answers)
    answered = [replace(q, answers=q.answers or some) for q in windows.items]
    assert not task.score(logits, replace(logits, windows=replace(windows, items=answered))).tuned
    monkeypatch.setattr(spans, "tune_threshold", lambda *_: None)
    with pytest.warns(BertvisionWarning, match="0.5e/tune has no unanswerable question"):
        (head,) = evaluate(lab, [HEAD], trained_on="0.5e", tag="0.5e", precision="32")
    (lab.bert_dir("0.5e") / "metrics.json").unlink()
    for scores in (head, evaluate_bert(lab, "0.5e")):
        assert scores.threshold_tuned_on is None
        assert scores.rules["n-best"]["threshold"] == 0
