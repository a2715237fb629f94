"""Encodings: what is lost, and that nothing is invented."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hidden_states import hidden_states, identity, relative_error, stats_of
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.featurestore.format.calibration import ChannelStatsAccumulator
from bertvision.featurestore.format.encoding import ChannelStats, decode, decode_numpy, encode
from bertvision.featurestore.format.layout import ENCODINGS, get_encoding

# Relative Frobenius error of Gaussian hidden states: half a unit in the last place of the
# mantissa for floats; for integers, range / (2 · levels · sqrt(3)) with a range of about 2.5 sd
# at 64 channels.
BOUND = {"float32": 0.0, "float16": 3e-4, "bfloat16": 2.4e-3, "int8": 9e-3, "int4": 0.115}
QUANTISED = ["int8", "int4"]


def step_of(scale: torch.Tensor, name: str, hidden: int) -> torch.Tensor:
    """The step between neighbouring codes, by channel, as the format's formula has it."""
    if name == "int8":
        return scale.double().unsqueeze(-1)
    return (2.0 ** ((scale.double() - 64) / 8)).repeat_interleave(64, -1)[..., :hidden]


@pytest.mark.parametrize("name", ENCODINGS)
def test_relative_error_is_bounded(name: str) -> None:
    x, encoding = hidden_states(), get_encoding(name)
    codes, scale, nonfinite = encode(x, encoding, stats_of(x))
    assert codes.dtype == encoding.torch_dtype
    assert nonfinite == 0
    assert relative_error(x, decode(codes, scale, stats_of(x))) <= BOUND[name]


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("hidden", [2, 64, 96, 130, 384])
def test_shapes_are_the_declared_ones(name: str, hidden: int) -> None:
    x, encoding = hidden_states(7, 2, hidden), get_encoding(name)
    codes, scale, _ = encode(x, encoding, stats_of(x))
    assert codes.shape == (7, 2, encoding.codes_size(hidden))
    assert codes.numpy().dtype == encoding.zarr_dtype if name != "bfloat16" else True
    assert (scale is not None) == encoding.quantised
    if scale is not None:
        assert scale.shape == (7, 2, *encoding.scale_shape(hidden))
        assert str(scale.numpy().dtype) == encoding.scale_dtype
    decoded = decode(codes, scale, stats_of(x))
    assert relative_error(x, decoded) <= BOUND[name]


def test_int4_takes_a_seventeenth_of_dense_float32_at_bert_large_and_squad_lengths() -> None:
    encoding = get_encoding("int4")
    bits = 8 * encoding.codes_size(1024) + 8 * encoding.scale_shape(1024)[0]
    assert bits == 4.125 * 1024
    assert 32 * 386 / (bits / 1024 * 171) > 17


def test_int4_packs_halves_of_the_channels_into_nibbles() -> None:
    x = torch.zeros(1, 1, 128)
    x[0, 0, [0, 1, 64, 65]] = torch.tensor([7.0, -7.0, 3.0, -2.0])
    x[0, 0, 127] = 7.0  # both groups reach 7, so that a step is 1
    codes, scale, _ = encode(x, get_encoding("int4"), identity(1, 128))
    assert scale is not None
    assert scale.tolist() == [[[64, 64]]]
    bytes_ = codes[0, 0].tolist()
    assert bytes_[0] == (7 + 8) | (3 + 8) << 4
    assert bytes_[1] == (-7 + 8) | (-2 + 8) << 4
    assert bytes_[2] == 8 | 8 << 4
    assert bytes_[63] == 8 | (7 + 8) << 4
    assert torch.equal(decode(codes, scale, identity(1, 128)), x)


def test_int4_scale_is_the_step_in_eighths_of_an_octave() -> None:
    x = torch.full((6, 1, 64), 7.0) * torch.tensor([1, 2, 0.5, 2**0.125, 2**0.12, 0]).view(6, 1, 1)
    _, scale, _ = encode(x, get_encoding("int4"), identity(1, 64))
    assert scale is not None
    assert scale.flatten().tolist() == [64, 72, 56, 65, 65, 0]


def test_known_codes_of_int8() -> None:
    x = torch.tensor([[[254.0, -254.0, 3.1, 0.0]]])
    stats = ChannelStats(torch.tensor([[0.0, 0.0, 1.0, 2.0]]), torch.tensor([[1.0, 1.0, 0.1, 1.0]]))
    codes, scale, _ = encode(x, get_encoding("int8"), stats)
    assert scale is not None
    assert scale.item() == 2.0
    assert codes.flatten().tolist() == [127, -127, 10, -1]  # 21 / 2 rounds to even


@pytest.mark.parametrize("name", QUANTISED)
def test_outlier_channels_leave_the_error_of_the_others_as_it_is(name: str) -> None:
    x = hidden_states()
    x[..., 5] = 40 + 10 * x[..., 5]  # BERT's outlier channels: far from zero, and wide
    stats = stats_of(x)
    y = decode(*encode(x, get_encoding(name), stats)[:2], stats)
    ordinary = torch.arange(64) != 5
    assert relative_error(x[..., ordinary], y[..., ordinary]) <= BOUND[name]
    levels = {"int8": 127, "int4": 7}[name]
    absmax = x.abs().amax(-1, keepdim=True) / levels  # without the standardisation
    plain = (x / absmax).round() * absmax
    assert relative_error(x[..., ordinary], plain[..., ordinary]) > 4 * BOUND[name]


def test_an_outlier_of_one_token_costs_only_its_own_group_in_int4() -> None:
    x = hidden_states(20, 1, 128)
    stats = stats_of(x)
    with_outlier = x.clone()
    with_outlier[3, 0, 70] = 500.0
    y, z = (decode(*encode(h, get_encoding("int4"), stats)[:2], stats) for h in (x, with_outlier))
    assert torch.equal(y[3, 0, :64], z[3, 0, :64])
    assert not torch.equal(y[3, 0, 64:], z[3, 0, 64:])
    assert torch.equal(y[:3], z[:3])


@pytest.mark.parametrize("name", QUANTISED)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(-6, 6),
    shift=st.floats(-1e3, 1e3),
    hidden=st.integers(1, 70).map(lambda n: 2 * n),
)
@settings(max_examples=50, deadline=None)
def test_error_of_each_value_is_at_most_half_a_step(
    name: str, seed: int, spread: float, shift: float, hidden: int
) -> None:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(shift, 10**spread, (9, 2, hidden)).astype(np.float32))
    stats = stats_of(x[:5])  # of other tokens than some that are encoded
    codes, scale, _ = encode(x, get_encoding(name), stats)
    assert scale is not None
    step = step_of(scale, name, hidden) * stats.std
    rounding = 1e-6 * (abs(shift) + 10**spread)  # of float32 itself
    difference = (decode(codes, scale, stats) - x).double().abs()
    assert bool((difference <= 0.501 * step + rounding).all())


@given(codes=st.binary(min_size=2 * 65, max_size=2 * 65), scale=st.binary(min_size=6, max_size=6))
@settings(max_examples=50, deadline=None)
def test_int4_decodes_any_bytes_by_the_formula(codes: bytes, scale: bytes) -> None:
    c = np.frombuffer(codes, np.uint8).reshape(2, 1, 65).copy()
    s = np.frombuffer(scale, np.uint8).reshape(2, 1, 3).copy()
    q = np.concatenate([c % 16, c // 16], axis=-1).astype(np.float64) - 8
    truth = q * 2.0 ** ((np.repeat(s, 64, -1)[..., :130].astype(np.float64) - 64) / 8)
    stats = identity(1, 130)
    in_torch = decode(torch.from_numpy(c), torch.from_numpy(s), stats).numpy()
    np.testing.assert_allclose(in_torch, truth, rtol=3e-7)
    in_numpy = decode_numpy(c, s, stats, get_encoding("int4"))
    np.testing.assert_allclose(in_numpy, truth, rtol=3e-7)


@pytest.mark.parametrize("name", ENCODINGS)
def test_numpy_and_torch_decode_alike(name: str) -> None:
    x, encoding = hidden_states(50, 3, 100), get_encoding(name)
    stats = stats_of(x)
    codes, scale, _ = encode(x, encoding, stats)
    stored = codes.view(torch.uint16) if name == "bfloat16" else codes
    y = decode_numpy(stored.numpy(), None if scale is None else scale.numpy(), stats, encoding)
    np.testing.assert_allclose(y, decode(codes, scale, stats).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ENCODINGS)
def test_layer_major_codes_decode_to_the_same_contiguous_values(
    name: str, dtype: torch.dtype
) -> None:
    x = hidden_states(700, 3, 192)  # several blocks, the last one smaller
    stats = stats_of(x)
    codes, scale, _ = encode(x, get_encoding(name), stats)
    by_layer = codes.transpose(0, 1).contiguous().transpose(0, 1)
    scale_by_layer = None if scale is None else scale.transpose(0, 1).contiguous().transpose(0, 1)
    y = decode(by_layer, scale_by_layer, stats, dtype)
    assert y.is_contiguous()
    assert torch.equal(y, decode(codes, scale, stats, dtype))
    assert torch.equal(y, decode(codes, scale, stats).to(dtype))


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_token_is_encoded_alone(name: str) -> None:
    """Blocks and batches are of no consequence, nor is the memory layout of what is encoded."""
    x = hidden_states(700, 2, 192)
    stats = stats_of(x)
    codes, scale, _ = encode(x, get_encoding(name), stats)
    for part in (slice(0, 1), slice(341, 347), slice(600, 700)):
        by_layer = x[part].transpose(0, 1).contiguous().transpose(0, 1)
        again, scale_again, _ = encode(by_layer, get_encoding(name), stats)
        assert torch.equal(again, codes[part])
        if scale is not None and scale_again is not None:
            assert torch.equal(scale_again, scale[part])


@pytest.mark.parametrize("name", ENCODINGS)
def test_encoding_leaves_the_hidden_states_alone(name: str) -> None:
    x = hidden_states(20)
    before = x.clone()
    codes, _, _ = encode(x, get_encoding(name), stats_of(x))
    codes.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 1e8])
def test_the_smallest_and_largest_magnitudes_are_not_lost_in_the_scale(
    name: str, size: float
) -> None:
    x = size * hidden_states(5).sign()
    codes, scale, _ = encode(x, get_encoding(name), identity(3, 64))
    y = decode(codes, scale, identity(3, 64))
    assert bool(torch.isfinite(y).all())
    tolerance = max(0.05 * size, 2**-8 if name == "int4" else 1e-30)  # int4: its smallest step
    assert float((y - x).abs().max()) <= tolerance


@pytest.mark.parametrize("name", QUANTISED)
def test_a_constant_channel_stays_exact(name: str) -> None:
    x = hidden_states(30)
    x[..., 3] = 2.5
    stats = stats_of(x)
    y = decode(*encode(x, get_encoding(name), stats)[:2], stats)
    torch.testing.assert_close(y[..., 3], x[..., 3], rtol=0, atol=1e-6)


def test_statistics_survive_a_mean_far_larger_than_the_spread() -> None:
    x = 1e4 + 1e-1 * hidden_states(5000, 1, 4).double()
    accumulator = ChannelStatsAccumulator()
    for block in x.split(700):
        accumulator.add(block)
    found = accumulator.result()
    torch.testing.assert_close(found.std.double(), x.std(0, unbiased=False), rtol=1e-4, atol=0)


def test_an_unknown_encoding_names_the_choices() -> None:
    with pytest.raises(InputError, match="'int7'.*int8, int4, bfloat16, float16, float32"):
        get_encoding("int7")


def test_an_odd_number_of_channels_is_refused_by_int4() -> None:
    with pytest.raises(InputError, match="int4 .* cannot hold 63: choose int8"):
        encode(hidden_states(4, 2, 63), get_encoding("int4"), identity(2, 63))


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_codes_are_not_decoded_without_their_statistics(name: str) -> None:
    x, encoding = hidden_states(4), get_encoding(name)
    codes, scale, _ = encode(x, encoding, stats_of(x))
    with pytest.raises(InputError, match=f"{name} codes need"):
        decode(codes, scale, None)
    with pytest.raises(InputError, match=f"{name} codes need"):
        decode_numpy(codes.numpy(), None, stats_of(x), encoding)
    with pytest.raises(InputError, match="needs channel statistics"):
        encode(x, encoding)
