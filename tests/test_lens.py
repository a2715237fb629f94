"""The lens: its sums against plain ones, and what it says of hidden states."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import warm_pool

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.analysis import lens as sums
from bertvision.pipelines.analysis.lens import LensResult, LensSums, _rare, lens_sums
from bertvision.pipelines.analysis.lens import lens_of_array as lens

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
    for found, expected in zip(one, other, strict=True):
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


SPECIAL = {0, 1}


def states(n: int = 200, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, LAYERS, 6)).astype(np.float32)
    words = np.minimum(random.geometric(0.2, n), WORDS - 1)  # some are frequent
    words[::4] = Head().logits(x)[::4, 0].argmax(axis=1)
    words[::9] = random.integers(0, 2, len(words[::9]))  # special
    return x, words


def run(x: np.ndarray, words: np.ndarray, *, rows: int = 70, **options: Any) -> LensResult:
    array = da.from_array(x, chunks=(rows, *x.shape[1:]))
    return lens(array, words, Head(), special=SPECIAL, **{"tile": 8, **options})


def test_the_numbers_are_those_of_their_definitions_without_special_tokens() -> None:
    x, words = states()
    kept = ~np.isin(words, list(SPECIAL))
    counts = np.bincount(words[kept], minlength=WORDS)
    expected = naive(x[kept], words[kept], _rare(counts), Head())
    found = run(x, words)
    assert found.n_tokens == found.n_available == kept.sum() < len(words)
    assert 0 < found.n_rare == expected.n_rare < found.n_tokens / 2
    np.testing.assert_allclose(found.top1, expected.top1 / expected.n)
    np.testing.assert_allclose(found.top1_rare, expected.top1_rare / expected.n_rare)
    np.testing.assert_allclose(found.mrr, expected.reciprocal_rank / expected.n, rtol=1e-6)
    np.testing.assert_allclose(found.log_p, expected.log_p / expected.n, rtol=1e-5)
    np.testing.assert_allclose(found.kl, expected.kl / expected.n, rtol=1e-5, atol=1e-6)
    shares = counts[counts > 0] / counts.sum()
    assert found.majority == shares.max()
    assert found.unigram_log_p == pytest.approx((shares * np.log(shares)).sum())


def test_rare_words_are_those_beside_the_most_frequent_that_make_up_half() -> None:
    assert _rare(np.array([3, 5, 0, 2])).tolist() == [True, False, True, True]
    assert _rare(np.array([4, 5, 0, 2])).tolist() == [False, False, True, True]
    assert _rare(np.array([0, 7])).tolist() == [True, False]


def test_blocks_tiles_and_the_order_of_tokens_do_not_matter() -> None:
    x, words = states()
    one = run(x, words)
    order = np.random.default_rng(5).permutation(len(x))
    for other in (run(x, words, rows=200, tile=100), run(x[order], words[order], rows=33)):
        np.testing.assert_array_equal(other.top1, one.top1)
        for name in ("top1_rare", "mrr", "log_p", "kl"):
            np.testing.assert_allclose(
                getattr(other, name), getattr(one, name), rtol=1e-6, atol=1e-7
            )


def test_processes_and_threads_agree_to_the_last_bit() -> None:
    x, words = states()
    sampled = ({}, {"max_tokens": 50})
    threads = [run(x, words, **options).to_json() for options in sampled]
    with warm_pool():
        found = [run(x, words, scheduler="processes", **options).to_json() for options in sampled]
    assert found == threads


def test_a_sample_is_seeded_and_of_tokens_that_are_not_special() -> None:
    x, words = states()
    one, same, other = (run(x, words, max_tokens=60, seed=seed) for seed in (0, 0, 1))
    assert one.n_tokens == 60 < one.n_available
    assert one.to_json() == same.to_json()
    assert (one.log_p != other.log_p).all()
    assert one.majority == other.majority  # of all that there are


def test_a_vocabulary_without_rare_words_has_no_share_of_them() -> None:
    x, words = states()
    found = run(x, np.full_like(words, 7))
    assert np.isnan(found.top1_rare).all()
    assert found.to_json()["top1_rare"] == [None] * LAYERS
    assert "–" in found.table()
    assert found.majority == 1


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (np.full(200, 99), {}, "up to index 99 for 200 tokens and a head over 37 words"),
        (np.full(100, 5), {}, "100 words .* for 200 tokens"),
        (np.zeros(200, int), {}, "special tokens alone"),
        (np.full(200, 5), {"tile": 0}, "tile is 0"),
        (np.full(200, 5), {"max_tokens": 0}, "max_tokens 0"),
    ],
)
def test_what_cannot_be_read_is_refused(
    words: np.ndarray, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(states()[0], words, **options)


@pytest.mark.parametrize("tile", [1, 8, WORDS, 4096])
def test_the_best_word_is_that_of_all_logits_at_once(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "TOKENS", 16)  # several blocks of tokens
    states, _, _ = tokens()
    head = Head()
    head.offset[:, 5] = head.offset[:, 20] = 100  # two words with the same logits, in most tiles
    head.weight[5] = head.weight[20]
    words, log_p = sums.best_words(states, head, tile)
    logits = head.logits(states)
    assert (words == 5).all()  # the first of them
    expected = logits.max(axis=2) - np.log(np.exp(logits - logits.max()).sum(axis=2)) - logits.max()
    assert log_p == pytest.approx(expected, abs=1e-4)
    words, log_p = sums.best_words(states, Head(), tile)
    logits = Head().logits(states)
    assert (words == logits.argmax(axis=2)).all()
    assert log_p == pytest.approx(logits.max(axis=2) - np.log(np.exp(logits).sum(axis=2)), abs=1e-4)
