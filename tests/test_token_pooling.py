"""Poolings: first, last, mean and maximum of each window's tokens, in torch and in NumPy alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bertvision.errors import UnknownNameError
from bertvision.pipelines.poolings import (
    POOLINGS,
    SpecialEnds,
    TokenPooling,
    pool,
    pool_numpy,
)

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
FLOATS = st.floats(-1e4, 1e4, width=32)


def one_by_one(
    states: np.ndarray, lengths: list[int], pooling: TokenPooling, special: SpecialEnds
) -> np.ndarray:
    """By its definition, a window at a time."""
    first = np.cumsum(lengths) - lengths
    windows = [states[f : f + n].astype(np.float64) for f, n in zip(first, lengths, strict=True)]

    def inside(x: np.ndarray) -> np.ndarray:
        """Tokens between special ones; where there are none the one at the beginning."""
        tokens = x[special[0] : len(x) - special[1]]
        return tokens if len(tokens) else x[:1]

    of = {
        "cls": lambda x: x[0],
        "sep": lambda x: x[-1],
        "mean": lambda x: x.mean(axis=0),
        "max": lambda x: x.max(axis=0),
        "first": lambda x: inside(x)[0],
        "last": lambda x: inside(x)[-1],
    }[pooling]
    return np.stack([of(x) for x in windows]).astype(np.float32)


@given(st.data(), LENGTHS, st.sampled_from(POOLINGS), st.tuples(st.booleans(), st.booleans()))
def test_poolings_are_what_their_names_say(
    data: st.DataObject, lengths: list[int], pooling: TokenPooling, special: SpecialEnds
) -> None:
    states = data.draw(arrays.arrays(np.float32, (sum(lengths), 2, 3), elements=FLOATS))
    expected = one_by_one(states, lengths, pooling, special)
    n = np.array(lengths, np.int32)
    of_numpy = pool_numpy(states, n, pooling, special)
    of_torch = pool(torch.from_numpy(states), n, pooling, special).numpy()
    assert of_numpy.dtype == of_torch.dtype == np.float32
    np.testing.assert_allclose(of_numpy, expected, rtol=1e-6)
    np.testing.assert_allclose(of_torch, of_numpy, rtol=2e-7)  # two ways to sum in float64


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_window_is_pooled_from_its_own_tokens_alone(pooling: TokenPooling) -> None:
    states = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    lengths = np.array([3, 1, 8])
    together = pool(states, lengths, pooling)
    for i, part in enumerate(states.split(lengths.tolist())):
        assert torch.equal(pool(part, lengths[i : i + 1], pooling)[0], together[i])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_window_of_one_token_is_that_token(pooling: TokenPooling) -> None:
    states = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    ones = np.ones(5, np.int64)
    assert np.array_equal(pool_numpy(states, ones, pooling), states)
    assert np.array_equal(pool(torch.from_numpy(states), ones, pooling).numpy(), states)


def test_a_long_mean_loses_nothing_to_the_sum() -> None:
    """A sum in float32 would stop at 2²⁴, and the mean with it."""
    states = torch.full((400, 1), 16_777_217.0) / 3
    assert pool(states, np.array([400]), "mean").item() == states[0].item()
    assert pool_numpy(states.numpy(), np.array([400]), "mean").item() == states[0].item()


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_what_is_not_a_number_shows_in_its_own_window_and_channel(pooling: TokenPooling) -> None:
    states = np.ones((6, 2), np.float32)
    states[4, 1] = np.nan
    for pooled in (
        pool_numpy(states, np.array([3, 3]), pooling),
        pool(torch.from_numpy(states), np.array([3, 3]), pooling).numpy(),
    ):
        assert np.isnan(pooled).tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_windows_have_no_vectors(pooling: TokenPooling) -> None:
    empty = pool_numpy(np.zeros((0, 3, 4), np.float32), np.zeros(0, np.int32), pooling)
    assert empty.shape == (0, 3, 4)


@pytest.mark.parametrize("name", ["median", "all"])
def test_an_unknown_pooling_is_refused_by_name(name: Any) -> None:
    states = np.zeros((3, 2), np.float32)
    with pytest.raises(UnknownNameError, match=f"no pooling '{name}': there are cls, sep, mean"):
        pool(torch.from_numpy(states), np.array([1, 2]), name)
    with pytest.raises(UnknownNameError, match=f"no pooling '{name}': there are cls, sep, mean"):
        pool_numpy(states, np.array([1, 2]), name)
