"""MAP, MRR and P@1: known answers, trec_eval's, and what chance gives."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st
from rankings import candidates, random_candidates

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.readouts.rank_metrics import (
    Candidates,
    QuestionScores,
    expected_at_random,
    ranks,
    score_questions,
    summary,
    tie_order,
)


def scored(of: Candidates, scores: object) -> QuestionScores:
    return score_questions(np.asarray(scores), of.label, of.question, of.tie)


def test_known_answers() -> None:
    of = candidates([[1, 0, 1, 0], [0, 1, 0]])
    found = scored(of, [4, 3, 2, 1, 3, 2, 1])
    assert found.ap.tolist() == [(1 + 2 / 3) / 2, 1 / 2]
    assert found.rr.tolist() == [1, 1 / 2]
    assert found.p1.tolist() == [1, 0]
    metrics = summary(found, 2)
    assert metrics.map == pytest.approx(100 * (5 / 6 + 1 / 2) / 2)
    assert (metrics.mrr, metrics.p1) == (75, 50)


def test_a_perfect_scorer_gets_everything_and_its_opposite_the_least() -> None:
    of = random_candidates(50, seed=1)
    assert summary(scored(of, of.label), 50)[:3] == (100, 100, 100)
    worst = scored(of, -of.label)
    assert (worst.p1 == 0).all()
    n, r = np.bincount(of.question), np.bincount(of.question, weights=of.label)
    np.testing.assert_allclose(worst.rr, 1 / (n - r + 1))


def test_questions_without_a_positive_passage_are_left_out_and_counted() -> None:
    of = candidates([[0, 1], [0, 0, 0], [1, 0], [0]])
    metrics = summary(scored(of, np.zeros(8)), 4)
    assert (metrics.questions, metrics.without_positive) == (2, 2)
    # equal scores: the greater id first, which is the second passage of each question
    assert metrics.map == 100 * (1 + 1 / 2) / 2
    assert metrics.map_all == metrics.map / 2
    assert (metrics.mrr_all, metrics.p1_all) == (metrics.mrr / 2, metrics.p1 / 2)
    with pytest.raises(InputError, match="none of 1 questions has a positive"):
        summary(scored(candidates([[0, 0]]), [1, 2]), 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        ranks(np.array([1.0, value]), np.zeros(2, int), np.arange(2))


ranked_questions = st.lists(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(-4, 4), st.integers(0, 15)),
        min_size=1,
        max_size=12,
        unique_by=lambda passage: passage[2],
    ),
    min_size=1,
    max_size=6,
)


@given(ranked_questions)
def test_the_metrics_are_those_of_trec_eval_ties_included(
    rows: list[list[tuple[int, int, int]]],
) -> None:
    ids = [f"{name:x}" for row in rows for _, _, name in row]
    of = candidates([[label for label, _, _ in row] for row in rows], ids)
    scores = np.array([score / 4 for row in rows for _, score, _ in row], np.float32)
    found = scored(of, scores)
    qrels = {f"q{i}": {f"{n:x}": label for label, _, n in row} for i, row in enumerate(rows)}
    run = {f"q{i}": {f"{n:x}": score / 4 for _, score, n in row} for i, row in enumerate(rows)}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"map", "recip_rank", "P_1"})
    theirs = evaluator.evaluate(run)
    answered = [f"q{i}" for i, row in enumerate(rows) if any(label for label, _, _ in row)]
    for values, name in zip(found, ("map", "recip_rank", "P_1"), strict=True):
        np.testing.assert_allclose(values, [theirs[q][name] for q in answered], atol=1e-12)


@given(ranked_questions, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_changes_nothing(
    rows: list[list[tuple[int, int, int]]], random: object
) -> None:
    ids = [f"{name:x}" for row in rows for _, _, name in row]
    of = candidates([[label for label, _, _ in row] for row in rows], ids)
    scores = np.array([score for row in rows for _, score, _ in row])
    order = np.arange(len(of))
    random.shuffle(order)  # type: ignore[attr-defined]
    mixed = score_questions(scores[order], of.label[order], of.question[order], of.tie[order])
    for before, after in zip(scored(of, scores), mixed, strict=True):
        np.testing.assert_array_equal(before, after)


def test_systems_scored_together_are_scored_as_if_alone() -> None:
    of = random_candidates(20, seed=2)
    scores = np.random.default_rng(0).normal(size=(3, len(of)))
    together = scored(of, scores)
    for i in range(3):
        for all_, one in zip(together, scored(of, scores[i]), strict=True):
            np.testing.assert_array_equal(all_[i], one)


@pytest.mark.parametrize(("n", "r"), [(1, 1), (4, 1), (5, 2), (6, 6), (6, 5)])
def test_expectations_are_the_means_over_all_orders(n: int, r: int) -> None:
    of = candidates([[1] * r + [0] * (n - r)])
    orders = np.array(list(itertools.permutations(range(n))), float)
    everything, expected = scored(of, orders), expected_at_random(of.label, of.question)
    for values, mean in zip(everything, expected, strict=True):
        assert values.mean() == pytest.approx(mean[0], abs=1e-12)


def test_shuffled_scores_give_the_expected_map_within_three_standard_errors() -> None:
    of = random_candidates(1000, seed=3)
    found = scored(of, np.random.default_rng(4).permutation(len(of)))
    for values, expected in zip(found, expected_at_random(of.label, of.question), strict=True):
        difference = values - expected
        assert abs(difference.mean()) < 3 * difference.std() / math.sqrt(len(difference))


def test_equal_scores_come_in_the_order_of_descending_ids() -> None:
    tie = tie_order(["b", "10", "9", "b"])
    assert tie.tolist() == [0, 2, 1, 0]
    assert ranks(np.zeros(3), np.zeros(3, int), tie[:3]).tolist() == [1, 3, 2]
