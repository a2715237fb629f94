"""Order: every example exactly once per epoch, whatever the shards, ranks, batches and buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.featurestore.order import epoch_order

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


@given(shards, options)
@settings(max_examples=300)
def test_every_example_comes_exactly_once_over_all_ranks(shard: np.ndarray, o: dict) -> None:
    orders = [epoch_order(shard, rank=r, **o) for r in range(o["world_size"])]
    drawn = np.concatenate([order.batch(i) for order in orders for i in range(len(order))])
    assert sorted(drawn.tolist()) == list(range(len(shard)))
    assert all(
        0 < len(order.batch(i)) <= o["batch_size"] for order in orders for i in range(len(order))
    )
    sizes = [len(order.examples) for order in orders]
    assert max(sizes) - min(sizes) <= 1
    if min(sizes) >= max(len(order) for order in orders):
        assert len({len(order) for order in orders}) == 1


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
    ],
)
def test_bad_arguments_are_named(bad: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        epoch_order(np.zeros(3, int), **{"batch_size": 1, "seed": 0, "epoch": 0, **bad})
