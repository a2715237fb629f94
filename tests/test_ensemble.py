"""Ensembles and comparisons of systems: the mathematics, and real members from stored logits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byhand import change, fields, forget_digests
from hypothesis import given
from hypothesis import strategies as st
from labs import HEADS, scored_copy
from safetensors.numpy import load_file, save_file

from bertvision.errors import BertvisionWarning, InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.results.compare import compare, sentence
from bertvision.pipelines.results.ensemble import (
    combine_logits,
    combine_softmaxes,
    ensemble,
    ensemble_dir,
)
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.systems import (
    Combine,
    SystemName,
    find_system,
    label,
    read_windows,
)
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.uncertainty import Difference
from bertvision.pipelines.workspace.workspace import Workspace

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)
COMBINE = st.sampled_from(["max", "mean"])


@st.composite
def members(draw: st.DrawFn, at_least: int = 1) -> tuple[list[np.ndarray], np.ndarray]:
    """Logits of some models over groups of some lengths; half of them far apart."""
    lengths = np.array(draw(LENGTHS))
    n = int(lengths.sum())
    scale = draw(st.sampled_from([1.0, 30.0, 2000.0]))
    values = st.lists(st.floats(-1, 1, width=16), min_size=n, max_size=n)
    models = draw(st.lists(values, min_size=at_least, max_size=4))
    return [np.array(model, np.float32) * np.float32(scale) for model in models], lengths


@given(members(), COMBINE)
def test_probabilities_stay_in_zero_to_one(
    given_members: tuple[list[np.ndarray], np.ndarray], combine: Combine
) -> None:
    """Also of logits so far apart that a probability would underflow to 0."""
    models, lengths = given_members
    logs = combine_softmaxes(models, lengths, combine)
    assert np.isfinite(logs).all()
    assert (logs <= 0).all()


@given(members(), COMBINE, st.integers(1, 4))
def test_a_model_with_itself_is_itself(
    given_members: tuple[list[np.ndarray], np.ndarray], combine: Combine, copies: int
) -> None:
    models, lengths = given_members
    found = combine_logits([models[0]] * copies, lengths, combine)
    np.testing.assert_allclose(found, models[0], rtol=1e-6, atol=1e-9)


@given(members(at_least=2), COMBINE)
def test_the_order_of_members_does_not_matter_to_the_last_bit(
    given_members: tuple[list[np.ndarray], np.ndarray], combine: Combine
) -> None:
    models, lengths = given_members
    found = combine_logits(models, lengths, combine)
    assert np.array_equal(found, combine_logits(models[::-1], lengths, combine))
    assert np.array_equal(found, combine_logits([*models[1:], models[0]], lengths, combine))


@given(members(at_least=2), st.floats(-50, 50))
def test_a_constant_on_a_members_logits_changes_no_probability(
    given_members: tuple[list[np.ndarray], np.ndarray], constant: float
) -> None:
    models, lengths = given_members
    moved = [models[0] + np.float64(constant), *models[1:]]
    for combine in ("max", "mean"):
        np.testing.assert_allclose(
            combine_softmaxes(moved, lengths, combine),
            combine_softmaxes(models, lengths, combine),
            atol=1e-9,
        )


def test_known_probabilities() -> None:
    """Two groups of two values each, with probabilities one can read off."""
    first = np.log(np.array([0.9, 0.1, 0.5, 0.5])).astype(np.float32)
    second = np.log(np.array([0.3, 0.7, 0.2, 0.8])).astype(np.float32)
    lengths = np.array([2, 2])
    for combine, expected in (("max", [0.9, 0.7, 0.5, 0.8]), ("mean", [0.6, 0.4, 0.35, 0.65])):
        logs = combine_softmaxes([first, second], lengths, combine)
        np.testing.assert_allclose(np.exp(logs), expected, rtol=1e-6)


def test_the_mean_of_softmaxes_sums_to_one() -> None:
    random = np.random.default_rng(0)
    models = [random.normal(0, 3, 12).astype(np.float32) for _ in range(3)]
    logs = combine_softmaxes(models, np.array([5, 7]), "mean")
    np.testing.assert_allclose(np.add.reduceat(np.exp(logs), [0, 5]), 1)


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    return scored_copy(workspace, tmp_path / "lab")


@pytest.mark.parametrize("combine", ["max", "mean"])
def test_an_ensemble_is_scored_like_its_members(lab: Workspace, combine: Combine) -> None:
    found = ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e", combine=combine)
    assert found["members"] == ["bert", *sorted(HEADS)]
    assert set(found["rules"]) == set(found["parts"][0]["rules"])
    assert found["threshold_tuned_on"] == "tune"
    folder = ensemble_dir(lab, found["members"], combine, "0.5e", "1e")
    predictions = json.loads((folder / "predictions.json").read_text())
    assert set(predictions) == {question.id for question in lab.items("dev")}
    result = next(r for r in read_results(lab) if r.folder == folder)
    assert result.rules == found["rules"]
    assert result.command == found["command"]
    assert result.name == f"{combine}(BERT, adapter-64-shared, learned-pooling)"


def test_the_order_in_which_members_are_named_does_not_matter(lab: Workspace) -> None:
    there = ensemble(lab, HEADS, with_bert=False, trained_on="0.5e", tag="1e", combine="mean")
    first = _files(lab)
    back = ensemble(lab, HEADS[::-1], with_bert=False, trained_on="0.5e", tag="1e", combine="mean")
    assert back["members"] == there["members"]
    assert back["rules"] == there["rules"]
    assert _files(lab) == first


@pytest.mark.parametrize("combine", ["max", "mean"])
def test_bert_with_a_head_of_the_same_logits_gives_berts_answers(
    lab: Workspace, combine: Combine
) -> None:
    """Through files, windows, threshold and decoding: the whole way is the identity."""
    head = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e"
    forget_digests(head)
    for split in ("dev", "tune"):
        shutil.copy(lab.bert_dir("1e") / f"{split}.safetensors", head / f"{split}.safetensors")
    found = ensemble(lab, HEADS[:1], with_bert=True, trained_on="0.5e", tag="1e", combine=combine)
    bert = json.loads((lab.bert_dir("1e") / "metrics.json").read_text())
    assert found["rules"] == bert["rules"]
    folder = ensemble_dir(lab, found["members"], combine, "0.5e", "1e")
    assert json.loads((folder / "predictions.json").read_text()) == json.loads(
        (lab.bert_dir("1e") / "predictions.json").read_text()
    )


def test_stored_logits_of_heads_and_of_bert_are_of_the_same_windows(lab: Workspace) -> None:
    windows = read_windows(lab, "1e", "tune")
    assert len(windows.items) == lab.config.data["tune"].questions
    for folder in (lab.bert_dir("1e"), lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e"):
        logits = Logits.load(folder / "tune.safetensors", windows, "bertvision")
        assert logits.kind == "span"
        kept = load_file(folder / "tune.safetensors")
        assert sorted(kept) == ["end_logits", "n_tokens", "question_index", "start_logits"]
        assert np.array_equal(kept["n_tokens"], windows.n_tokens)


def test_classes_are_combined_like_tokens(lab: Workspace) -> None:
    """Two heads that tell answerable from not: their mean probability decides."""
    windows = read_windows(lab, "1e", "dev")
    random = np.random.default_rng(0)
    shape = (len(windows.item_index), 2)
    logits = [random.normal(0, 2, shape).astype(np.float32) for _ in HEADS]
    for head, values in zip(HEADS, logits, strict=True):
        folder = lab.head_dir("0.5e", head) / "eval" / "1e"
        forget_digests(folder)
        save_file(
            {"logits": values, "question_index": windows.item_index}, folder / "dev.safetensors"
        )
    found = ensemble(lab, HEADS, with_bert=False, trained_on="0.5e", tag="1e", combine="mean")
    assert found["kind"] == "classification"
    chance = np.mean([1 / (1 + np.exp(v[:, 0] - v[:, 1])) for v in logits], axis=0)
    kept = load_file(ensemble_dir(lab, found["members"], "mean", "0.5e", "1e") / "dev.safetensors")
    one = 1 / (1 + np.exp(kept["logits"][:, 0] - kept["logits"][:, 1]))
    np.testing.assert_allclose(one, chance, rtol=1e-4)
    scores = load_task("answerable").score(Logits({"logits": kept["logits"]}, windows), None)
    assert found["rules"] == scores.rules
    with pytest.raises(InputError, match="bert is of kind span, adapter-64-shared of kind class"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


def test_a_member_without_logits_names_the_command_that_makes_them(lab: Workspace) -> None:
    (lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "dev.safetensors").unlink()
    command = f"bertvision evaluate {HEADS[0]} --trained-on 0.5e --checkpoint 1e"
    with pytest.raises(WorkspaceError, match=command):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    shutil.rmtree(lab.head_dir("0.5e", HEADS[0]) / "eval")
    with pytest.raises(WorkspaceError, match=command):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


def test_without_logits_on_tune_the_threshold_stays_at_zero(lab: Workspace) -> None:
    (lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "tune.safetensors").unlink()
    with pytest.warns(BertvisionWarning, match=f"{HEADS[0]} has no logits on the split tune"):
        found = ensemble(lab, HEADS[:1], with_bert=True, trained_on="0.5e", tag="1e")
    assert found["threshold_tuned_on"] is None
    assert found["rules"]["n-best"]["threshold"] == 0


def test_logits_of_other_windows_are_refused(lab: Workspace) -> None:
    path = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "dev.safetensors"
    arrays = load_file(path)
    save_file({**arrays, "question_index": arrays["question_index"][::-1].copy()}, path)
    with pytest.raises(WorkspaceError, match="not as they were written"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    forget_digests(path.parent)
    with pytest.raises(WorkspaceError, match="of other data than"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    path.write_bytes(b"no tensors")
    with pytest.raises(WorkspaceError, match="are damaged"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


def test_members_on_different_encoders_are_refused(lab: Workspace) -> None:
    path = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "metrics.json"
    provenance = fields(path)["provenance"]
    change(path, provenance={**provenance, "weights_sha256": "0" * 64})
    with pytest.raises(WorkspaceError, match="other weights than bert"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


@pytest.mark.parametrize(
    ("runs", "with_bert", "combine", "error", "message"),
    [
        (HEADS[:1], False, "max", InputError, "two members or more"),
        ([HEADS[0], HEADS[0]], False, "max", InputError, "name each once"),
        (HEADS, False, "median", InputError, "choose one of max, mean"),
        (["learned-poolin"], True, "max", UnknownNameError, "did you mean learned-pooling"),
    ],
    ids=["alone", "twice", "combine", "unknown"],
)
def test_what_is_no_ensemble_is_refused(
    lab: Workspace,
    runs: list[str],
    with_bert: bool,
    combine: Combine,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        ensemble(lab, runs, with_bert=with_bert, trained_on="0.5e", tag="1e", combine=combine)


def test_an_ensemble_of_very_many_heads_has_a_name_that_a_disk_takes(lab: Workspace) -> None:
    many = [f"adapter-386-independent-skip@f0.{i}@s{i}" for i in range(40)]
    name = ensemble_dir(lab, many, "max", "0.3e", "1e", "tune").name
    assert len(name) < 200
    assert name != ensemble_dir(lab, many[1:], "max", "0.3e", "1e", "tune").name


def _files(workspace: Workspace) -> dict[str, bytes]:
    """Files of ensembles, but for those with the time that they took."""
    found = {}
    for path in (workspace.root / "ensembles").rglob("*.*"):
        if path.is_file() and path.name != "metrics.json":
            found[str(path.relative_to(workspace.root))] = path.read_bytes()
    return found


HEAD = HEADS[0]


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
