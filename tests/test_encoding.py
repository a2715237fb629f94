"""Encodings: what is lost, and that nothing is invented."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.calibration import ChannelStatsAccumulator
from bertvision.featurestore.encoding import (
    ENCODINGS,
    ChannelStats,
    decode,
    decode_numpy,
    encode,
    get_encoding,
)

# Relative Frobenius error of Gaussian hidden states: half a unit in the last place of the
# mantissa for floats; for integers, range / (2 · levels · sqrt(3)) with a range of about 2.5 sd
# at 64 channels.
BOUND = {"float32": 0.0, "float16": 3e-4, "bfloat16": 2.4e-3, "int8": 9e-3, "int4": 0.115}
QUANTISED = ["int8", "int4"]
NAN, INF = float("nan"), float("inf")


def hidden_states(tokens: int = 200, layers: int = 3, hidden: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(tokens, layers, hidden)


def stats_of(x: torch.Tensor) -> ChannelStats:
    accumulator = ChannelStatsAccumulator()
    accumulator.add(x)
    return accumulator.result()


def identity(layers: int, hidden: int) -> ChannelStats:
    """Statistics that leave the values alone."""
    return ChannelStats(torch.zeros(layers, hidden), torch.ones(layers, hidden))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())


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


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_hidden_states_are_refused_by_token_and_layer(name: str, value: float) -> None:
    x = hidden_states(40)
    stats = stats_of(x)
    x[31, 2, 7] = value
    with pytest.raises(NonFiniteError, match="token 31, layer 2: .*NaN or infinity"):
        encode(x, get_encoding(name), stats)


@pytest.mark.parametrize("name", QUANTISED)
def test_recorded_non_finite_values_become_mean_and_largest_and_are_counted(name: str) -> None:
    x = hidden_states(40, 3, 96)
    stats = stats_of(x)
    clean, bad = x.clone(), x.clone()
    for channel, value in ((7, NAN), (8, INF), (9, -INF), (70, INF)):
        clean[31, 2, channel] = stats.mean[2, channel]
        bad[31, 2, channel] = value
    codes, scale, nonfinite = encode(bad, get_encoding(name), stats, nonfinite="record")
    assert nonfinite == 4
    y, truth = (
        decode(*encoded[:2], stats)
        for encoded in ((codes, scale), encode(clean, get_encoding(name), stats))
    )
    replaced = torch.zeros_like(x, dtype=torch.bool)
    replaced[31, 2, [7, 8, 9, 70]] = True
    assert torch.equal(y[~replaced], truth[~replaced])  # the others lose nothing
    z = (y[31, 2] - stats.mean[2]) / stats.std[2]
    z_clean = (clean[31, 2] - stats.mean[2]) / stats.std[2]
    largest = z_clean.abs() if name == "int8" else z_clean[:64].abs()
    assert z[7].item() == pytest.approx(0, abs=1e-6)
    assert z[8].item() == pytest.approx(largest.max().item(), rel=0.05)
    assert z[9].item() == pytest.approx(-largest.max().item(), rel=0.05)


@pytest.mark.parametrize("name", QUANTISED)
def test_tokens_of_nothing_but_nan_and_infinity_become_the_mean(name: str) -> None:
    x = hidden_states(4)
    stats = stats_of(x)
    x[1], x[2] = NAN, INF
    codes, scale, nonfinite = encode(x, get_encoding(name), stats, nonfinite="record")
    assert nonfinite == 2 * 3 * 64
    y = decode(codes, scale, stats)
    torch.testing.assert_close(y[1], stats.mean)
    torch.testing.assert_close(y[2], stats.mean)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_recorded_non_finite_values_of_float_encodings_become_zero_and_largest(name: str) -> None:
    x, encoding = hidden_states(4), get_encoding(name)
    x[0, 0, :4] = torch.tensor([NAN, INF, -INF, 1.5])
    codes, _, nonfinite = encode(x, encoding, nonfinite="record")
    assert nonfinite == 3
    most = torch.finfo(encoding.torch_dtype).max
    assert codes[0, 0, :4].tolist() == [0.0, most, -most, 1.5]
    assert torch.equal(codes[1:], x[1:].to(encoding.torch_dtype))


def test_overflow_of_float16_is_refused_or_counted_and_bfloat16_named() -> None:
    x = hidden_states(4)
    x[3, 1, 0] = 1e5
    with pytest.raises(NonFiniteError, match="token 3, layer 1: 100000 .*bfloat16"):
        encode(x, get_encoding("float16"))
    codes, _, nonfinite = encode(x, get_encoding("float16"), nonfinite="record")
    assert (nonfinite, codes[3, 1, 0].item()) == (1, 65504.0)


def test_what_no_int4_scale_can_tell_is_refused_or_clipped_and_counted() -> None:
    x = torch.ones(4, 1, 64)
    x[2, 0, 9] = 1e12
    with pytest.raises(NonFiniteError, match="token 2, layer 0: 1e.12 does not fit int4.*bfloat16"):
        encode(x, get_encoding("int4"), identity(1, 64))
    codes, scale, nonfinite = encode(x, get_encoding("int4"), identity(1, 64), nonfinite="record")
    assert nonfinite == 1
    y = decode(codes, scale, identity(1, 64))
    torch.testing.assert_close(y, torch.ones(4, 1, 64), rtol=0.05, atol=0)


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
