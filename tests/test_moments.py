"""Streamed moments: any cut into blocks gives what the whole gives, and bad input is named."""

from __future__ import annotations

import pickle
from functools import reduce
from typing import Any

import dask.array as da
import numpy as np
import pytest
from dask.delayed import delayed
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.pipelines.analysis import moments as moments_module
from bertvision.pipelines.analysis.moments import ChannelMoments, Moments
from bertvision.pipelines.analysis.reduce import aligned_blocks, sampled_blocks, tree_reduce
from bertvision.pipelines.scheduler import compute, use_scheduler

N, LAYERS, HIDDEN = 60, 2, 5
cuts = st.lists(st.integers(0, N), max_size=6).map(sorted)


def states(seed: int = 0, offset: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((N, LAYERS, HIDDEN)) + offset).astype(np.float32)


def folded(blocks: list[np.ndarray], *, covariance: bool = True) -> Moments:
    parts = []
    for block in blocks:
        parts.append(Moments.empty(LAYERS, HIDDEN, covariance=covariance))
        parts[-1].add(block)
    while len(parts) > 1:
        parts = [parts[0].merge(parts[1]), *parts[2:]]
    return parts[0]


def assert_same(one: Any, other: Any, rtol: float = 1e-12) -> None:
    a, b = one.state(), other.state()
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_allclose(value, b[name], rtol=rtol, atol=1e-11, err_msg=name)


def test_moments_equal_numpy_on_the_whole_split() -> None:
    x = states()
    m = folded(np.split(x, [7, 30]))
    x64 = x.astype(np.float64)
    assert m.n == N
    np.testing.assert_allclose(m.mean, x64.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(m.variance(), x64.var(axis=0), rtol=1e-12)
    for layer in range(LAYERS):
        expected = np.cov(x64[:, layer].T, bias=True)
        np.testing.assert_allclose(m.covariance()[layer], expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(m.sum_norm, np.linalg.norm(x64, axis=2).sum(axis=0), rtol=1e-13)


@given(cuts)
def test_any_cut_into_blocks_gives_the_same_moments(cut: list[int]) -> None:
    assert_same(folded(np.split(states(), cut)), folded([states()]))


@given(cuts)
def test_channel_moments_of_any_blocks_are_those_of_the_whole(cut: list[int]) -> None:
    parts = [ChannelMoments.of(block) for block in np.split(states(), cut)]
    whole = folded([states()])
    merged = reduce(ChannelMoments.merge, parts)
    assert merged.n == N
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-13)
    np.testing.assert_allclose(merged.variance(), whole.variance(), rtol=1e-12)


@given(st.integers(0, N), st.integers(0, N))
def test_merging_is_associative_and_leaves_its_operands_alone(i: int, j: int) -> None:
    a, b, c = (folded([block]) for block in np.split(states(), sorted((i, j))))
    before = [m.state() for m in (a, b, c)]
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))
    for state, m in zip(before, (a, b, c), strict=True):
        for name, value in m.state().items():
            np.testing.assert_array_equal(state[name], value)


def test_slabs_change_nothing_but_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = folded([states()])
    monkeypatch.setattr(moments_module, "SLAB_BYTES", 7 * LAYERS * HIDDEN * 8)
    assert_same(folded([states()]), whole)


def test_a_mean_far_from_zero_costs_no_precision() -> None:
    # Σx² − n·mean² would lose all digits of the variance here
    x = np.random.default_rng(1).standard_normal((N, LAYERS, HIDDEN))
    shifted = folded(np.split(x + 1e8, [11, 12, 40]))
    np.testing.assert_allclose(shifted.variance(), x.var(axis=0), rtol=1e-6)


def test_adding_does_not_change_the_block() -> None:
    x = states().astype(np.float64)
    before = x.copy()
    folded([x])
    ChannelMoments.of(x)
    np.testing.assert_array_equal(x, before)


def test_tokens_of_norm_zero_have_no_direction_and_enter_no_pair() -> None:
    x = states()
    with_zeros = np.concatenate([x, np.zeros((9, LAYERS, HIDDEN), np.float32)])
    np.testing.assert_allclose(
        folded([with_zeros]).cosine_by_channel(), folded([x]).cosine_by_channel(), rtol=1e-13
    )


def test_covariance_that_was_not_kept_is_refused() -> None:
    with pytest.raises(TypeError, match="covariance=True"):
        folded([states()], covariance=False).covariance()


@pytest.mark.parametrize("kind", ["moments", "moments without covariance", "channels"])
def test_state_restores_exactly_and_everything_pickles(kind: str) -> None:
    if kind == "channels":
        m: Any = ChannelMoments.of(states(1))
    else:
        m = folded([states()], covariance=kind == "moments")
    for again in (type(m).from_state(m.state()), pickle.loads(pickle.dumps(m))):
        assert type(again.n) is int
        for name, value in m.state().items():
            np.testing.assert_array_equal(again.state()[name], value)


@given(st.integers(1, 40))
@settings(deadline=None, max_examples=20)
def test_tree_reduce_meets_every_block_once_in_order(n: int) -> None:
    blocks = [(delayed(i),) for i in range(n)]
    result = tree_reduce(blocks, _as_list, _joined)
    with use_scheduler("threads"):
        assert compute(result) == list(range(n))


def test_blocks_follow_the_first_array_where_chunks_differ() -> None:
    x, y = states(1), states(2)
    arrays = (da.from_array(x, chunks=(25, 1, 2)), da.from_array(y, chunks=(13, 2, 5)))
    with use_scheduler("threads"):
        blocks = [compute(delayed(tuple)(list(pair))) for pair in aligned_blocks(arrays)]
    assert [len(a) for a, _ in blocks] == [25, 25, 10]
    np.testing.assert_array_equal(np.concatenate([a for a, _ in blocks]), x)
    np.testing.assert_array_equal(np.concatenate([b for _, b in blocks]), y)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any), st.integers(1, 40))
@settings(deadline=None, max_examples=20)
def test_large_blocks_are_cut_into_even_parts_in_order(held: list[int], size: int) -> None:
    x = np.arange(sum(held), dtype=np.float32).reshape(-1, 1, 1)
    array = da.from_array(x, (tuple(held), 1, 1))
    with use_scheduler("threads"):
        blocks = [compute(block) for (block,) in aligned_blocks((array,), size)]
    np.testing.assert_array_equal(np.concatenate(blocks), x)
    assert len(blocks) == sum(max(1, -(-n // size)) for n in held)
    assert max(map(len, blocks)) <= size


def test_the_sample_takes_the_same_distinct_tokens_of_each_array_for_any_chunks() -> None:
    x = np.arange(N, dtype=np.float32).reshape(N, 1, 1)
    drawn = []
    for chunks in ((60,), (1, 20, 0, 39), (30, 30)):
        arrays = (da.from_array(x, (chunks, 1, 1)), da.from_array(-x, (chunks, 1, 1)))
        with use_scheduler("threads"):
            blocks = sampled_blocks(arrays, 17, seed=5)
            pairs = [compute(delayed(tuple)(list(pair))) for pair in blocks]
        a, b = (np.concatenate(side).ravel() for side in zip(*pairs, strict=True))
        np.testing.assert_array_equal(a, -b)
        drawn.append(a)
    assert len(np.unique(drawn[0])) == 17
    for other in drawn[1:]:
        np.testing.assert_array_equal(other, drawn[0])
    assert (np.diff(drawn[0]) > 0).all()


def test_a_sample_is_read_once_however_often_it_is_used() -> None:
    reads = []
    x = da.from_array(states(), chunks=(20, LAYERS, HIDDEN))
    counted = x.map_blocks(lambda b: reads.append(len(b)) or b, dtype=x.dtype, meta=x._meta)
    with use_scheduler("threads"):
        blocks = sampled_blocks((counted,), 10, seed=0)
        for _ in range(3):
            compute(tree_reduce(blocks, len, int.__add__))
    assert reads == [20, 20, 20]


@pytest.mark.parametrize(
    ("shapes", "max_tokens", "message"),
    [
        ([(8, 2, 3), (9, 2, 3)], None, r"different numbers of tokens \(\[8, 9\]\)"),
        ([(8, 6)], None, r"shape \(8, 6\)"),
        ([(0, 2, 3)], None, r"shape \(0, 2, 3\)"),
        ([(8, 2, 3)], 1, "max_tokens is 1; give at least 2"),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    shapes: list[tuple[int, ...]], max_tokens: int | None, message: str
) -> None:
    arrays = [da.zeros(shape) for shape in shapes]
    with pytest.raises(InputError, match=message):
        sampled_blocks(arrays, max_tokens, seed=0)


def _as_list(value: int) -> list[int]:
    return [value]


def _joined(one: list[int], other: list[int]) -> list[int]:
    return one + other
