"""Order: every example exactly once per epoch, whatever the shards, ranks, batches and buffer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.sampler import EpochOrder, Sampler, SequentialSampler, ShuffleSampler
from bertvision.featurestore.sampler import epoch_order as order_of

shards = st.lists(st.integers(1, 9), min_size=1, max_size=30).map(
    lambda sizes: np.repeat(np.arange(len(sizes)), sizes)
)
options = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 20),
        "world_size": st.integers(1, 5),
        "buffer": st.integers(1, 40),
        "seed": st.integers(0, 2**32),
        "epoch": st.integers(0, 1000),
        "shuffle": st.booleans(),
    }
)


def plan_of(shard: np.ndarray) -> ShardPlan:
    """A plan of examples of one token, so many in each shard."""
    n, capacity = len(shard), 64
    first = np.searchsorted(shard, shard)
    return ShardPlan(
        example_id=np.arange(n),
        n_tokens=np.ones(n, np.int32),
        first_token=shard * capacity + np.arange(n) - first,
        shard=shard.astype(np.int32),
        shard_tokens=capacity,
        seed=None,
    )


def epoch_order(
    shard: np.ndarray, *, seed: int, buffer: int = 8, shuffle: bool = True, **rest: Any
) -> EpochOrder:
    sampler = ShuffleSampler(seed, buffer) if shuffle else SequentialSampler()
    return order_of(plan_of(shard), sampler, **rest)


@given(shards, options)
@settings(max_examples=300)
def test_every_example_comes_over_all_ranks_in_equally_many_batches(
    shard: np.ndarray, o: dict
) -> None:
    orders = [epoch_order(shard, rank=r, **o) for r in range(o["world_size"])]
    batches = [order.batch(i) for order in orders for i in range(len(order))]
    assert all(0 < len(batch) <= o["batch_size"] for batch in batches)
    # a rank that lacks one more batch than it has examples draws one of them a second time
    assert len({len(order) for order in orders}) == 1
    drawn = np.concatenate(batches)
    assert sorted(set(drawn.tolist())) == list(range(len(shard)))
    short = o["batch_size"] == 1 or len(shard) < o["world_size"]
    ranks = -len(shard) % o["world_size"]  # that have an example less than others
    assert len(drawn) - len(shard) == (ranks if short else 0)
    sizes = [len(order.examples) for order in orders]
    assert max(sizes) - min(sizes) <= 1


@given(shards, options)
def test_the_buffer_bounds_the_shards_in_memory(shard: np.ndarray, o: dict) -> None:
    order = epoch_order(shard, rank=0, **o)
    if not len(order):
        return
    span = max(len(set(shard[order.batch(i)].tolist())) for i in range(len(order)))
    for i in range(len(order)):
        resident = ((order.first_batch <= i) & (i <= order.last_batch)).sum()
        # those the buffer mixes, and those that the batch itself runs through
        assert resident <= o["buffer"] + span
    assert (np.diff(order.first_batch) >= 0).all()


@given(shards, options)
def test_the_order_is_a_pure_function(shard: np.ndarray, o: dict) -> None:
    one, two = (epoch_order(shard, rank=0, **o) for _ in range(2))
    assert one.examples.tolist() == two.examples.tolist()


def test_epochs_and_seeds_differ_and_unshuffled_is_stored_order() -> None:
    shard = np.repeat(np.arange(40), 10)
    orders = [
        epoch_order(shard, batch_size=8, seed=s, epoch=e).examples.tolist()
        for s, e in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(o) for o in orders}) == 3
    plain = epoch_order(shard, batch_size=8, seed=0, epoch=0, shuffle=False)
    assert plain.examples.tolist() == list(range(400))


def test_a_batch_mixes_as_many_shards_as_the_buffer_holds() -> None:
    shard = np.repeat(np.arange(100), 24)
    order = epoch_order(shard, batch_size=16, seed=0, epoch=0, buffer=8)
    mixed = [len(set(shard[order.batch(i)].tolist())) for i in range(20, len(order) - 20)]
    assert np.mean(mixed) > 6  # 8 · (1 − (7/8)^16) = 7.06 for uniform draws from 8 shards


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"buffer": 0}, "buffer is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_arguments_are_named(bad: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        epoch_order(np.zeros(3, int), **{"batch_size": 1, "seed": 0, "epoch": 0, **bad})


def test_the_default_order_is_the_one_of_earlier_versions() -> None:
    # so that a training that was interrupted goes on as it began
    order = epoch_order(
        np.repeat(np.arange(4), 5), batch_size=4, seed=3, epoch=2, rank=1, world_size=2, buffer=2
    )
    assert order.examples.tolist() == [11, 14, 13, 5, 10, 12, 6, 8, 9, 7]


@dataclass
class Fixed(Sampler):
    """An order that was written down."""

    order: Any

    def sequence(self, plan: ShardPlan, epoch: int, world_size: int) -> npt.ArrayLike:
        return self.order


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 2, 2], r"Fixed\(order=\[0, 1, 2, 2\]\) in epoch 5 names example 2 2 times.*2 of 4"),
        ([0, 1, 3], "names example 2 0 times.*1 of 4.*exactly_once = False"),
        ([0, 1, 2, 4], "names example 4: the split has those from 0 to 3"),
        ([0, 1, 2, -1], "names example -1"),
        ([0.0, 1.0, 2.0, 3.0], "float64 of shape"),
        ([[0, 1], [2, 3]], r"shape \(2, 2\)"),
        ([], "shape"),
    ],
)
def test_a_sequence_that_is_no_order_of_the_examples_is_refused(order: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        order_of(plan_of(np.array([0, 0, 1, 1])), Fixed(order), epoch=5, batch_size=2)


def test_ranks_share_any_order_and_one_that_samples_may_repeat() -> None:
    plan = plan_of(np.repeat(np.arange(5), 5))
    backwards = list(range(24, -1, -1))
    ranks = [
        order_of(plan, Fixed(backwards), epoch=0, batch_size=4, rank=r, world_size=3)
        for r in range(3)
    ]
    assert [i for order in ranks for i in order.examples.tolist()] == backwards
    assert {len(order) for order in ranks} == {3}
    assert len({order.digest for order in ranks}) == 1
    sampler = Fixed([7, 7, 0])
    sampler.exactly_once = False
    drawn = order_of(plan, sampler, epoch=0, batch_size=2)
    assert [drawn.batch(i).tolist() for i in range(len(drawn))] == [[7, 7], [0]]
    assert drawn.shards.tolist() == [1, 0]
    sampler.order = [7, 25]
    with pytest.raises(InputError, match="names example 25"):
        order_of(plan, sampler, epoch=0, batch_size=2)


def test_samplers_are_named_with_what_their_order_depends_on() -> None:
    """A stream is resumed where the names are equal: so a difference anywhere in them is seen."""

    class Own(Sampler):
        def __init__(self, weights: Any) -> None:
            self.weights = weights

        def sequence(self, plan: ShardPlan, epoch: int, world_size: int) -> npt.ArrayLike:
            return [0]

    assert repr(ShuffleSampler(3, 2)) == "ShuffleSampler(seed=3, buffer=2)"
    assert repr(SequentialSampler()) == "SequentialSampler()"

    @dataclass(frozen=True)
    class Declared(Own):
        weights: Any

    for made, kind in itertools.product((Own, Declared), (list, np.asarray)):
        weights = [0.5] * 5000
        same, shown = (made(kind(weights)).identity for _ in range(2))
        weights[2500] = 0.25
        assert same == shown != made(kind(weights)).identity
        assert len(shown) < 100
