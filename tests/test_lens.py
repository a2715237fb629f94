"""The lens: of a checkpoint's own head its own answers, in any blocks and on any scheduler."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
from processes import warm_pool
from test_lens_sums import LAYERS, WORDS, Head, naive

from bertvision.errors import InputError
from bertvision.pipelines.analysis.lens import LensResult, _rare
from bertvision.pipelines.analysis.lens import lens_of_array as lens

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
