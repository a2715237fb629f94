"""Comparing two systems, from what one types to the sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from byhand import change, fields, forget_digests
from labs import HEADS, scored_copy

from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.results.compare import compare, sentence
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.systems import SystemName, find_system, label
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.uncertainty import Difference
from bertvision.pipelines.workspace.workspace import Workspace

HEAD = HEADS[0]


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    return scored_copy(workspace, tmp_path / "lab")


def test_scores_are_the_recorded_ones(lab: Workspace) -> None:
    for metric in ("f1", "exact"):
        found = compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", metric=metric, resamples=100)  # type: ignore[arg-type]
        recorded = {label(r): r.rules["n-best"]["metrics"][metric] for r in read_results(lab)}
        assert found["first_score"] == pytest.approx(recorded[f"{HEAD}:0.5e:1e"])
        assert found["second_score"] == pytest.approx(recorded["bert:1e"])
        assert found["difference"] == pytest.approx(found["first_score"] - found["second_score"])
        assert found["low"] <= found["difference"] <= found["high"]


def test_contexts_are_drawn_whole_unless_asked_otherwise(lab: Workspace) -> None:
    questions = lab.items("dev")
    contexts = compare(lab, f"{HEAD}:0.5e", "bert:1e", resamples=100)
    assert (contexts["questions"], contexts["clusters"]) == (len(questions), 8)
    alone = compare(lab, f"{HEAD}:0.5e", "bert:1e", resamples=100, by="question")
    assert alone["clusters"] == len(questions)


def test_a_system_is_the_same_as_itself(lab: Workspace) -> None:
    found = compare(lab, "bert:1e", "bert:1e", resamples=100)
    assert (found["difference"], found["p"]) == (0, 1)
    assert "the same F1 on every question" in found["sentence"]


def test_a_system_that_is_right_everywhere_is_better_than_noise(lab: Workspace) -> None:
    """Gold answers as one system's predictions, with the metrics that they have."""
    folder = lab.head_dir("0.5e", HEAD) / "eval" / "1e"
    questions = lab.items("dev")
    gold = {q.id: q.answers[0].text if q.answers else "" for q in questions}
    _predict(folder, gold, dict(squad_metrics(gold, questions)))
    wrong = {q.id: "" if q.answers else q.context for q in questions}
    _predict(lab.bert_dir("1e"), wrong, dict(squad_metrics(wrong, questions)))
    there = compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", resamples=1000)
    assert (there["difference"], there["low"], there["high"]) == (100, 100, 100)
    assert there["p"] == pytest.approx(1 / 1001)
    assert there["sentence"].startswith(f"{HEAD}:0.5e:1e is better than bert:1e by 100.00 points")
    back = compare(lab, "bert:1e", f"{HEAD}:0.5e:1e", resamples=1000)
    assert back["difference"] == -100
    assert f"{back['first']} is worse than {back['second']} by 100.00" in back["sentence"]
    assert (
        "interval -100.00 to -100.00" in back["sentence"]
    )  # of first minus second, as low and high


def test_yes_and_no_are_compared_by_accuracy(lab: Workspace) -> None:
    questions = lab.items("dev")
    for seed, folder in enumerate((lab.head_dir("0.5e", HEAD) / "eval" / "1e", lab.bert_dir("1e"))):
        said = {q.id: bool((row + seed) % 2) for row, q in enumerate(questions)}
        right = [said[q.id] != q.is_impossible for q in questions]
        metrics = {"accuracy": 100 * sum(right) / len(right), "f1": 50.0}
        _predict(folder, said, metrics, rule="argmax")
    found = compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", resamples=100)
    assert found["metric"] == "accuracy"
    assert found["first_score"] + found["second_score"] == pytest.approx(100)
    with pytest.raises(InputError, match="can be compared by accuracy"):
        compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", metric="f1")
    with pytest.raises(InputError, match="compare systems of one task"):
        compare(lab, f"{HEAD}:0.5e:1e", "bert:0.5e")


def _predict(
    folder: Path, predictions: dict[str, Any], metrics: dict[str, float], rule: str = "n-best"
) -> None:
    (folder / "predictions.json").write_text(json.dumps(predictions))
    change(
        folder / "metrics.json", rules={rule: {"threshold": None, "metrics": metrics}}, sha256={}
    )


def test_every_result_is_found_by_the_name_it_is_written_with(lab: Workspace) -> None:
    ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e", combine="mean")
    ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    results = read_results(lab)
    assert len(results) == 8
    for result in results:
        assert find_system(results, label(result)) is result
    name = f"max-bert+{'+'.join(HEADS)}"
    assert find_system(results, name).run == f"{name}@0.5e"  # only one there is


def test_a_system_is_never_guessed(lab: Workspace) -> None:
    results = read_results(lab)
    for text, options, message in [
        ("bert", {}, "which bert is meant? There are bert:0.5e, bert:1e: write one of these"),
        (HEAD, {}, f"There are {HEAD}:0.5e, {HEAD}:0.5e:1e"),
        ("bert:2e", {}, "bert was not scored there: there are bert:0.5e, bert:1e"),
        (HEAD, {"checkpoint": "3e"}, "was not scored there"),
        ("adapter-64-sharde:1e", {}, f"did you mean {HEAD}? there are bert, {HEAD}"),
    ]:
        with pytest.raises(UnknownNameError, match=re.escape(message)):
            find_system(results, text, **options)
    assert find_system(results, HEAD, checkpoint="1e").checkpoint == "1e"
    for text in ("", ":1e", "a:1e:1e:1e", "bert:1"):
        with pytest.raises(InputError):
            find_system(results, text)


def test_predictions_of_other_questions_are_refused(lab: Workspace) -> None:
    path = lab.bert_dir("1e") / "predictions.json"
    predictions = json.loads(path.read_text())
    path.write_text(json.dumps(dict.fromkeys(predictions, "never")))
    with pytest.raises(WorkspaceError, match="damaged.*not as it was written"):
        compare(lab, "bert:1e", f"{HEAD}:0.5e")
    forget_digests(path.parent)
    for changed, message in [
        (dict.fromkeys(predictions, "never"), "predictions.json scores 0.0"),
        (dict(list(predictions.items())[1:]), "not of the workspace's 24 items"),
        ({**predictions, next(iter(predictions)): None}, "has no answer"),
        ([], "damaged"),
    ]:
        path.write_text(json.dumps(changed))
        with pytest.raises(WorkspaceError, match=message):
            compare(lab, "bert:1e", f"{HEAD}:0.5e")
    path.unlink()
    with pytest.raises(WorkspaceError, match="bertvision finetune --resume"):
        compare(lab, "bert:1e", f"{HEAD}:0.5e")


def test_a_sentence_says_what_the_interval_allows() -> None:
    noise = Difference(51.0, 50.0, 1.0, -1.0, 3.0, 0.31, 1.0, 100, 20, 1000)
    assert sentence("a", "b", "f1", noise) == (
        "a is 1.00 points of F1 above b, which the choice of questions alone may give (95 % "
        "interval -1.00 to +3.00, p = 0.31, paired bootstrap over 20 contexts; one seed: the "
        "interval covers the choice of questions alone)."
    )
    sure = Difference(45.0, 50.0, -5.0, -7.0, -3.0, 1 / 1001, 1.0, 100, 100, 1000)
    assert sentence("a", "b", "exact", sure) == (
        "a is worse than b by 5.00 points of exact match, more than the choice of questions "
        "explains (95 % interval -7.00 to -3.00, p < 0.001, paired bootstrap over 100 questions; "
        "one seed: the interval covers the choice of questions alone)."
    )


def test_a_head_of_ones_own_is_written_by_its_dotted_path_or_as_its_folder() -> None:
    own = SystemName.parse("my_heads:LastLayer@s1:0.3e:1e")
    assert own == SystemName.parse("my_heads-lastlayer@s1:0.3e:1e")
    assert own == SystemName("my_heads-lastlayer@s1", "0.3e", "1e")
    assert SystemName.parse("my_heads:LastLayer").trained_on is None
    assert SystemName.parse("bert:untrained") == SystemName("bert", "untrained", "untrained")


def test_all_seeds_of_a_head_are_drawn_with_the_questions(lab: Workspace) -> None:
    """A second seed that answers otherwise: the mean is compared, and both are drawn."""
    with pytest.raises(InputError, match="one seed each; `bertvision sweep HEAD --seeds 3`"):
        compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", seeds="all")
    folder = lab.head_dir("0.5e", HEAD)
    seed = folder.with_name(f"{HEAD}@s1")
    shutil.copytree(folder, seed)
    training = fields(seed / "config.json")["training"]
    change(seed / "config.json", training={**training, "seed": 1})
    questions = lab.items("dev")
    gold = {q.id: q.answers[0].text if q.answers else "" for q in questions}
    _predict(seed / "eval" / "1e", gold, dict(squad_metrics(gold, questions)))
    one = compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", resamples=500)
    assert one["seeds"] == [1, 1]
    assert "one seed: the interval covers the choice of questions alone" in one["sentence"]
    both = compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", resamples=500, seeds="all")
    assert both["seeds"] == [2, 1]
    assert both["first_score"] == pytest.approx((one["first_score"] + 100) / 2)
    assert both["standard_error"] > one["standard_error"]
    assert "over seeds, 2 of the first and 1 of the second; the interval" in both["sentence"]
    change(seed / "eval" / "1e" / "metrics.json", threshold_tuned_on=None, rules=_at_zero(seed))
    with pytest.raises(InputError, match=f"that of {HEAD}@s1:0.5e:1e was not"):
        compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", seeds="all")


def _at_zero(run: Path) -> dict[str, Any]:
    rules: dict[str, Any] = fields(run / "eval" / "1e" / "metrics.json")["rules"]
    rules["n-best"]["threshold"] = 0.0
    return rules


def test_a_system_of_another_workspace_is_compared_on_the_same_items(
    lab: Workspace, tmp_path: Path
) -> None:
    """The result is that of one workspace with both; each is named with its own."""
    other = scored_copy(lab, tmp_path / "other")
    shutil.rmtree(lab.bert_dir("1e"))
    here = compare(other, f"{HEAD}:0.5e:1e", "bert:1e", resamples=100)
    found = compare(lab, f"{HEAD}:0.5e:1e", "bert:1e", resamples=100, beside=other)
    assert (found["low"], found["high"], found["p"]) == (here["low"], here["high"], here["p"])
    assert (found["first"], found["second"]) == (f"{HEAD}:0.5e:1e of lab", "bert:1e of other")


def test_a_workspace_with_other_items_is_refused(lab: Workspace, tmp_path: Path) -> None:
    """Here one whose dev is what the first has as training data, with all predictions there."""
    other = scored_copy(lab, tmp_path / "other")
    data = {**other.config.data, "dev": other.config.data["train"]}
    other.config.model_copy(update={"data": data}).write(other.root / "bertvision.yaml")
    with pytest.raises(InputError, match="--with .*other: its dev has other items"):
        compare(lab, "bert:1e", "bert:1e", beside=Workspace.find(other.root))
