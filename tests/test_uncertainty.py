"""The paired bootstrap: known answers, invariants, and intervals that hold what they promise."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bertvision.errors import InputError
from bertvision.pipelines.results.error_analysis import mcnemar
from bertvision.pipelines.tasks.sentences.metrics import accuracy, matthews, pearson
from bertvision.pipelines.uncertainty import (
    deviation,
    paired_bootstrap,
    paired_bootstrap_of,
    paired_runs,
)

SCORES = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=30)


def test_standard_error_is_the_analytic_one_for_normal_scores() -> None:
    random = np.random.default_rng(1)
    first, second = random.normal(60, 10, 2000), random.normal(58, 10, 2000)
    found = paired_bootstrap(first, second, resamples=20_000)
    error = np.std(first - second, ddof=1) / np.sqrt(2000)
    assert found.difference == pytest.approx(first.mean() - second.mean())
    assert found.standard_error == pytest.approx(error, rel=0.03)
    assert found.low == pytest.approx(found.difference - 1.96 * error, abs=0.05)
    assert found.high == pytest.approx(found.difference + 1.96 * error, abs=0.05)


def test_a_metric_that_is_a_mean_is_drawn_as_the_mean_is() -> None:
    """Accuracy by recomputation against accuracy as a mean over questions, by clusters too."""
    random = np.random.default_rng(5)
    gold = random.integers(0, 3, 300)
    first = np.where(random.random(300) < 0.8, gold, 1)
    second = np.where(random.random(300) < 0.7, gold, 2)
    for clusters in (None, (np.arange(300) // 4).tolist()):
        whole = paired_bootstrap_of(
            accuracy, first, second, gold, clusters=clusters, resamples=4000
        )
        right = [100.0 * (side == gold) for side in (first, second)]
        mean = paired_bootstrap(*right, clusters=clusters, resamples=4000, seed=1)
        assert whole.first == pytest.approx(mean.first)
        assert whole.difference == pytest.approx(mean.difference)
        assert whole.clusters == mean.clusters
        assert whole.standard_error == pytest.approx(mean.standard_error, rel=0.06)
        assert whole.low == pytest.approx(mean.low, abs=0.6)
        assert whole.high == pytest.approx(mean.high, abs=0.6)


def test_seeds_of_a_metric_that_is_a_mean_are_drawn_as_those_of_the_mean_are() -> None:
    """Accuracy of several trainings by recomputation, against the mean over questions and seeds."""
    random = np.random.default_rng(8)
    gold = random.integers(0, 3, 200)
    skill = np.array([[0.6], [0.75], [0.9]])
    first = np.where(random.random((3, 200)) < skill, gold, (gold + 1) % 3)
    second = np.where(random.random(200) < 0.7, gold, (gold + 2) % 3)
    whole = paired_bootstrap_of(accuracy, first, second, gold, resamples=4000)
    mean = paired_bootstrap(100.0 * (first == gold), 100.0 * (second == gold), resamples=4000)
    assert whole.seeds == mean.seeds == (3, 1)
    assert (whole.first, whole.second) == pytest.approx((mean.first, mean.second))
    assert whole.standard_error == pytest.approx(mean.standard_error, rel=0.06)
    assert (whole.low, whole.high) == pytest.approx((mean.low, mean.high), abs=1.0)
    alone = paired_bootstrap_of(accuracy, first[1], second, gold, resamples=4000)
    assert alone.standard_error < 0.8 * whole.standard_error, "seeds of other skill are in it"


def test_systems_change_places_with_the_sign_alone() -> None:
    random = np.random.default_rng(6)
    gold = random.normal(size=80)
    first, second = gold + random.normal(size=80), random.normal(size=80)
    there = paired_bootstrap_of(pearson, first, second, gold, resamples=500)
    back = paired_bootstrap_of(pearson, second, first, gold, resamples=500)
    assert (back.difference, back.p) == pytest.approx((-there.difference, there.p))
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low))
    assert there.p < 0.05
    assert there.low > 0


def test_a_system_has_the_metric_that_it_has_itself() -> None:
    random = np.random.default_rng(7)
    gold, said = random.integers(0, 2, (2, 60))
    found = paired_bootstrap_of(matthews, said, said, gold, resamples=50)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_p_is_the_analytic_one_for_normal_scores() -> None:
    random = np.random.default_rng(2)
    noise = random.normal(0, 1, 1000)
    noise = (noise - noise.mean()) / noise.std()
    z = 2.0
    found = paired_bootstrap(noise + z / np.sqrt(1000), np.zeros(1000), resamples=50_000)
    assert found.p == pytest.approx(2 * (1 - statistics.NormalDist().cdf(z)), abs=0.005)


def test_perfectly_dependent_questions_count_as_one() -> None:
    """A cluster of k equal differences is k times fewer pieces of evidence."""
    random = np.random.default_rng(3)
    alone = random.normal(0, 1, 300)
    copied = np.repeat(alone, 10)
    clusters = np.repeat(np.arange(300), 10).tolist()
    one = paired_bootstrap(alone, np.zeros(300), seed=4)
    clustered = paired_bootstrap(copied, np.zeros(3000), clusters=clusters, seed=4)
    naive = paired_bootstrap(copied, np.zeros(3000), seed=4)
    assert clustered.standard_error == pytest.approx(one.standard_error)
    assert (clustered.low, clustered.high, clustered.p) == pytest.approx((one.low, one.high, one.p))
    assert naive.standard_error == pytest.approx(one.standard_error / np.sqrt(10), rel=0.1)
    assert (clustered.questions, clustered.clusters, naive.clusters) == (3000, 300, 3000)


@given(SCORES)
def test_a_system_does_not_differ_from_itself(scores: list[tuple[float, float]]) -> None:
    first = [a for a, _ in scores]
    found = paired_bootstrap(first, first, resamples=50)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)


@given(SCORES, st.booleans())
def test_swapping_the_systems_swaps_the_sign_alone(
    scores: list[tuple[float, float]], clustered: bool
) -> None:
    first, second = [a for a, _ in scores], [b for _, b in scores]
    clusters = [row // 3 for row in range(len(scores))] if clustered else None
    there = paired_bootstrap(first, second, clusters=clusters, resamples=200)
    back = paired_bootstrap(second, first, clusters=clusters, resamples=200)
    assert back.difference == -there.difference
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-9)
    assert back.p == there.p
    assert there.low <= there.high
    assert 0 < there.p <= 1


def test_the_seed_decides_the_draws_and_blocks_of_draws_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bertvision.pipelines import uncertainty

    random = np.random.default_rng(5)
    first, second = random.random(50), random.random(50)
    whole = paired_bootstrap(first, second, resamples=1000)
    assert paired_bootstrap(first, second, resamples=1000) == whole
    assert paired_bootstrap(first, second, resamples=1000, seed=1) != whole
    monkeypatch.setattr(uncertainty, "_DRAWS_AT_ONCE", 50 * 7)
    assert paired_bootstrap(first, second, resamples=1000) == whole


def test_intervals_cover_the_true_difference_as_often_as_they_say() -> None:
    """400 data sets of dependent questions: 95 % intervals over clusters hold the truth in 95 %."""
    random = np.random.default_rng(6)
    clusters = np.repeat(np.arange(80), 5)
    covered = false_alarms = naive = 0
    for seed in range(400):
        shared = random.normal(0, 1, 80)[clusters]
        first = 1 + shared + random.normal(0, 1, 400)
        found = paired_bootstrap(
            first, np.zeros(400), clusters=clusters.tolist(), resamples=500, seed=seed
        )
        covered += found.low <= 1 <= found.high
        none = paired_bootstrap(
            first - 1, np.zeros(400), clusters=clusters.tolist(), resamples=500, seed=seed
        )
        false_alarms += none.p < 0.05
        alone = paired_bootstrap(first, np.zeros(400), resamples=500, seed=seed)
        naive += alone.low <= 1 <= alone.high
    # a binomial of 400 at 0.95 has a standard deviation of 1.1 %
    assert 0.91 <= covered / 400 <= 0.98
    assert 0.02 <= false_alarms / 400 <= 0.09
    assert naive / 400 < 0.85  # question by question, the same data seem more certain than they are


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        ([], [], {}, "one score per question"),
        ([1.0], [1.0, 2.0], {}, "one score per question"),
        ([float("nan")], [1.0], {}, "NaN"),
        ([1.0], [1.0], {"clusters": ["a", "b"]}, "2 clusters"),
        ([1.0], [1.0], {"resamples": 0}, "at least one"),
        ([1.0], [1.0], {"confidence": 1.0}, "between 0 and 1"),
    ],
    ids=["none", "unpaired", "nan", "clusters", "resamples", "confidence"],
)
def test_what_cannot_be_compared_is_refused(
    first: list[float], second: list[float], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        paired_bootstrap(first, second, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (1, 9, 0.021484375), (2, 6, 0.2890625)],
)
def test_mcnemar_is_the_binomial_test(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p)
    assert mcnemar(only_second, only_first) == mcnemar(only_first, only_second)


def test_mcnemar_of_thousands_of_questions_is_near_the_normal_approximation() -> None:
    exact = mcnemar(4900, 5100)
    normal = 2 * (1 - statistics.NormalDist().cdf((5100 - 5000 - 0.5) / np.sqrt(2500)))
    assert exact == pytest.approx(normal, rel=0.01)


def test_deviations_have_n_minus_1_and_one_run_has_none() -> None:
    assert deviation([50.0, 52.0, 54.0]) == 2.0
    assert deviation([50.0]) is None


def test_seeds_are_drawn_beside_the_questions() -> None:
    """The error of scores that differ by seed and question is that of both: analytic."""
    random = np.random.default_rng(3)
    seeds, questions = 200, 400
    of_seeds, of_questions = random.normal(0, 2, (seeds, 1)), random.normal(0, 20, questions)
    first, second = 60 + of_seeds + of_questions, np.full(questions, 58.0)
    found = paired_bootstrap(first, second, resamples=4000)
    one = paired_bootstrap(first[0], second, resamples=4000)
    error = np.std(of_questions) / np.sqrt(questions)
    assert one.standard_error == pytest.approx(error, rel=0.05)
    both = np.hypot(error, np.std(of_seeds) / np.sqrt(seeds))
    assert found.standard_error == pytest.approx(both, rel=0.05)
    assert (one.seeds, found.seeds) == ((1, 1), (seeds, 1))
    few = paired_bootstrap(first[:3], second, resamples=4000)
    wide = np.hypot(error, np.std(of_seeds[:3]) / np.sqrt(3))
    assert few.standard_error == pytest.approx(wide, rel=0.05)
    assert few.difference == pytest.approx(first[:3].mean() - 58)


def test_runs_alone_have_the_interval_of_t_and_questions_add_their_error() -> None:
    random = np.random.default_rng(5)
    of_runs, of_questions = np.array([[1.0], [2.0], [4.5]]), random.normal(0, 20, 400)
    second = random.normal(50, 10, (3, 400))
    alone = paired_runs(second + of_runs, second, resamples=200)
    expected = stats.ttest_1samp(of_runs.ravel(), 0)
    ends = expected.confidence_interval()
    assert (alone.low, alone.high, alone.p) == pytest.approx((*ends, expected.pvalue))
    assert alone.seeds == (3, 3)
    both = paired_runs(second + of_runs + of_questions, second, resamples=4000)
    errors = of_runs.std(ddof=1) / 3**0.5, of_questions.std() / 20
    assert both.standard_error == pytest.approx(np.hypot(*errors), rel=0.03)
    freedom = np.hypot(*errors) ** 4 / (errors[0] ** 4 / 2 + errors[1] ** 4 / 399)
    half = both.standard_error * stats.t.ppf(0.975, freedom)
    assert both.high - both.difference == pytest.approx(half, rel=0.1)
    same = paired_runs(second, second, resamples=20)
    assert (same.low, same.high, same.p) == (0, 0, 1)
    with pytest.raises(InputError, match="two runs or more"):
        paired_runs(second[:1], second[:1])


def test_drawn_seeds_change_places_with_the_sign_alone_and_equal_ones_draw_nothing() -> None:
    random = np.random.default_rng(4)
    first, second = random.normal(60, 10, (2, 40)), random.normal(50, 10, (3, 40))
    clusters = (np.arange(40) // 4).tolist()
    there = paired_bootstrap(first, second, clusters=clusters, resamples=2000)
    back = paired_bootstrap(second, first, clusters=clusters, resamples=2000)
    assert (there.clusters, there.seeds, back.seeds) == (10, (2, 3), (3, 2))
    assert there.difference == pytest.approx(-back.difference)
    assert there.low == pytest.approx(-back.high, abs=0.5)
    alone = paired_bootstrap(first[0], second[0], clusters=clusters, resamples=2000)
    same = paired_bootstrap(first[[0, 0]], second[[0]], clusters=clusters, resamples=2000)
    assert same.standard_error == pytest.approx(alone.standard_error, rel=1e-6)
    assert same.low == pytest.approx(alone.low, rel=0.05)
    with pytest.raises(InputError, match="cannot be paired"):
        paired_bootstrap(first, second[:, :39])
    with pytest.raises(InputError, match="NaN"):
        paired_bootstrap(first, np.where(second == second[2, 0], np.nan, second))
