"""The transform keeps what it was asked to keep, in few bits, and no bytes break its decoder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stores import Made

from bertvision import ActivationStore
from bertvision.errors import CorruptStoreError, InputError, NonFiniteError
from bertvision.featurestore.format import kernels
from bertvision.featurestore.format.calibration import Calibrator
from bertvision.featurestore.format.compiled import KERNELS
from bertvision.featurestore.format.layout import ENCODINGS, get_encoding
from bertvision.featurestore.format.transform import Transform
from bertvision.featurestore.shuffling import shuffle_split
from bertvision.featurestore.writing.buffer import ShardContent

LAYERS, HIDDEN = 4, 32
NAMES = ("transform_encode float32", "transform_decode float32")


def correlated(tokens: int, seed: int = 0, hidden: int = HIDDEN) -> torch.Tensor:
    """States (tokens, layers, hidden) of which each layer tells most of the next."""
    mixing = np.random.default_rng(1).normal(size=(LAYERS, hidden, hidden)) / np.sqrt(hidden)
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=(tokens, 1)) / 3)  # some tokens are wider than others
    layer = rng.normal(size=(tokens, hidden)) * np.linspace(0.2, 3, hidden)
    states = []
    for weights in mixing:
        states.append(layer)
        layer = layer + 0.3 * np.tanh(layer @ weights) + 0.1 * sizes * rng.normal(size=layer.shape)
    return torch.from_numpy(np.stack(states, axis=1) * 5 + 2).float()


def fitted(states: torch.Tensor, error: float) -> Transform:
    calibrator = Calibrator(get_encoding(f"transform:{error}"), np.full(len(states), "ordinary"))
    calibrator.add(states, torch.ones(len(states), dtype=torch.bool))
    transform = calibrator.result().transform
    assert transform is not None
    return transform


@pytest.fixture(scope="module")
def transform() -> Transform:
    return fitted(correlated(4000), 0.1)


def bits_a_value(transform: Transform, states: torch.Tensor) -> float:
    coded = transform.encode_layers(states, [len(states)])
    return 8 * sum(words.nbytes for layer in coded for words in layer) / states.numel()


@pytest.mark.parametrize("error", [0.01, 0.1, 0.3])
def test_other_states_of_the_kind_come_out_with_the_error_that_was_asked_for(error: float) -> None:
    """Below what each value alone takes: rounding a normal one to an error costs ¼ bit more."""
    sample, states = correlated(4000), correlated(2000, seed=5)
    transform = fitted(sample, error)
    lost = (transform.restored_states(states) - states) / sample.std(dim=0)
    by_layer = lost.square().mean(dim=(0, 2)).sqrt()
    assert torch.allclose(by_layer, torch.full((LAYERS,), error), rtol=0.06)
    alone = np.log2(1 / error) + 0.25
    assert bits_a_value(transform, states) < min(0.75 * alone, alone - 0.6)


def test_an_error_does_not_grow_with_depth(transform: Transform) -> None:
    """The predictor is given what was decoded, so a layer's error is its own rounding alone."""
    deep = correlated(500, seed=6)
    lost = (transform.restored_states(deep) - deep).square().mean(dim=(0, 2)).sqrt()
    spread = correlated(4000).std(dim=0).square().mean(dim=1).sqrt()
    assert float((lost / spread).max() / (lost / spread).min()) < 1.2


def test_a_token_of_massive_activations_costs_no_other_its_digits(transform: Transform) -> None:
    states = correlated(64, seed=7)
    alone = transform.restored_states(states)
    with_one = torch.cat([states, 3000 * states[:1]])
    restored = transform.restored_states(with_one)
    assert torch.allclose(restored[:64], alone, atol=1e-4)
    relative = (restored[64] - with_one[64]).norm() / with_one[64].norm()
    assert relative < 0.1
    extra = bits_a_value(transform, with_one) * 65 - bits_a_value(transform, states) * 64
    assert extra < 12


@given(
    coefficients=st.lists(
        st.one_of(
            st.floats(-4, 4, width=32), st.floats(-(2.0**40), 2.0**40, width=32), st.just(0.0)
        ),
        min_size=12,
        max_size=12,
    ),
    classes=st.lists(st.integers(-40, 80), min_size=4, max_size=4),
    step=st.floats(2**-10, 4, width=32),
)
def test_codes_decode_to_what_was_coded(
    transform: Transform, coefficients: list[float], classes: list[int], step: float
) -> None:
    """In Python and compiled alike: the same words, and the same values from them."""
    given_ = np.array(coefficients, np.float32)
    of_axes = np.array(sorted(classes, reverse=True), np.int64)
    frequencies = transform.arrays["symbol_frequency"]
    flat = np.ascontiguousarray(frequencies.reshape(-1))
    starts = (np.cumsum(frequencies, axis=1) - frequencies).reshape(-1)
    widths, offset = _widths(), np.float32(0.45)
    words = []
    for encode, decode in ((KERNELS.require(n) for n in NAMES), _plain()):
        room, result = np.empty(200, np.uint16), np.zeros(2, np.int64)
        made, counts = np.empty(12, np.float32), np.zeros(len(flat), np.int64)
        encode(
            *(given_, of_axes, np.float32(step), widths, offset, flat, starts),
            *(made, np.empty(3, np.int64), room, counts, result, 3, 4),
        )
        assert not result[1]
        words.append(room[len(room) - result[0] :].copy())
        again, failed = np.empty(12, np.float32), np.ones(1, np.int64)
        decode(
            *(words[-1], of_axes, np.float32(step), widths, transform.intervals),
            *(again, np.empty(3, np.int64), failed, 3, 4),
        )
        assert not failed[0]
        assert np.array_equal(again, made)
    assert np.array_equal(*words)


def _plain() -> tuple[object, object]:
    return kernels.transform_encode, kernels.transform_decode


def _widths() -> npt.NDArray[np.float32]:
    from bertvision.featurestore.format import transform as module

    return module._WIDTHS


@given(data=st.data())
def test_no_words_break_the_decoder(transform: Transform, data: st.DataObject) -> None:
    """Words that were cut, changed or invented are refused, or decode to finite values."""
    states = correlated(3, seed=8)
    words = next(iter(transform.encode_layers(states, [3])))[0].copy()
    if data.draw(st.booleans()):
        words = np.array(data.draw(st.lists(st.integers(0, 65535), max_size=40)), np.uint16)
    else:
        words[data.draw(st.integers(0, len(words) - 1))] ^= data.draw(st.integers(1, 65535))
        words = words[: data.draw(st.integers(0, len(words)))]
    tokens = data.draw(st.integers(1, 5))
    with suppress(CorruptStoreError):
        assert np.isfinite(transform.decode(words, tokens, 0)[0]).all()


def test_arrays_that_contradict_themselves_are_refused(transform: Transform) -> None:
    wraps = transform.arrays["symbol_frequency"].copy()  # adds up to 4,096 in 64 bits
    wraps[0] = 0
    wraps[0, [0, 1, 2, -1]] = [2**63 - 1, 2**63 - 1, 4097, 1]
    for name, value in (
        ("symbol_frequency", np.ones((25, 50), np.int64)),
        ("symbol_frequency", wraps),
        ("axis_class", transform.arrays["axis_class"][:, ::-1]),
        ("axis_class", np.full((LAYERS, HIDDEN), -(2**63))),
        ("step", np.zeros(LAYERS, np.float32)),
        ("basis", np.full((LAYERS, HIDDEN, HIDDEN), np.nan, np.float16)),
    ):
        with pytest.raises(CorruptStoreError, match="contradict"):
            Transform({**transform.arrays, name: value})


@pytest.mark.parametrize("size", [1e6, 1e30])
def test_massive_activations_may_come_and_go(transform: Transform, size: float) -> None:
    """A token's values in other layers keep their digits, whatever it has in one."""
    states = correlated(64, seed=9)
    states[2, 1] *= size
    restored = transform.restored_states(states)
    spread = states[:, [0, 2, 3]].std(dim=(0, 2))
    for i, layer in enumerate((0, 2, 3)):
        assert float((restored[2, layer] - states[2, layer]).std() / spread[i]) < 0.15
    lost, given_ = (restored[2, 1] - states[2, 1]).double(), states[2, 1].double()
    assert float(lost.norm() / given_.norm()) < 0.1


def test_what_has_no_code_is_named(transform: Transform) -> None:
    states = correlated(4).clone()
    states[2, 1, 3] = float("inf")
    with pytest.raises(NonFiniteError, match="layer 1 .* choose encoding bfloat16 or float32"):
        transform.restored_states(states)


@pytest.fixture(scope="module")
def made() -> Made:
    """Whose states are of a kind that a transform is for."""
    made = Made([5, 31, 40, 17, 20, 9, 33], encoding="transform:0.05", layers=LAYERS, hidden=HIDDEN)
    made.hidden_states = [correlated(len(h), seed=i) for i, h in enumerate(made.hidden_states)]
    return made


def test_examples_layers_and_tokens_are_read_alone_bit_for_bit(made: Made, tmp_path: Path) -> None:
    split = made.write(tmp_path / "store")
    assert split.verify() == []
    whole = [split[i] for i in range(len(split))]
    for i, states in enumerate(whole):
        error = (states.permute(0, 2, 1) - made.of_stored(i)).std() / made.of_stored(i).std()
        assert float(error) < 0.06
    some = split.read([4, 1], layers=[2, 0]).decode()
    assert torch.equal(some[: len(whole[4])], whole[4][:, :, [2, 0]].permute(0, 2, 1))
    last = np.concatenate([batch.decode().numpy() for batch in split.tokens(-1, shuffle=False)])
    assert np.array_equal(last, torch.cat([states[:, :, -1] for states in whole]).numpy())
    assert np.array_equal(split.dask([3]).compute()[:, 0], last)
    assert split.info()["bytes"] < made.plan.total_tokens * LAYERS * HIDDEN * 2


def test_shuffled_tokens_are_those_of_the_source(made: Made, tmp_path: Path) -> None:
    """They are coded again from what was decoded, which lies on the steps already."""
    source = made.write(tmp_path / "store")
    copy = shuffle_split(source, "mixed", 3)
    assert copy.verify() == []
    shards = map(copy.token_places, range(copy.plan.n_shards))
    examples, places = (np.concatenate(parts) for parts in zip(*shards, strict=True))
    states = np.concatenate([b.decode().numpy() for b in copy.tokens(1, shuffle=False)])
    true = np.stack([source[e][p, :, 1] for e, p in zip(examples, places, strict=True)])
    assert np.sqrt(np.mean(np.square(states - true))) < 0.01 * true.std()


def test_short_examples_of_few_channels_and_fill_have_room(tmp_path: Path) -> None:
    split = Made([1] * 64, hidden=1, encoding="transform:0.05").write(tmp_path / "store")
    assert split.verify() == []
    states = torch.zeros(split.record.shard_tokens, 3, 1)  # with its fill
    content = ShardContent(split.record, 0, [1, 2], states, None, 0, split.transform)
    assert len(list(content.files()["hidden_states"])) == 3


@pytest.mark.parametrize("name", ["transform", "transform:0", "transform:nan", "transform:0.7"])
def test_an_error_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"from 0\.001 to 0\.5"):
        get_encoding(name)


def test_it_has_one_name_and_compresses_alone(tmp_path: Path) -> None:
    assert get_encoding("transform:5e-2").name == "transform:0.05"
    assert not any(encoding.transformed for encoding in ENCODINGS.values())
    with pytest.raises(InputError, match="4096 channels at most, not 5120"):
        get_encoding("transform:0.05").codes_size(5120)
    packed = Made([9, 30], encoding="transform:0.05", compression="zstd")
    with pytest.raises(InputError, match="compresses by itself"):
        packed.write(tmp_path / "store")
    with (
        pytest.raises(InputError, match="written by `bertvision extract`"),
        ActivationStore.create(tmp_path / "other").writer(
            "0e", "a", hidden_size=8, layers=[0], encoding="transform:0.1"
        ),
    ):
        pass
