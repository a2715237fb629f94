"""The order of tokens: each once an epoch, bounded, cut into batches. No store is read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.featurestore.tokens.order import TokenCuts, TokenOrder, rank_bounds, token_order

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


def drawn(order: TokenOrder, counts: np.ndarray) -> list[tuple[int, int]]:
    """The tokens of an order, as (shard, kept token of it), drawn group by group."""
    found: list[tuple[int, int]] = []
    for group in range(order.groups):
        tokens = []
        for piece in order.pieces_of(group):
            shard = int(order.shards[piece])
            dealt = order.permutation(piece, int(counts[shard]))[order.part(group, piece)]
            tokens += [(shard, int(token)) for token in dealt]
        assert len(tokens) == order.starts[group + 1] - order.starts[group]
        places = np.arange(len(tokens))[order.mixed(group)]
        found += [tokens[i] for i in places]
    return found


@settings(max_examples=200)
@given(COUNTS, st.integers(1, 15), st.integers(1, 5), st.one_of(st.none(), st.integers(0, 9)))
def test_ranks_draw_every_token_exactly_once(
    counts: list[int], buffer: int, world_size: int, seed: int | None
) -> None:
    held = np.array(counts)
    options = {"epoch": 3, "seed": seed, "buffer": buffer, "world_size": world_size}
    found = []
    for rank in range(world_size):
        low, high = rank_bounds(sum(counts), rank, world_size)
        if low == high:
            continue
        order = token_order(held, rank=rank, **options)
        mine = drawn(order, held)
        assert len(mine) == high - low == order.starts[-1]
        found += mine
    every = [(shard, token) for shard, count in enumerate(counts) for token in range(count)]
    assert sorted(found) == every
    if seed is None:
        assert found == every


@settings(max_examples=100)
@given(COUNTS, st.integers(1, 6), st.integers(0, 3))
def test_no_more_shards_than_the_buffer_are_needed_at_a_time(
    counts: list[int], buffer: int, seed: int
) -> None:
    order = token_order(np.array(counts), epoch=0, seed=seed, buffer=buffer)
    for group in range(order.groups):
        assert len(order.pieces_of(group)) <= buffer
    for one, other in itertools.pairwise(range(order.groups)):
        assert order.pieces_of(other).start == order.pieces_of(one).start + 1


def test_an_order_is_a_function_of_seed_and_epoch() -> None:
    counts = np.full(9, 50)

    def order(epoch: int, seed: int) -> list[tuple[int, int]]:
        return drawn(token_order(counts, epoch=epoch, seed=seed, buffer=3), counts)

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1)
    assert order(0, 1) != order(0, 2)


def test_a_buffer_of_all_shards_is_a_permutation_without_a_trend() -> None:
    """The place of a token in the order is independent of its shard and of its place there."""
    counts = np.full(8, 1000)
    found = drawn(token_order(counts, epoch=0, seed=0, buffer=8), counts)
    place = np.arange(len(found))
    for axis in (0, 1):
        correlation = np.corrcoef(place, [token[axis] for token in found])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(len(found))
    neighbours = np.corrcoef([t[1] for t in found[:-1]], [t[1] for t in found[1:]])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(found))


def test_every_stretch_of_a_bounded_shuffle_has_tokens_of_a_whole_buffer() -> None:
    """At the ends of an epoch too, where a sliding buffer would be half empty."""
    counts = np.full(40, 256)
    found = [shard for shard, _ in drawn(token_order(counts, epoch=0, seed=4, buffer=8), counts)]
    for begin in range(0, len(found), 128):
        assert len(set(found[begin : begin + 128])) >= 7


@settings(max_examples=100)
@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 60))
def test_epochs_are_cut_into_equally_many_batches_on_every_rank(
    tokens: int, world_size: int, batch_size: int
) -> None:
    most = -(-tokens // world_size)
    for rank in range(world_size):
        low, high = rank_bounds(tokens, rank, world_size)
        if low == high:
            continue
        cuts = TokenCuts(high - low, most, batch_size, endless=False)
        sizes = list(cuts.sizes(0))
        assert sum(sizes) == high - low
        assert max(sizes) <= batch_size
        if high - low >= len(cuts):
            assert len(sizes) == len(cuts) == -(-most // batch_size)
        for batch in range(len(sizes)):
            epoch = 2 * len(cuts)
            assert cuts.place(epoch + batch) == (2, sum(sizes[:batch]))
            assert list(cuts.sizes(epoch + batch)) == sizes[batch:]


def test_an_endless_stream_is_cut_across_epochs() -> None:
    cuts = TokenCuts(10, 10, 4, endless=True)
    assert list(itertools.islice(cuts.sizes(7), 5)) == [4] * 5
    assert [cuts.place(batch) for batch in range(6)] == [
        (0, 0),
        (0, 4),
        (0, 8),
        (1, 2),
        (1, 6),
        (2, 0),
    ]


def test_a_rank_without_a_token_is_refused() -> None:
    low, high = rank_bounds(2, 0, 3)
    with pytest.raises(InputError, match="fewer tokens than ranks"):
        TokenCuts(high - low, 1, 4, endless=True)


@settings(max_examples=100)
@given(COUNTS, st.integers(1, 15), st.integers(1, 5))
def test_no_epoch_has_more_pieces_than_are_said_to_be_the_most(
    counts: list[int], buffer: int, world_size: int
) -> None:
    """The memory of a ring is made for so many."""
    held = np.array(counts)
    for rank in range(world_size):
        low, high = rank_bounds(sum(counts), rank, world_size)
        if low == high:
            continue
        most = TokenCuts(high - low, high - low, 4, endless=True).most_pieces(held)
        options = {"seed": 1, "buffer": buffer, "rank": rank, "world_size": world_size}
        assert all(
            len(token_order(held, epoch=epoch, **options).shards) <= most <= np.count_nonzero(held)
            for epoch in range(8)
        )
