"""Metrics of classes and scores: known answers, other implementations, what changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from bertvision.errors import InputError
from bertvision.pipelines.tasks.sentences.metrics import (
    accuracy,
    classification_metrics,
    f1,
    macro_f1,
    matthews,
    pearson,
    spearman,
)

labels = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 4), min_size=n, max_size=n)] * 2)
)
numbers = st.integers(2, 30).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(-50, 50), min_size=n, max_size=n)] * 2)
)


def test_binary_example_counted_by_hand():
    # tp 3, fp 1, fn 2, tn 4
    gold = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    predicted = np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])
    assert accuracy(predicted, gold) == pytest.approx(70)
    assert f1(predicted, gold) == pytest.approx(100 * 6 / 9)
    assert f1(predicted, gold, positive=0) == pytest.approx(100 * 8 / 11)
    assert macro_f1(predicted, gold) == pytest.approx(50 * (6 / 9 + 8 / 11))
    assert matthews(predicted, gold) == pytest.approx(
        100 * (3 * 4 - 1 * 2) / (4 * 5 * 5 * 6) ** 0.5
    )


def test_correlations_with_known_answers():
    x, y = np.array([1.0, 2, 3, 4, 5]), np.array([2.0, 1, 4, 3, 5])
    assert pearson(x, 3 * x - 7) == pytest.approx(100)
    assert pearson(x, -x) == pytest.approx(-100)
    assert pearson(x, y) == pytest.approx(80)
    assert spearman(x, np.exp(x)) == pytest.approx(100)
    assert spearman(x, y) == pytest.approx(80)  # 1 − 6·Σd²/(n(n²−1)) = 1 − 24/120
    assert pearson(x * 1e-300, y * 1e300) == pytest.approx(80)


def test_what_is_undefined_is_zero():
    ones, mixed = np.ones(6, int), np.array([0, 1, 0, 1, 1, 1])
    assert matthews(ones, mixed) == 0
    assert matthews(mixed, ones) == 0
    assert matthews(ones, ones) == 0
    assert f1(np.zeros(6, int), mixed) == 0
    assert f1(np.zeros(6, int), np.zeros(6, int)) == 0
    constant, rising = np.full(6, 0.1), np.arange(6.0)
    assert pearson(constant, rising) == spearman(constant, rising) == 0
    assert pearson(rising, constant) == 0
    # 0.1 as a sum differs in its last bit: that is no variation to correlate with
    assert pearson(np.array([0.3, 0.1 + 0.2, 0.3]), np.arange(3.0)) == 0


@given(labels)
def test_classes_agree_with_scikit_learn(pair):
    predicted, gold = (np.array(side) for side in pair)
    assert accuracy(predicted, gold) == pytest.approx(100 * sk.accuracy_score(gold, predicted))
    ours, theirs = macro_f1(predicted, gold), sk.f1_score(gold, predicted, average="macro")
    assert ours == pytest.approx(100 * theirs)
    assert matthews(predicted, gold) == pytest.approx(
        100 * sk.matthews_corrcoef(gold, predicted), abs=1e-9
    )
    binary = sk.f1_score(gold == 1, predicted == 1, zero_division=0)
    assert f1(predicted, gold) == pytest.approx(100 * binary)


@given(numbers)
def test_correlations_agree_with_scipy(pair):
    x, y = (np.array(side, float) for side in pair)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert pearson(x, y) == spearman(x, y) == 0
        return
    assert pearson(x, y) == pytest.approx(100 * stats.pearsonr(x, y).statistic, abs=1e-9)
    assert spearman(x, y) == pytest.approx(100 * stats.spearmanr(x, y).statistic, abs=1e-9)


@given(labels, st.permutations(range(5)), st.integers(0, 2**32 - 1))
def test_neither_names_of_classes_nor_order_of_rows_changes_a_metric(pair, names, seed):
    predicted, gold = (np.array(side) for side in pair)
    rows = np.random.default_rng(seed).permutation(len(gold))
    renamed = np.array(names)
    before = classification_metrics(predicted, gold)
    after = classification_metrics(renamed[predicted][rows], renamed[gold][rows])
    assert after == pytest.approx(before)
    # of a named class, F1 goes with its name
    positive = classification_metrics(predicted, gold, positive=1)
    moved = classification_metrics(renamed[predicted], renamed[gold], positive=renamed[1])
    assert moved == pytest.approx(positive)


@pytest.mark.parametrize(
    ("predicted", "gold", "why"),
    [
        ([], [], "one item or more"),
        ([1, 0], [1], r"shape \(2,\).*shape \(1,\)"),
        ([1.0, np.nan], [1.0, 0.0], "NaN"),
        ([1.0, 0.5], [1.0, np.inf], "infinity"),
    ],
)
def test_what_cannot_be_scored_is_refused(predicted, gold, why):
    with pytest.raises(InputError, match=why):
        pearson(np.array(predicted), np.array(gold))
    with pytest.raises(InputError, match=why):
        accuracy(np.array(predicted), np.array(gold))
