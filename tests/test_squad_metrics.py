"""The official SQuAD 2.0 metric: known answers, and the threshold search against brute force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import BertvisionWarning, InputError
from bertvision.pipelines.tasks.squad.metrics import (
    answer_score,
    normalise_answer,
    score_files,
    squad_metrics,
)
from bertvision.pipelines.tasks.squad.read import Answer, Question


def question(id: str, *golds: str) -> Question:
    # Only the texts matter to the metric
    return Question(id, "?", "", tuple(Answer(g, 0) for g in golds), not golds)


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("an apple a day", "apple day"),
        ("theatre Anna", "theatre anna"),
        ("U.S.A.", "usa"),
        ("a-b", "ab"),  # punctuation goes first: the article is part of a word then
        ("the-", ""),
        ("«Zoë»", "«zoë»"),  # only ASCII punctuation goes
        ("tab\tnew\nline\u00a0x", "tab new line x"),
        ("", ""),
    ],
)
def test_normalisation_follows_the_definition(text: str, normalised: str) -> None:
    assert normalise_answer(text) == normalised


@pytest.mark.parametrize(
    ("prediction", "golds", "exact", "f1"),
    [
        ("the Normans", ["Normans"], 1, 1),
        ("in the 10th century", ["10th century"], 0, 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("10th", ["10th and 11th", "10th century"], 0, 2 / 3),  # best over golds
        ("b b c", ["b c c"], 0, 2 / 3),  # tokens are counted as a multiset
        ("Boris", ["Anna"], 0, 0),
        ("", ["Anna"], 0, 0),
        ("", [], 1, 1),
        ("the", [], 1, 1),  # normalises to nothing
        ("Anna", [], 0, 0),
        ("Anna", ["the", "Anna"], 1, 1),
        ("", ["the", "Anna"], 0, 0),  # a gold that normalises to nothing does not count
        ("", ["the"], 1, 1),  # unless none is left
    ],
)
def test_one_answer_scores_as_computed_by_hand(
    prediction: str, golds: list[str], exact: float, f1: float
) -> None:
    score = answer_score(prediction, question("q", *golds))
    assert score.exact == exact
    assert score.f1 == pytest.approx(f1, abs=1e-12)


QUESTIONS = [
    question("a", "Anna", "Anna Bo"),
    question("b", "in Paris"),
    question("c"),
    question("d"),
    question("e", "1901"),
]
PREDICTIONS = {"a": "Anna", "b": "Paris", "c": "", "d": "Rome", "e": ""}


def test_metrics_have_the_official_keys_and_values() -> None:
    f1 = {"a": 1.0, "b": 2 / 3, "c": 1.0, "d": 0.0, "e": 0.0}
    metrics = squad_metrics(PREDICTIONS, QUESTIONS)
    expected = {
        "exact": 40.0,
        "f1": 100 * sum(f1.values()) / 5,
        "total": 5,
        "HasAns_exact": 100 / 3,
        "HasAns_f1": 100 * (1 + 2 / 3) / 3,
        "HasAns_total": 3,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert list(metrics) == list(expected)


def test_only_groups_that_exist_are_reported() -> None:
    assert list(squad_metrics({"a": "Anna"}, QUESTIONS[:1])) == [
        *("exact", "f1", "total", "HasAns_exact", "HasAns_f1", "HasAns_total")
    ]
    assert list(squad_metrics({"c": ""}, QUESTIONS[2:3])) == [
        *("exact", "f1", "total", "NoAns_exact", "NoAns_f1", "NoAns_total")
    ]


def test_best_thresholds_follow_the_official_procedure() -> None:
    na_probs = {"a": 0.1, "b": 0.2, "c": 0.9, "d": 0.5, "e": 0.3}
    metrics = squad_metrics(PREDICTIONS, QUESTIONS, na_probs, na_prob_thresh=0.4)
    # Above 0.4, c and d abstain: both are right then
    assert metrics["exact"] == 60.0
    assert metrics["NoAns_exact"] == 100.0
    # From 2 right by abstaining: a +1 → 3 at 0.1, b +0 (exact) or +2/3 (F1), e +0, d −1, c +0
    assert metrics["best_exact"] == 60.0
    assert metrics["best_exact_thresh"] == 0.1
    assert metrics["best_f1"] == pytest.approx(100 * (3 + 2 / 3) / 5)
    assert metrics["best_f1_thresh"] == 0.2
    assert list(metrics)[-4:] == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]


def test_where_abstaining_everywhere_is_best_the_threshold_is_zero() -> None:
    metrics = squad_metrics({"c": "x", "d": "y"}, QUESTIONS[2:4], {"c": 0.3, "d": 0.4})
    assert (metrics["best_f1"], metrics["best_f1_thresh"]) == (100.0, 0.0)
    assert metrics["f1"] == 0.0


def test_a_probability_equal_to_the_threshold_still_answers() -> None:
    na_probs = dict.fromkeys("abcde", 0.4)
    assert squad_metrics(PREDICTIONS, QUESTIONS, na_probs, 0.4)["exact"] == 40.0
    assert squad_metrics(PREDICTIONS, QUESTIONS, na_probs, 0.39)["exact"] == 40.0
    assert squad_metrics(PREDICTIONS, QUESTIONS, na_probs, 0.39)["NoAns_exact"] == 100.0


def test_equal_probabilities_are_taken_in_the_order_of_the_file() -> None:
    questions = [question("a", "x"), question("c")]
    predictions = {"a": "x", "c": "y"}
    first_a = squad_metrics(predictions, questions, {"a": 0.5, "c": 0.5})
    first_c = squad_metrics(predictions, questions, {"c": 0.5, "a": 0.5})
    assert (first_a["best_f1"], first_c["best_f1"]) == (100.0, 50.0)


CASE = st.tuples(
    st.sampled_from(["", "x", "x y", "z"]),  # predicted
    st.sampled_from([(), ("x",), ("x y z", "w")]),  # golds
)


@given(st.lists(CASE, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_best_thresholds_equal_trying_every_threshold(
    cases: list[tuple[str, tuple[str, ...]]], random: Any
) -> None:
    ids = [str(i) for i in range(len(cases))]
    questions = [question(i, *golds) for i, (_, golds) in zip(ids, cases, strict=True)]
    predictions = {i: text for i, (text, _) in zip(ids, cases, strict=True)}
    values = [(k + 1) / 100 for k in range(len(ids))]
    random.shuffle(values)
    na_probs = dict(zip(ids, values, strict=True))
    found = squad_metrics(predictions, questions, na_probs)
    for name in ("exact", "f1"):
        tried = {
            t: squad_metrics(
                {i: "" if na_probs[i] > t else text for i, text in predictions.items()}, questions
            )[name]
            for t in [0.0, *values]
        }
        best = max(tried.values())
        assert found[f"best_{name}"] == pytest.approx(best, abs=1e-9)
        assert tried[found[f"best_{name}_thresh"]] == pytest.approx(best, abs=1e-9)


@given(st.lists(CASE, min_size=1, max_size=12), st.floats(0, 1), st.data())
def test_a_threshold_scores_like_replacing_answers_by_nothing(
    cases: list[tuple[str, tuple[str, ...]]], threshold: float, data: st.DataObject
) -> None:
    questions = [question(str(i), *golds) for i, (_, golds) in enumerate(cases)]
    predictions = {str(i): text for i, (text, _) in enumerate(cases)}
    na_probs = {i: data.draw(st.floats(0, 1)) for i in predictions}
    with_threshold = squad_metrics(predictions, questions, na_probs, threshold)
    replaced = {i: "" if na_probs[i] > threshold else t for i, t in predictions.items()}
    plain = squad_metrics(replaced, questions)
    assert {k: with_threshold[k] for k in plain} == plain


def test_a_missing_prediction_or_probability_is_an_error() -> None:
    with pytest.raises(InputError, match="2 of 5 questions have no prediction, the first .* 'd'"):
        squad_metrics({"a": "", "b": "", "c": ""}, QUESTIONS)
    with pytest.raises(InputError, match="4 of 5 questions have no no-answer probability"):
        squad_metrics(PREDICTIONS, QUESTIONS, {"a": 0.5})
    with pytest.raises(InputError, match="no questions to score"):
        squad_metrics({}, [])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Predictions, data and na_prob files of two questions."""
    qas = [
        {
            "id": "a",
            "question": "Who?",
            "answers": [{"text": "Anna", "answer_start": 0}],
            "is_impossible": False,
        },
        {"id": "c", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    content = {
        "predictions": {"a": "Anna", "c": "there"},
        "data": {"version": "v2.0", "data": [{"paragraphs": [{"context": "Anna.", "qas": qas}]}]},
        "na_prob": {"a": 0.25, "c": 1},
    }
    paths = {name: tmp_path / f"{name}.json" for name in content}
    for name, value in content.items():
        paths[name].write_text(json.dumps(value), encoding="utf-8")
    return paths


def test_files_score_like_their_contents(files: dict[str, Path]) -> None:
    metrics = score_files(files["predictions"], files["data"])
    assert (metrics["exact"], metrics["total"]) == (50.0, 2)
    assert "best_f1" not in metrics
    metrics = score_files(**files, na_prob_thresh=0.5)
    assert (metrics["exact"], metrics["best_exact"]) == (100.0, 100.0)
    assert metrics["best_exact_thresh"] == 0.25


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("predictions", "[1]", "predictions.json: expected an object of question ids, found list"),
        ("predictions", '{"a": null}', r"\['a'\]: expected the answer text .* found None"),
        ("predictions", '{"a": "x"', "predictions.json: is not JSON"),
        ("predictions", '{"a": "x"}', "1 of 2 questions have no prediction, the first .* 'c'"),
        ("na_prob", '{"a": "0.5"}', r"\['a'\]: expected the no-answer probability .* '0.5'"),
        ("na_prob", '{"a": NaN, "c": 0}', "expected the no-answer probability .* nan"),
        ("na_prob", '{"a": true, "c": 0}', "expected the no-answer probability .* True"),
        ("na_prob", '{"a": 1}', "1 of 2 questions have no no-answer probability"),
        ("data", "{}", "data.json: data: is missing"),
    ],
)
def test_a_malformed_file_is_named(
    files: dict[str, Path], name: str, content: str, message: str
) -> None:
    files[name].write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        score_files(**files)


def test_unknown_ids_do_not_count_and_are_reported(files: dict[str, Path]) -> None:
    files["predictions"].write_text('{"z": "?", "a": "Anna", "c": ""}', encoding="utf-8")
    with pytest.warns(BertvisionWarning, match="1 of 3 predictions .* 'z'; they do not count"):
        metrics = score_files(files["predictions"], files["data"])
    assert (metrics["exact"], metrics["total"]) == (100.0, 2)


def test_skipped_questions_do_not_count_and_are_reported(files: dict[str, Path]) -> None:
    text = files["data"].read_text(encoding="utf-8").replace('"answer_start": 0', '"at": 0')
    files["data"].write_text(text, encoding="utf-8")
    files["predictions"].write_text('{"c": ""}', encoding="utf-8")
    with pytest.warns(BertvisionWarning, match=r"skipped 1 malformed parts, .*answer_start"):
        metrics = score_files(files["predictions"], files["data"], skip_bad=True)
    assert (metrics["exact"], metrics["total"]) == (100.0, 1)
