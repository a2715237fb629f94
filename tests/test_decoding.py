"""Decoding: spans against brute force, the null score, thresholds, and the paper's rule."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.squad.decoding import (
    NO_SPAN,
    Candidate,
    SpanPrediction,
    apply_threshold,
    decode,
    tune_threshold,
)
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.tasks.squad.read import Answer, Question

Rule = Literal["n-best", "argmax"]


class Window(NamedTuple):
    """A window of question `question`: [CLS] q [SEP] words [SEP], with its logits."""

    question: int
    first_word: int
    start: list[float]  # one per token
    end: list[float]


def question(n_words: int, id: str = "q") -> Question:
    """A context of the words w0, w1, … of three characters and a space each (up to 100 words)."""
    return Question(id, "?", " ".join(f"w{i:02}" for i in range(n_words)), (), True)


def run(windows: list[Window], questions: list[Question], **options: Any) -> Any:
    offsets = []
    for w in windows:
        words = range(w.first_word, w.first_word + len(w.start) - 4)
        offsets += [(-1, -1)] * 3 + [(4 * i, 4 * i + 3) for i in words] + [(-1, -1)]
    index = WindowIndex(
        questions,
        np.array([len(w.start) for w in windows], np.int32),
        np.array([w.question for w in windows], np.int32),
        np.array(offsets, np.int32).reshape(-1, 2),
    )
    arrays = {
        "start_logits": np.array([x for w in windows for x in w.start], np.float32),
        "end_logits": np.array([x for w in windows for x in w.end], np.float32),
    }
    return decode(Logits(arrays, index), **options)


LOGIT = st.integers(-40, 40).map(lambda x: x / 8)  # exact in float32, with ties


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Window], list[Question]]:
    questions = [question(draw(st.integers(0, 9)), f"q{i}") for i in range(draw(st.integers(1, 3)))]
    windows = []
    for i, q in enumerate(questions):
        n_words = len(q.context.split())
        for _ in range(draw(st.integers(1, 3))):
            first = draw(st.integers(0, max(n_words - 1, 0)))
            n = 4 + draw(st.integers(0, n_words - first))
            logits = st.lists(LOGIT, min_size=n, max_size=n)
            windows.append(Window(i, first, draw(logits), draw(logits)))
    return windows, questions


def brute_force(windows: list[Window], index: int, max_length: int) -> dict[str, float]:
    """Every valid text of a question with its highest score, by the definition."""
    texts: dict[str, float] = {}
    for w in windows:
        if w.question != index:
            continue
        for s in range(3, len(w.start) - 1):
            for e in range(s, min(s + max_length, len(w.start) - 1)):
                words = range(w.first_word + s - 3, w.first_word + e - 2)
                text = " ".join(f"w{i:02}" for i in words)
                texts[text] = max(w.start[s] + w.end[e], texts.get(text, -math.inf))
    return texts


@given(cases(), st.integers(1, 4), st.integers(1, 4))
def test_n_best_spans_are_the_best_of_all_valid_spans(
    case: tuple[list[Window], list[Question]], n_best: int, max_length: int
) -> None:
    windows, questions = case
    predictions = run(windows, questions, n_best=n_best, max_answer_length=max_length)
    assert list(predictions) == [q.id for q in questions]
    for i, q in enumerate(questions):
        found = predictions[q.id]
        valid = brute_force(windows, i, max_length)
        assert found.null_score == min(w.start[0] + w.end[0] for w in windows if w.question == i)
        assert found.score == max(valid.values(), default=NO_SPAN)
        assert found.na_score == found.null_score - found.score
        assert valid[found.text] == found.score if valid else found.text == ""

        spans = [c for c in found.n_best if c.text]
        best = sorted(valid.values(), reverse=True)[:n_best]
        assert [c.score for c in spans] == best
        assert all(valid[c.text] == c.score for c in spans)
        scores = [c.score for c in found.n_best]
        assert scores == sorted(scores, reverse=True)
        assert [c.score for c in found.n_best if not c.text] == [found.null_score]
        total = sum(math.exp(s) for s in scores)
        assert [c.probability for c in found.n_best] == pytest.approx(
            [math.exp(s) / total for s in scores]
        )


@given(cases())
def test_the_argmax_rule_is_plain_argmax_at_threshold_zero(
    case: tuple[list[Window], list[Question]],
) -> None:
    windows, questions = case
    answers = apply_threshold(run(windows, questions, rule="argmax"), 0.0)
    for i, q in enumerate(questions):
        best, score = "", -math.inf
        for w in windows:
            s, e = w.start.index(max(w.start)), w.end.index(max(w.end))
            in_context = range(3, len(w.start) - 1)
            if w.question != i or s not in in_context or e not in in_context or e < s:
                continue
            if w.start[s] + w.end[e] > score:
                score = w.start[s] + w.end[e]
                words = range(w.first_word + s - 3, w.first_word + e - 2)
                best = " ".join(f"w{k:02}" for k in words)
        assert answers[q.id] == best


def test_the_best_window_answers_and_the_surest_window_sets_the_null_score() -> None:
    windows = [
        Window(0, 0, [5, 0, 0, 1, 2, 0], [4, 0, 0, 0, 1, 0]),  # null 9, best w01 with 3
        Window(0, 1, [1, 0, 0, 3, 0, 0], [1, 0, 0, 0, 4, 0]),  # null 2, best w01 w02 with 7
    ]
    found = run(windows, [question(3)], n_best=2)["q"]
    assert (found.text, found.score, found.null_score, found.na_score) == ("w01 w02", 7, 2, -5)
    # w01 comes once, although both windows have it
    assert [(c.text, c.score) for c in found.n_best] == [("w01 w02", 7), ("w02", 4), ("", 2)]
    assert apply_threshold({"q": found}, -5.0) == {"q": "w01 w02"}
    assert apply_threshold({"q": found}, -5.5) == {"q": ""}
    assert apply_threshold({"q": found}, None) == {"q": "w01 w02"}


def test_the_rules_differ_where_the_argmax_is_no_span() -> None:
    # The highest end lies before the highest start
    windows = [Window(0, 0, [0, 0, 0, 1, 5, 0], [0, 0, 0, 5, 1, 0])]
    assert apply_threshold(run(windows, [question(2)]), 0.0) == {"q": "w00"}
    argmax = run(windows, [question(2)], rule="argmax")
    assert apply_threshold(argmax, 0.0) == {"q": ""}
    assert argmax["q"] == SpanPrediction("", NO_SPAN, 0.0, (Candidate("", 0.0, 1.0),))
    json.dumps(argmax["q"].na_score, allow_nan=False)


def test_argmax_has_no_limit_of_length() -> None:
    start, end = [0.0] * 50, [0.0] * 50
    start[3], end[48] = 9, 9
    assert run([Window(0, 0, start, end)], [question(46)], rule="argmax")["q"].text.count("w") == 46
    assert run([Window(0, 0, start, end)], [question(46)])["q"].text.count("w") <= 30


def test_the_longest_answer_has_max_answer_length_tokens() -> None:
    start, end = [0.0] * 50, [0.0] * 50
    start[5], end[5 + 29], end[5 + 30] = 9, 5, 7
    text = run([Window(0, 0, start, end)], [question(46)])["q"].text
    assert (text.split()[0], text.split()[-1], len(text.split())) == ("w02", "w31", 30)


def test_padding_logits_do_not_overflow() -> None:
    low = float(np.finfo(np.float32).min)
    window = Window(0, 0, [low] * 6, [low] * 6)
    with np.errstate(all="raise"):
        found = run([window], [question(2)])["q"]
    assert math.isfinite(found.score)
    assert found.na_score == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match="the model that made them has diverged"):
        run([Window(0, 0, [0, 0, 0, bad, 0], [0] * 5)], [question(1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "beam"}, "'beam' is no decoding rule: choose n-best or argmax"),
        ({"n_best": 0}, "n_best is 0"),
        ({"max_answer_length": 0}, "max_answer_length 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run([Window(0, 0, [0] * 5, [0] * 5)], [question(1)], **options)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InputError, match="5 start logits, 6 end logits .* 5 tokens together"):
        run([Window(0, 0, [0] * 5, [0] * 6)], [question(1)])


def test_logits_of_a_pooled_split_have_no_spans() -> None:
    arrays = {name: np.zeros(1, np.float32) for name in ("start_logits", "end_logits")}
    one = np.zeros(1, np.int32)
    with pytest.raises(InputError, match="0 offsets do not belong to windows of 1 tokens together"):
        decode(Logits(arrays, WindowIndex([question(1)], one + 1, one, None)))


def test_no_windows_give_no_predictions() -> None:
    assert run([], []) == {}


def prediction(text: str, na_score: float) -> SpanPrediction:
    return SpanPrediction(text, 0.0, na_score, ())


TUNING = st.lists(
    st.tuples(
        st.sampled_from(["x", "x y", "z", "the"]),
        st.sampled_from([(), ("x",), ("x y z",)]),
        st.integers(-3, 3).map(float),
    ),
    min_size=1,
    max_size=10,
)


@given(TUNING)
def test_the_tuned_threshold_is_the_best_of_all(
    rows: list[tuple[str, tuple[str, ...], float]],
) -> None:
    questions, predictions = [], {}
    for i, (text, golds, na_score) in enumerate(rows):
        answers = tuple(Answer(g, 0) for g in golds)
        questions.append(Question(str(i), "?", "", answers, not golds))
        predictions[str(i)] = prediction(text, na_score)
    threshold = tune_threshold(predictions, questions)
    if all(golds for _, golds, _ in rows):
        assert threshold is None
        return
    f1 = {
        t: squad_metrics(apply_threshold(predictions, t), questions)["f1"]
        for t in [-9.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    }
    assert threshold is not None
    tuned = squad_metrics(apply_threshold(predictions, threshold), questions)["f1"]
    assert tuned == pytest.approx(max(f1.values()), abs=1e-9)


def test_tuning_needs_a_prediction_for_each_question() -> None:
    with pytest.raises(InputError, match="1 of 1 questions have no prediction, .* 'q'"):
        tune_threshold({}, [question(1)])


@pytest.mark.parametrize("rule", ["n-best", "argmax"])
def test_hundreds_of_full_windows_decode_in_under_a_second(rule: Rule) -> None:
    random = np.random.default_rng(0)
    n, length = 300, 386
    offsets = np.full((length, 2), -1, np.int32)
    offsets[20:-1, 0] = np.arange(length - 21)
    offsets[20:-1, 1] = offsets[20:-1, 0] + 1
    questions = [Question(str(i), "?", "x" * length, (), True) for i in range(n)]
    windows = WindowIndex(
        questions,
        np.full(n, length, np.int32),
        np.arange(n, dtype=np.int32),
        np.tile(offsets, (n, 1)),
    )
    both = random.normal(size=(2, n * length)).astype(np.float32)
    logits = Logits({"start_logits": both[0], "end_logits": both[1]}, windows)
    begin = time.process_time()
    decode(logits, rule=rule)
    assert time.process_time() - begin < 1
