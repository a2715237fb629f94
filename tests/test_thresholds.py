"""A no-answer threshold that was tuned and one that was not: said, marked, never mixed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from byhand import change, fields, rewrite
from labs import HEADS, scored_copy
from reports import read_table

from bertvision.errors import BertvisionWarning, InputError
from bertvision.jobs.heads import evaluated_table
from bertvision.jobs.results import results_table
from bertvision.jobs.sweep import sweep_table
from bertvision.jobs.systems import compare_table, ensemble_table
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.results.columns import FOOTNOTE
from bertvision.pipelines.results.compare import compare
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.squad import spans
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("charts_left_out")

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


def test_tuned_and_untuned_systems_are_not_compared(lab: Workspace) -> None:
    for first, second in ((f"{HEAD}:0.5e:1e", "bert:1e"), ("bert:1e", f"{HEAD}:0.5e:1e")):
        with pytest.raises(
            InputError, match=f"threshold of bert:1e was tuned on tune, that of {HEAD}"
        ) as e:
            compare(lab, first, second, resamples=10)
        command = f"`bertvision evaluate {HEAD} --trained-on 0.5e --checkpoint 1e` tunes it too"
        assert f"`bertvision extract --checkpoint 1e --split tune`, {command}" in str(e.value)
    alike = compare(lab, f"{HEADS[1]}:0.5e:1e", "bert:1e", resamples=10)
    assert alike["threshold_tuned_on"] == "tune"
    assert FOOTNOTE not in flat(compare_table(alike))
    same = compare(lab, f"{HEAD}:0.5e:1e", f"{HEAD}:0.5e:1e", resamples=10)
    assert same["threshold_tuned_on"] is None
    assert flat(compare_table(same)).count(" * ") == 3  # both systems, and the footnote
    assert FOOTNOTE in flat(compare_table(same))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_rows_never_average_or_subtract_the_two(lab: Workspace) -> None:
    """Two seeds, of which one is tuned, stay two rows; an ensemble then has no best member."""
    (head,) = (r for r in read_rows(lab).heads if (r["name"], r["checkpoint"]) == (HEAD, "1e"))
    assert (head["difference"], head["retention"], head["threshold_tuned_on"]) == (None,) * 3
    folder = lab.head_dir("0.5e", HEAD)
    seed = folder.with_name(f"{HEAD}@s1")
    shutil.copytree(folder, seed)
    training = fields(seed / "config.json")["training"]
    change(seed / "config.json", training={**training, "seed": 1})
    rules = fields(seed / "eval/1e/metrics.json")["rules"]
    rules["n-best"]["threshold"] = 0.5
    change(seed / "eval/1e/metrics.json", threshold_tuned_on="tune", rules=rules)
    ensemble(lab, [HEADS[1]], with_bert=True, trained_on="0.5e", tag="1e")
    with pytest.warns(BertvisionWarning, match="stays at 0"):
        ensemble(lab, HEADS, with_bert=False, trained_on="0.5e", tag="1e")
    rows = read_rows(lab)
    there = [r for r in rows.heads if (r["name"], r["checkpoint"]) == (HEAD, "1e")]
    assert [(r["seeds"], r["threshold_tuned_on"]) for r in there] == [(1, None), (1, "tune")]
    assert [r["difference"] is None for r in there] == [True, False]
    (both,) = (r for r in rows.heads if (r["name"], r["checkpoint"]) == (HEAD, "0.5e"))
    assert both["seeds"] == 2
    gains = {len(r["members"]) + ("bert" in r["members"]): "gain" in r for r in rows.ensembles}
    assert gains == {3: True, 2: False}
    by_seed = sweep_table([r | {"baseline": None} for r in there]).splitlines()
    assert [line.startswith(f"{HEAD} * ") for line in by_seed[1:3]] == [True, False]


def test_every_table_marks_them_with_the_same_words(lab: Workspace, tmp_path: Path) -> None:
    with pytest.warns(BertvisionWarning, match="stays at 0"):
        together = ensemble(lab, HEADS, with_bert=False, trained_on="0.5e", tag="1e")
    with pytest.warns(BertvisionWarning, match="stays at 0"):
        scored = evaluate(lab, HEADS, trained_on="0.5e", tag="1e", precision="32")
    results = read_rows(lab)
    tables = {
        "evaluate": evaluated_table([s.to_json() for s in scored]),
        "ensemble": ensemble_table(together),
        "results": results_table(results.runs),
        "sweep": sweep_table(results.heads),
    }
    for name, table in tables.items():
        assert flat(table).count(FOOTNOTE) == 1, name
        marked = [line for line in table.splitlines() if line.startswith(f"{HEAD} *")]
        assert len(marked) == (2 if name == "sweep" else 1), name  # there its costs too
    tuned = evaluate(lab, HEADS, trained_on="0.5e", tag="0.5e", precision="32")
    assert "*" not in evaluated_table([s.to_json() for s in tuned])


def test_the_report_marks_them_and_says_so_first(lab: Workspace, tmp_path: Path) -> None:
    written = write_report(lab, tmp_path / "report")
    page = written.page.read_text(encoding="utf-8")
    headline = page.split('id="workspace"')[0]
    assert f"{FOOTNOTE} They are 1 of 6 results." in headline
    for name in ("results", "runs", "cross_checkpoint"):
        rows = read_table(written.page, name)
        key = "run" if name == "runs" else "name"
        assert [r[key] for r in rows if "*" in r[key]] == [f"{HEAD} *"]
        assert page.split(f'id="table-{name}"')[1].split("tables/")[0].count(FOOTNOTE) == 1
    (row,) = (r for r in read_table(written.page, "results") if "*" in r["name"])
    assert (row["threshold_tuned_on"], row["difference"], row["retention"]) == ("", "", "")
    (best,) = (r for r in read_table(written.page, "learning_curve") if r["checkpoint"] == "1e")
    assert best["earlier_head"] == HEADS[1]
