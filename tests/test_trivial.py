"""Scores beside those of a system that learned nothing, in every table and first in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from byhand import change, fields
from labs import HEADS, scored_copy
from reports import read_table

from bertvision.jobs.heads import evaluated_table
from bertvision.jobs.results import results_table
from bertvision.jobs.sweep import sweep_table
from bertvision.jobs.systems import compare_table, ensemble_table
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.report.headline import sentences
from bertvision.pipelines.report.page import in_code
from bertvision.pipelines.results.columns import ORACLE_NOTE
from bertvision.pipelines.results.compare import compare
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.results.systems import read_windows
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.scores import ORACLE, headline, trivial_metrics, trivial_score
from bertvision.pipelines.tasks.squad.decoding import apply_threshold, decode
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("charts_left_out")

HEAD = HEADS[0]


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    return scored_copy(workspace, tmp_path / "lab")


def test_the_oracle_is_the_official_best_f1(lab: Workspace) -> None:
    """It is fed, like the official script, the answers before any threshold."""
    bert = next(r for r in read_results(lab) if r.run == "bert" and r.checkpoint == "1e")
    windows = read_windows(lab, "1e", "dev")
    found = decode(Logits.load(bert.folder / "dev.safetensors", windows, ""))
    na_scores = {id_: p.na_score for id_, p in found.items()}
    official = squad_metrics(apply_threshold(found, None), windows.items, na_scores)
    assert bert.rules[ORACLE]["metrics"]["f1"] == pytest.approx(official["best_f1"])
    assert headline(bert.rules)["best_f1"] == pytest.approx(official["best_f1"])
    assert official["best_f1"] >= bert.rules["n-best"]["metrics"]["f1"]


def test_the_share_of_unanswerable_questions_moves_the_score_and_not_the_balanced_one(
    lab: Workspace,
) -> None:
    """Each unanswerable question five times, by the same answers."""
    questions = lab.items("dev")
    rows = enumerate(questions)
    answers = {q.id: "1901" if q.answers or row % 2 else "" for row, q in rows}
    more = [q for q in questions for _ in range(1 if q.answers else 5)]
    few, many = (
        headline({"n-best": {"threshold": 0.0, "metrics": squad_metrics(answers, items)}})
        for items in (questions, more)
    )
    assert abs(few["f1"] - many["f1"]) > 1
    assert few["balanced"] == pytest.approx(many["balanced"])
    assert few["balanced"] == (few["HasAns_f1"] + few["NoAns_f1"]) / 2


def test_never_answering_scores_what_it_is_said_to_score(lab: Workspace) -> None:
    questions = lab.items("dev")
    metrics = squad_metrics(dict.fromkeys((q.id for q in questions), ""), questions)
    never = dict(headline({"n-best": {"threshold": 0.0, "metrics": metrics}}))
    score = trivial_score(never, "f1")
    assert score is not None
    name, said = trivial_metrics(score, never)
    assert name == "(never answering)"
    assert {key: never[key] for key in said if key != "best_f1"} == pytest.approx(
        {key: value for key, value in said.items() if key != "best_f1"}
    )
    assert trivial_metrics(60.0, ["accuracy"]) == ("(majority class)", {"accuracy": 60.0})
    assert trivial_score({"pearson": 3.0}, "pearson") is None


def test_every_table_of_spans_has_it_as_a_row(lab: Workspace, tmp_path: Path) -> None:
    together = ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    results = read_rows(lab)
    compared = compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", resamples=10)
    scored = [fields(r.folder / "metrics.json") for r in read_results(lab) if r.system == "head"]
    for table in (
        evaluated_table(scored),
        ensemble_table(together),
        results_table(results.runs),
        sweep_table(results.heads),
        compare_table(compared),
    ):
        (line,) = (line for line in table.splitlines() if line.startswith("(never answering)"))
        assert "33.3" in line
    assert compared["baseline"] == pytest.approx(100 / 3)
    page = write_report(lab, tmp_path / "report").page
    for name in ("results", "ensembles", "cross_checkpoint", "parameters", "costs"):
        rows = [r for r in read_table(page, name) if "(never answering)" in r.values()]
        assert len(rows) == 1, name
        assert any(value.startswith("33.3") for value in rows[0].values()), name
    assert {r["baseline"][:4] for r in read_table(page, "learning_curve")} == {"33.3"}


def test_a_missing_oracle_is_explained_where_others_have_one(
    lab: Workspace, tmp_path: Path
) -> None:
    """An earlier version may have scored a part of the workspace."""
    assert ORACLE_NOTE not in results_table(read_rows(lab).runs)
    path = lab.head_dir("0.5e", HEAD) / "eval" / "1e" / "metrics.json"
    rules = fields(path)["rules"]
    del rules[ORACLE]
    change(path, rules=rules)
    results = read_rows(lab)
    assert ORACLE_NOTE in results_table(results.runs)
    assert ORACLE_NOTE in sweep_table(results.heads)
    page = write_report(lab, tmp_path / "report").page.read_text(encoding="utf-8")
    assert str(in_code(ORACLE_NOTE)) in page


def test_the_report_begins_with_systems_that_are_below_it(lab: Workspace) -> None:
    def score(folder: Path, f1: float) -> None:
        rules = fields(folder / "metrics.json")["rules"]
        rules["n-best"]["metrics"]["f1"] = f1
        change(folder / "metrics.json", rules=rules)

    for result in read_results(lab):
        score(result.folder, 60.0)
    assert not sentences(read_rows(lab))[0].startswith("Never answering")
    score(lab.head_dir("0.5e", HEAD) / "eval" / "1e", 33.0)
    assert sentences(read_rows(lab))[0] == (
        "Never answering would score 33.3 F1 on these 24 questions: 1 of 4 scores of heads "
        f"({HEAD} at 1e) are below that."
    )
    score(lab.bert_dir("0.5e"), 20.0)
    first = sentences(read_rows(lab))[0]
    assert ": BERT at 0.5e and 1 of 4 scores of heads" in first
