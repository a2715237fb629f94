"""The lens's sums: against a softmax over the whole vocabulary, whatever the tiles and blocks."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import NonFiniteError
from bertvision.pipelines.analysis import lens as sums
from bertvision.pipelines.analysis.lens import LensSums, lens_sums

LAYERS, HIDDEN, WIDTH, WORDS = 3, 6, 5, 37


class Head:
    """A decoder with a matrix and a bias for each layer."""

    def __init__(self, seed: int = 0, words: int = WORDS, layers: int = LAYERS) -> None:
        random = np.random.default_rng(seed)
        self.weight = random.normal(size=(words, WIDTH)).astype(np.float32)
        self.matrix = random.normal(size=(layers, WIDTH, HIDDEN)).astype(np.float32)
        self.offset = random.normal(size=(layers, words)).astype(np.float32)

    def features(self, place: int, states: np.ndarray) -> np.ndarray:
        return states @ self.matrix[place].T

    def bias(self, place: int) -> np.ndarray:
        return self.offset[place]

    def logits(self, states: np.ndarray) -> np.ndarray:
        """(tokens, layers, words) in float64."""
        x = np.einsum("tlh,lwh->tlw", states.astype(np.float64), self.matrix)
        return x @ self.weight.T.astype(np.float64) + self.offset


def tokens(n: int = 50, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States, words of which some are to be left out, and which words are rare."""
    random = np.random.default_rng(seed)
    states = random.normal(size=(n, LAYERS, HIDDEN)).astype(np.float32)
    words = random.integers(-9, WORDS, n).clip(-1)
    words[::3] = Head().logits(states)[::3, 0].argmax(axis=1)  # layer 0 knows these
    return states, words, random.random(WORDS) < 0.5


def naive(states: np.ndarray, words: np.ndarray, rare: np.ndarray, head: Head) -> LensSums:
    """By the definitions, with all logits at once."""
    logits = head.logits(states)[words >= 0]
    words = words[words >= 0]
    log_p = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    own = np.take_along_axis(log_p, words[:, None, None], axis=2)
    rank = (log_p >= own).sum(axis=2)
    last = log_p[:, -1:]
    return LensSums(
        len(words),
        int(rare[words].sum()),
        (rank == 1).sum(axis=0),
        (rank == 1)[rare[words]].sum(axis=0),
        (1 / rank).sum(axis=0),
        own[:, :, 0].sum(axis=0),
        (np.exp(last) * (last - log_p)).sum(axis=(0, 2)),
    )


def agree(one: LensSums, other: LensSums) -> None:
    for found, expected in zip(astuple(one), astuple(other), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("tile", [1, 5, 36, 37, 100])
def test_any_tile_gives_what_a_whole_softmax_gives(tile: int) -> None:
    found = lens_sums(*tokens(), Head(), tile)
    agree(found, naive(*tokens(), Head()))
    assert found.n < 50
    assert 0 < found.n_rare < found.n
    assert found.top1[0] > found.top1_rare[0] > 1
    assert found.kl[-1] == 0  # of the last layer with itself
    assert (found.kl[:-1] > 1).all()


@given(st.permutations(range(50)), st.integers(1, 49))
def test_neither_the_order_nor_the_blocks_of_tokens_matter(order: list[int], cut: int) -> None:
    states, words, rare = tokens()
    states, words = states[order], words[order]
    parts = [
        lens_sums(states[s], words[s], rare, Head(), 8) for s in (slice(cut), slice(cut, None))
    ]
    agree(parts[0].merge(parts[1]), lens_sums(*tokens(), Head(), 8))


def test_tokens_are_gone_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lens_sums(*tokens(), Head(), 8)
    monkeypatch.setattr(sums, "TOKENS", 7)
    agree(lens_sums(*tokens(), Head(), 8), whole)


@given(st.floats(-60, 60), st.integers(0, 3))
def test_logits_far_from_zero_neither_overflow_nor_vanish(shift: float, seed: int) -> None:
    states, words, rare = tokens(seed=seed)
    head, moved = Head(), Head()
    moved.offset = head.offset + np.float32(shift)  # a softmax does not see it
    found, expected = (lens_sums(states, words, rare, h, 8) for h in (moved, head))
    np.testing.assert_allclose(found.log_p, expected.log_p, rtol=1e-5)
    np.testing.assert_allclose(found.kl, expected.kl, rtol=1e-4, atol=1e-3)
    far = Head()
    far.weight = far.weight * np.float32(100)  # exp of a thousand is infinite
    agree_far = lens_sums(states, words, rare, far, 8)
    reference = far.logits(states)[words >= 0]
    reference -= np.logaddexp.reduce(reference, axis=2, keepdims=True)
    own = np.take_along_axis(reference, words[words >= 0][:, None, None], axis=2)
    np.testing.assert_allclose(agree_far.log_p, own[:, :, 0].sum(axis=0), rtol=1e-5)


def test_a_head_that_says_nothing_is_uniform_and_first_with_no_word() -> None:
    states, words, rare = tokens()
    head = Head()
    head.weight, head.offset = head.weight * 0, head.offset * 0
    found = lens_sums(states, words, rare, head, 8)
    np.testing.assert_allclose(found.log_p / found.n, -np.log(WORDS), rtol=1e-6)
    np.testing.assert_allclose(found.reciprocal_rank / found.n, 1 / WORDS, rtol=1e-12)
    assert not found.top1.any()  # all words are equal: none is the largest
    assert not found.kl.any()


def test_a_head_that_knows_each_word_is_always_right() -> None:
    words = np.arange(WIDTH).repeat(4)
    states = np.zeros((len(words), LAYERS, HIDDEN), np.float32)
    states[np.arange(len(words)), 1, words] = 50  # layer 1 alone knows
    head = Head(words=WIDTH)
    head.weight = np.eye(WIDTH, dtype=np.float32)
    head.matrix = np.repeat(np.eye(WIDTH, HIDDEN, dtype=np.float32)[None], LAYERS, axis=0)
    head.offset = np.zeros((LAYERS, WIDTH), np.float32)
    found = lens_sums(states, words, np.ones(WIDTH, bool), head, 2)
    assert found.top1.tolist() == found.top1_rare.tolist() == [0, 20, 0]
    assert found.reciprocal_rank[1] == 20
    np.testing.assert_allclose(found.log_p, [20 * np.log(1 / WIDTH), 0, 20 * np.log(1 / WIDTH)])
    # the last layer is uniform: KL = −log 5 − mean log q = 4/5 · 50 − log 5
    np.testing.assert_allclose(found.kl / 20, [0, 40 - np.log(WIDTH), 0], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_no_number_is_refused_with_its_layer(value: float) -> None:
    states, words, rare = tokens()
    states[np.flatnonzero(words >= 0)[3], 1, 2] = value
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError, match="layer at place 1"):
        lens_sums(states, words, rare, Head(), 8)
