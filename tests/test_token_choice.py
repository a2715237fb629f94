"""Tokens that trainers of autoencoders choose: by norm and example, transformed, and mixed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from stores import Made

import bertvision
from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.shuffling import shuffle_split
from bertvision.featurestore.split import ActivationSplit

LENGTHS = np.random.default_rng(3).integers(4, 33, 60).tolist()
ENCODINGS = ("int8", "bfloat16", "float32")


@pytest.fixture(scope="module", params=ENCODINGS)
def split(request: Any, tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    made = Made(LENGTHS, encoding=request.param)
    for states in made.hidden_states:
        states[:, :, :8] = states[:, :, :8] * 3 + 2  # channels of their own mean and variance
        states[0] *= 50  # the first token of every example is a massive one
    return made.write(tmp_path_factory.mktemp(request.param))


def decoded(split: ActivationSplit, layer: int) -> np.ndarray[Any, Any]:
    """(examples in stored order, tokens one after another) of a layer, (tokens, hidden)."""
    return np.concatenate([split[i][:, :, layer].numpy() for i in range(len(split))])


def drawn(stream: Any) -> tuple[np.ndarray[Any, Any], set[tuple[int, int]]]:
    """All vectors of an epoch, and whose they are."""
    vectors, places = [], set()
    for batch in stream:
        vectors.append(batch.vectors)
        places |= set(zip(batch.examples.tolist(), batch.positions.tolist(), strict=True))
    return torch.cat(vectors).numpy(), places


@pytest.mark.parametrize("max_norm", ["10x", 120.0])
def test_long_tokens_are_left_out_and_counted(split: ActivationSplit, max_norm: Any) -> None:
    stream = split.tokens([1, 2], batch_size=100, max_norm=max_norm)
    vectors, places = drawn(stream)
    assert stream.too_long == len(LENGTHS)
    assert len(places) == len(vectors) == sum(LENGTHS) - len(LENGTHS)
    assert not any(position == 0 for _, position in places)
    other = split.tokens(1, max_norm=max_norm, without=[0])  # one layer, and a token less
    assert other.too_long in (len(LENGTHS), len(LENGTHS) - 1)
    state = json.loads(json.dumps(stream.state_dict()))
    with pytest.raises(InputError, match="its tokens is"):
        split.tokens([1, 2], batch_size=100).load_state_dict(state)


@pytest.mark.parametrize("max_norm", ["x", "0", -1, float("nan"), True, "10"])
def test_other_norms_are_refused(split: ActivationSplit, max_norm: Any) -> None:
    with pytest.raises(InputError, match="max_norm is .*'10x'"):
        split.tokens(1, max_norm=max_norm)


def test_a_norm_that_no_token_has_is_named_with_the_shortest(split: ActivationSplit) -> None:
    shortest = np.linalg.norm(decoded(split, 1), axis=1).min()
    with pytest.raises(InputError, match=f"whose shortest has a norm of {shortest:.4g}"):
        split.tokens(1, max_norm=1e-9)


def test_held_out_examples_are_the_same_of_every_layer_and_order(
    split: ActivationSplit, tmp_path: Path
) -> None:
    train, held_out = split.hold_out(0.25, seed=4)
    assert sorted([*train, *held_out]) == list(range(len(LENGTHS)))
    assert len(held_out) == 15
    _, places = drawn(split.tokens(-1, examples=held_out))
    assert places == {(i, p) for i in held_out for p in range(int(split.plan.n_tokens[i]))}
    other = Made(LENGTHS, seed=9).write(tmp_path)  # the same examples, stored in another order
    ids = {int(split.plan.example_id[i]) for i in held_out}
    assert {int(other.plan.example_id[i]) for i in other.hold_out(0.25, seed=4)[1]} == ids
    assert not np.array_equal(split.hold_out(0.25, seed=5)[1], held_out)


@pytest.mark.parametrize("fraction", [0, 1, 0.001, 2, "0.1", True])
def test_a_part_without_examples_is_refused(split: ActivationSplit, fraction: float) -> None:
    with pytest.raises(InputError, match="leaves an example in each part"):
        split.hold_out(fraction)


@pytest.mark.parametrize(
    ("examples", "match"),
    [
        ([], "give positions"),
        ([[1], [2, 3]], "give positions"),
        ([0.5], "give positions"),
        ([60], "has 60"),
        ([-1], "has -1"),
    ],
)
def test_examples_that_are_none_are_refused(
    split: ActivationSplit, examples: Any, match: str
) -> None:
    with pytest.raises(InputError, match=match):
        split.tokens(-1, examples=examples)


def test_a_shuffled_copy_has_the_examples_of_its_source(tmp_path: Path) -> None:
    source = Made(LENGTHS).write(tmp_path / "a")
    held_out = source.hold_out(0.1)[1]
    split = shuffle_split(source, "shuffled", seed=0)
    assert (
        drawn(split.tokens(0, examples=held_out))[1]
        == drawn(source.tokens(0, examples=held_out))[1]
    )


@pytest.mark.parametrize("layers", [1, [2, 0]])
def test_transforms_are_those_of_the_moments_and_go_back(
    split: ActivationSplit, layers: Any, tmp_path: Path
) -> None:
    """All shards are in the sample here, so that moments are exact."""
    arguments: dict[str, Any] = {"batch_size": 200, "max_norm": "10x"}
    plain, _ = drawn(split.tokens(layers, **arguments))
    for name in ("center", "whiten"):
        stream = split.tokens(layers, transform=name, **arguments)
        vectors, _ = drawn(stream)
        flat = vectors.reshape(len(vectors), -1, 16).astype(np.float64)
        assert np.abs(flat.mean(axis=0)).max() < 1e-5
        for layer in range(flat.shape[1]):
            of_plain = plain.reshape(len(plain), -1, 16)[:, layer].astype(np.float64)
            expected = np.cov(of_plain.T, bias=True) if name == "center" else np.eye(16)
            covariance = np.cov(flat[:, layer].T, bias=True)
            assert np.allclose(covariance, expected, atol=2e-3, rtol=1e-4)
        assert stream.transform is not None
        back = stream.transform.inverse(torch.from_numpy(vectors)).numpy()
        assert np.allclose(back, plain, atol=1e-4, rtol=1e-4)
        again = bertvision.TokenTransform.load(stream.transform.save(tmp_path / "t.safetensors"))
        assert torch.equal(
            again(torch.from_numpy(plain)), stream.transform(torch.from_numpy(plain))
        )
        for dtype in (torch.float32, torch.bfloat16):
            stream = split.tokens(layers, transform=name, **arguments)
            same = torch.cat(list(stream.vectors(dtype=dtype)))
            assert torch.equal(same, torch.from_numpy(vectors).to(dtype))


@pytest.mark.parametrize("layers", [1, [1, 2]])
def test_centred_vectors_are_scaled_by_their_own_norm_and_go_back(
    split: ActivationSplit, layers: Any, tmp_path: Path
) -> None:
    stream = split.tokens(layers, transform="center", scaled=True, max_norm="10x")
    plain, vectors = (
        torch.from_numpy(drawn(own)[0]) for own in (split.tokens(layers, max_norm="10x"), stream)
    )
    norms = vectors.norm(dim=-1).mean(dim=0).numpy()
    assert norms == pytest.approx(np.sqrt(16), rel=1e-5)
    assert stream.transform is not None
    transform = bertvision.TokenTransform.load(stream.transform.save(tmp_path / "t.safetensors"))
    torch.testing.assert_close(transform(plain), vectors)
    torch.testing.assert_close(transform.inverse(vectors), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"transform": "center"},
        {"transform": "center", "scaled": True},
        {"transform": "whiten"},
        {"scaled": True},
    ],
)
def test_held_out_tokens_take_the_moments_of_training(
    split: ActivationSplit, arguments: dict[str, Any]
) -> None:
    train, held_out = np.arange(6), np.arange(6, len(split))
    fitted = split.tokens([1, 2], examples=train, **arguments)
    given = split.tokens([1, 2], examples=held_out, transform=fitted.transform)
    plain, vectors = (
        torch.from_numpy(drawn(own)[0]) for own in (split.tokens([1, 2], examples=held_out), given)
    )
    assert fitted.transform is not None
    torch.testing.assert_close(vectors, fitted.transform(plain), atol=1e-4, rtol=1e-4)
    assert given.transform is not None
    if given.transform.scale is not None:
        assert torch.equal(given.scale_factors, given.transform.scale)
    torch.testing.assert_close(given.transform.inverse(vectors), plain, atol=1e-3, rtol=1e-3)
    with pytest.raises(InputError, match=r"is of \(layers, hidden\) = \(2, 16\).*of \(1, 16\)"):
        split.tokens(1, transform=fitted.transform)
    if arguments != {"transform": "center"}:
        with pytest.raises(InputError, match="leave scaled out"):
            split.tokens([1, 2], transform=fitted.transform, scaled=True)


def test_transforms_that_cannot_be_are_refused(split: ActivationSplit, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give 'center', 'whiten' or a TokenTransform"):
        split.tokens(1, transform="pca")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave scaled out"):
        split.tokens(1, transform="whiten", scaled=True)
    with pytest.raises(InputError, match="more tokens than channels.*transform='center'"):
        split.tokens(1, transform="whiten", examples=[int(np.argmin(split.plan.n_tokens))])
    transform = split.tokens(1, transform="whiten").transform
    assert transform is not None
    for call in (transform, transform.inverse):
        with pytest.raises(InputError, match=r"of \(n, 1, 16\) or \(n, 16\)"):
            call(torch.zeros(3, 2, 16))
    for vectors in (torch.ones(3, 16, dtype=torch.long), np.ones((3, 16))):
        with pytest.raises(InputError, match="give a tensor of floats"):
            transform(vectors)  # type: ignore[arg-type]
    with pytest.raises(WorkspaceError, match="cannot be written"):
        transform.save(tmp_path / "no" / "folder")
    mean, square = torch.zeros(1, 16), torch.eye(16)[None]
    for parts in (
        {"mean": mean.long()},
        {"mean": mean * torch.nan},
        {"mean": mean, "matrix": square},
        {"mean": mean, "matrix": square, "back": square * 2},
        {"mean": mean, "other": mean.clone()},
        {"mean": mean, "scale": torch.zeros(1)},
        {"mean": mean, "scale": torch.ones(2)},
    ):
        save_file(parts, tmp_path / "hostile")
        with pytest.raises(WorkspaceError, match="no transform"):
            bertvision.TokenTransform.load(tmp_path / "hostile")
    for name, content in (("none", None), ("text", b"no tensors")):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(WorkspaceError, match="cannot be read as a transform"):
            bertvision.TokenTransform.load(path)


def test_a_mixture_has_its_shares_in_every_batch_and_resumes(
    split: ActivationSplit, tmp_path: Path
) -> None:
    other = Made(LENGTHS[:9], encoding="int4").write(tmp_path)
    arguments: dict[str, Any] = {"layers": [0, 2], "batch_size": 64, "seed": 2}
    mixture = bertvision.TokenMixture([split, other], [3, 1], **arguments)
    own = [
        split.tokens([0, 2], batch_size=48, seed=2, endless=True),
        other.tokens([0, 2], batch_size=16, seed=3, endless=True),
    ]
    expected = zip(*(stream.vectors() for stream in own), strict=True)
    batches = list(itertools.islice(mixture, 40))  # several epochs of the small one
    for batch, parts in zip(batches, itertools.islice(expected, 40), strict=True):
        assert batch.shape == (64, 2, 16)
        assert torch.equal(batch, torch.cat(parts))
    again = bertvision.TokenMixture([split, other], [3, 1], **arguments)
    first = list(itertools.islice(again, 7))
    assert all(map(torch.equal, first, batches))
    third = bertvision.TokenMixture([split, other], [3, 1], **arguments)
    third.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert third.batches == 7
    assert torch.equal(next(iter(third)), batches[7])
    by_tokens = bertvision.TokenMixture([split, other], layers=1, batch_size=1000).streams
    shares = [len(next(iter(stream))) for stream in by_tokens]
    assert shares[1] == round(1000 * other.record.tokens / (other.record.tokens + sum(LENGTHS)))


def test_mixtures_that_cannot_be_are_refused(split: ActivationSplit, tmp_path: Path) -> None:
    wide = Made(LENGTHS[:9], hidden=32).write(tmp_path)
    for splits, weights, options, match in (
        ([], None, {}, "give a list with at least one split"),
        (split, None, {}, "give a list with at least one split"),
        ([split], ["x"], {}, "a number above 0"),
        ([split], None, {"logits": True}, "leave logits out"),
        ([split, split], None, {"examples": [1, 2, 3]}, "one for each of the 2 splits"),
        ([split, wide], None, {}, "differ in width"),
        ([split, split], [1], {}, "a number above 0 for each of the 2"),
        ([split, split], [1, -1], {}, "a number above 0"),
        ([split, split], [1, 1e-9], {"batch_size": 8}, "would have no token"),
        ([split], None, {"endless": True}, "leave endless out"),
    ):
        with pytest.raises(InputError, match=match):
            bertvision.TokenMixture(splits, weights, layers=1, **options)
    mixture = bertvision.TokenMixture([split, split], layers=1)
    with pytest.raises(InputError, match="no position of a mixture of 2"):
        mixture.load_state_dict({"streams": []})
    good = mixture.streams[0].state_dict() | {"batches": 3}
    with pytest.raises(InputError, match="no position"):
        mixture.load_state_dict({"streams": [good, {}]})
    assert mixture.batches == 0  # and no stream is ahead of another


def test_a_mixture_takes_examples_of_each_split_and_other_tokens_of_the_same(
    split: ActivationSplit,
) -> None:
    held_out = split.hold_out(0.1)[1].tolist()
    mixture = bertvision.TokenMixture(
        [split, split], layers=1, batch_size=40, examples=[held_out, [0, 1]]
    )
    own = [set(next(iter(stream)).examples.tolist()) for stream in mixture.streams]
    assert own[0] <= set(held_out)
    assert own[1] <= {0, 1}
    first, second = next(bertvision.TokenMixture([split, split], layers=1).vectors()).chunk(2)
    assert not torch.equal(first, second)
