"""ShardPlan: every token has one place, and a shard never splits an example."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.featurestore.format import plan as plans
from bertvision.featurestore.format.plan import ShardPlan

lengths = st.lists(st.integers(1, 32), min_size=1, max_size=60)
seeds = st.one_of(st.none(), st.integers(0, 2**31))


@given(lengths, seeds, st.integers(32, 100))
def test_examples_lie_whole_and_disjoint_in_shards_in_order(
    n: list[int], seed: int | None, capacity: int
) -> None:
    plan = ShardPlan.make(n, shard_tokens=capacity, seed=seed)
    assert sorted(plan.example_id.tolist()) == list(range(len(n)))
    assert [n[i] for i in plan.example_id] == plan.n_tokens.tolist()
    ends = plan.first_token + plan.n_tokens
    assert (plan.first_token // capacity == plan.shard).all()
    assert ((ends - 1) // capacity == plan.shard).all()
    assert (plan.first_token[1:] >= ends[:-1]).all()
    assert [i for s in range(plan.n_shards) for i in plan.examples_of(s)] == list(range(len(n)))
    assert sum(plan.tokens_of(s) for s in range(plan.n_shards)) == plan.total_tokens == sum(n)


@given(lengths, seeds, st.integers(32, 100))
def test_no_example_would_have_fitted_the_shard_before(
    n: list[int], seed: int | None, capacity: int
) -> None:
    plan = ShardPlan.make(n, shard_tokens=capacity, seed=seed)
    for shard in range(1, plan.n_shards):
        first = plan.n_tokens[plan.examples_of(shard)[0]]
        assert plan.tokens_of(shard - 1) + first > capacity


@given(lengths, seeds)
def test_per_token_values_follow_their_example(n: list[int], seed: int | None) -> None:
    plan = ShardPlan.make(n, shard_tokens=32, seed=seed)
    values = np.arange(1, sum(n) + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_PLACED_AT_ONCE", 3)  # blocks end within what is drawn
        placed = plan.place(values, 0)
    parts = np.split(values, np.cumsum(n)[:-1])
    for i, example in enumerate(plan.example_id):
        start = plan.first_token[i]
        assert placed[start : start + plan.n_tokens[i]].tolist() == parts[example].tolist()
    assert np.count_nonzero(placed) == sum(n)


@given(lengths, st.integers(0, 2**31))
def test_a_plan_is_a_function_of_its_arguments(n: list[int], seed: int) -> None:
    one, two = (ShardPlan.make(n, shard_tokens=40, seed=seed) for _ in range(2))
    assert one.digest == two.digest
    longer = ShardPlan.make([*n, 1], shard_tokens=40, seed=seed)
    assert longer.digest != one.digest


@pytest.mark.parametrize(
    ("n", "message"),
    [([], "empty"), ([3, 0], "example 1 has 0"), ([3, 65], "example 1 has 65 tokens.*1 to 64")],
)
def test_lengths_that_do_not_fit_are_refused(n: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ShardPlan.make(n, shard_tokens=64)


def test_a_shard_outside_the_plan_is_refused() -> None:
    with pytest.raises(InputError, match="no shard 5: the plan has 1"):
        ShardPlan.make([3]).examples_of(5)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=200),
    st.sampled_from([40, 64, 200, 5000]),
    st.sampled_from([None, 3]),
)
def test_a_fitted_plan_has_no_more_shards_and_none_larger(
    lengths: list[int], shard_tokens: int, seed: int | None
) -> None:
    plain = ShardPlan.make(lengths, shard_tokens=shard_tokens, seed=seed)
    fitted = ShardPlan.fitted(lengths, shard_tokens=shard_tokens, seed=seed)
    fitted.check()
    assert fitted.n_shards <= plain.n_shards
    assert fitted.shard_tokens <= shard_tokens
    assert sorted(fitted.example_id.tolist()) == list(range(len(lengths)))
    assert fitted.n_tokens.tolist() == [lengths[i] for i in fitted.example_id]
    if plain.n_shards == 1:
        assert fitted.fill == 0
    elif seed is None:
        # with one token less the same order would take another shard
        try:
            less = ShardPlan.make(lengths, shard_tokens=fitted.shard_tokens - 1)
        except InputError:
            return  # the longest example fills a shard
        assert less.n_shards > plain.n_shards
