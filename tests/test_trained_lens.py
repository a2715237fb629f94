"""The trained lens: it finds the word in the coordinates of its layer, and none in noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import torch
from stores import Made

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.lens import LensResult
from bertvision.pipelines.analysis.lens import lens_of_array as lens
from bertvision.pipelines.readouts.lens import TrainedLens, dropped, train_lens, words_of
from bertvision.pipelines.readouts.options import LensOptions

WORDS, WIDTH, HIDDEN = 12, 8, 16
OPTIONS = LensOptions(steps=40, dropout=0.3, lr=0.2)


@pytest.fixture(scope="module")
def embeddings() -> torch.Tensor:
    return torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def split(embeddings: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    """Layer 0 is noise, layer 1 holds the word turned into other coordinates, layer 2 as it is.

    Word 0 is half of all tokens. Examples are stored in another order than they were made in.
    """
    random = np.random.default_rng(5)
    made = Made([5, 2, 9, 4, 7, 3, 6] * 12, hidden=HIDDEN, seed=0)
    words = random.integers(0, WORDS, made.plan.total_tokens) * random.integers(
        0, 2, made.plan.total_tokens
    )
    turn = np.linalg.qr(random.normal(size=(HIDDEN, HIDDEN)))[0][:WIDTH].astype(np.float32)
    start = 0
    for i, states in enumerate(made.hidden_states):
        of = embeddings[words[start : start + len(states)]]
        states[:, 1] = 0.05 * states[:, 1] + of @ torch.from_numpy(turn)
        states[:, 2] = 0.05 * states[:, 2]
        states[:, 2, :WIDTH] += of
        made.hidden_states[i] = states
        start += len(states)
    per_token = {**made.contents.per_token, "input_ids": words.astype(np.int32)}
    made.contents = replace(made.contents, per_token=per_token)
    return made.write(tmp_path_factory.mktemp("store"))


def read(split: ActivationSplit, heads: TrainedLens) -> LensResult:
    return lens(split.dask(), words_of(split), heads, tile=5)


def test_words_are_those_of_the_stored_tokens(split: ActivationSplit) -> None:
    words = words_of(split)
    tokens = split.dask()[:, 2].compute()
    seen = {word: tokens[words == word].mean(axis=0) for word in np.unique(words)}
    for state, word in zip(tokens, words, strict=True):
        nearest = min(seen, key=lambda w: float(np.linalg.norm(seen[w] - state)))
        assert nearest == word


def test_each_layer_is_read_in_its_own_coordinates_and_noise_is_not(
    split: ActivationSplit, embeddings: torch.Tensor
) -> None:
    found = read(split, train_lens(split, words_of(split), embeddings, OPTIONS))
    assert (found.top1[1:] > 0.99).all()
    assert found.top1[0] < found.majority + 0.1
    # of noise nothing is to be known but how frequent words are
    assert found.unigram_log_p - 0.1 < found.log_p[0] < found.unigram_log_p + 0.15
    assert (found.log_p[1:] > -0.2).all()
    assert found.kl[1] < 0.05 < found.kl[0]


def test_training_is_seeded_and_each_layer_has_heads_of_its_own(
    split: ActivationSplit, embeddings: torch.Tensor
) -> None:
    options = OPTIONS._replace(steps=3)
    x = np.eye(HIDDEN, dtype=np.float32)
    one, same, other = (
        train_lens(split, words_of(split), embeddings, options._replace(seed=seed))
        for seed in (0, 0, 1)
    )
    for place in range(3):
        np.testing.assert_array_equal(one.features(place, x), same.features(place, x))
        np.testing.assert_array_equal(one.bias(place), same.bias(place))
        assert not np.array_equal(one.features(place, x), other.features(place, x))
    assert not np.array_equal(one.bias(0), one.bias(1))


def test_tokens_that_are_not_asked_for_teach_nothing(
    split: ActivationSplit, embeddings: torch.Tensor
) -> None:
    words = words_of(split)
    asked = np.where(words == 3, words, -1)
    heads = train_lens(split, asked, embeddings, OPTIONS._replace(steps=5))
    for place in range(3):
        assert (heads.bias(place) > 0).nonzero()[0].tolist() == [3]


def test_dropout_sets_a_share_to_zero_and_keeps_the_mean() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(400, 50, generator=random)
    found = dropped(x, 0.8, random)
    kept = found != 0
    assert kept.float().mean() == pytest.approx(0.2, abs=0.01)
    torch.testing.assert_close(found[kept], x[kept] / 0.2)
    assert kept.any(dim=0).all()  # anew for each token
    assert torch.equal(dropped(x, 0.0, random), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "0 steps at"),
        ({"dropout": 1.0}, "dropout 1.0: give"),
        ({"lr": 0.0}, "rate of 0.0"),
    ],
)
def test_options_out_of_range_are_refused(
    change: dict[str, float], message: str, split: ActivationSplit, embeddings: torch.Tensor
) -> None:
    with pytest.raises(InputError, match=message):
        train_lens(split, words_of(split), embeddings, OPTIONS._replace(**change))


def test_a_split_without_words_teaches_nothing(
    split: ActivationSplit, embeddings: torch.Tensor
) -> None:
    with pytest.raises(InputError, match="1e/train holds special tokens alone"):
        train_lens(split, words_of(split) * 0 - 1, embeddings, OPTIONS)


def test_a_loss_that_is_no_number_is_named_with_its_layer(
    split: ActivationSplit, embeddings: torch.Tensor
) -> None:
    with pytest.raises(NonFiniteError, match=r"layer at place 0 .* is nan"):
        train_lens(split, words_of(split), embeddings * torch.nan, OPTIONS)


def test_a_pooled_split_has_no_words(tmp_path: Path) -> None:
    made = Made([3, 2], tag="0e", split="dev")
    made.spec = replace(made.spec, provenance={**made.spec.provenance, "tokens": "mean"})
    with pytest.raises(InputError, match=r"0e/dev does not keep .*tokens: mean"):
        words_of(made.write(tmp_path))


def test_the_lens_of_arrays_takes_trained_heads() -> None:
    """Layer by layer another map and another bias."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(WORDS, WIDTH)).astype(np.float32)
    maps = [
        tuple(
            random.normal(size=shape).astype(np.float32)
            for shape in ((WIDTH, HIDDEN), (WIDTH,), (WORDS,))
        )
        for _ in range(2)
    ]
    x = random.normal(size=(30, 2, HIDDEN)).astype(np.float32)
    words = random.integers(0, WORDS, 30)
    found = lens(da.from_array(x, chunks=(7, 2, HIDDEN)), words, TrainedLens(weight, maps))
    for i, (matrix, offset, bias) in enumerate(maps):
        logits = (x[:, i] @ matrix.T + offset) @ weight.T + bias
        assert found.top1[i] == pytest.approx((logits.argmax(axis=1) == words).mean())
