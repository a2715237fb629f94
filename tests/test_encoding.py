"""Encodings: what is lost, and that nothing is invented."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.encoding import (
    ENCODINGS,
    ChannelStats,
    ChannelStatsAccumulator,
    decode,
    decode_numpy,
    encode,
    get_encoding,
)

# Relative Frobenius error of Gaussian hidden states: half a unit in the last place of the
# mantissa for floats; for int8, range/254/sqrt(3) with a range of about 3 sd at 64 channels.
BOUND = {"float32": 0.0, "float16": 3e-4, "bfloat16": 2.4e-3, "int8": 9e-3}


def hidden_states(tokens: int = 200, layers: int = 3, hidden: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(tokens, layers, hidden)


def stats_of(x: torch.Tensor) -> ChannelStats:
    accumulator = ChannelStatsAccumulator()
    accumulator.add(x)
    return accumulator.result()


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())


@pytest.mark.parametrize("name", ENCODINGS)
def test_relative_error_is_bounded(name: str) -> None:
    x = hidden_states()
    codes, scale = encode(x, get_encoding(name), stats_of(x))
    assert codes.dtype == get_encoding(name).torch_dtype
    assert relative_error(x, decode(codes, scale, stats_of(x))) <= BOUND[name]


def test_int8_keeps_its_error_beside_outlier_channels() -> None:
    x = hidden_states()
    x[..., 5] = 40 + 10 * x[..., 5]  # BERT's outlier channels: far from zero, and wide
    stats = stats_of(x)
    y = decode(*encode(x, get_encoding("int8"), stats), stats)
    ordinary = torch.arange(64) != 5
    assert relative_error(x[..., ordinary], y[..., ordinary]) <= BOUND["int8"]
    absmax = x.abs().amax(-1, keepdim=True) / 127  # without the standardisation
    plain = (x / absmax).round() * absmax
    assert relative_error(x[..., ordinary], plain[..., ordinary]) > 4 * BOUND["int8"]


@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(-6, 6), shift=st.floats(-1e3, 1e3))
@settings(max_examples=50, deadline=None)
def test_int8_error_of_each_value_is_at_most_half_a_step(
    seed: int, spread: float, shift: float
) -> None:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(shift, 10**spread, (9, 2, 8)).astype(np.float32))
    stats = stats_of(x)
    codes, scale = encode(x, get_encoding("int8"), stats)
    assert scale is not None
    assert int(codes.min()) >= -127
    step = scale[..., None] * stats.std
    rounding = 1e-6 * (abs(shift) + 10**spread)  # of float32 itself
    assert bool(((decode(codes, scale, stats) - x).abs() <= 0.501 * step + rounding).all())


@pytest.mark.parametrize("name", ENCODINGS)
def test_numpy_and_torch_decode_alike(name: str) -> None:
    x, encoding = hidden_states(50), get_encoding(name)
    stats = stats_of(x) if encoding.quantised else None
    codes, scale = encode(x, encoding, stats)
    stored = codes.view(torch.uint16) if name == "bfloat16" else codes
    y = decode_numpy(stored.numpy(), None if scale is None else scale.numpy(), stats, encoding)
    np.testing.assert_allclose(y, decode(codes, scale, stats).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_hidden_states_are_refused_by_token_and_layer(name: str, value: float) -> None:
    x = hidden_states(40)
    stats = stats_of(x)
    x[31, 2, 7] = value
    with pytest.raises(NonFiniteError, match="token 31, layer 2: .*NaN or infinity"):
        encode(x, get_encoding(name), stats)


def test_overflow_of_float16_is_refused_and_bfloat16_named() -> None:
    x = hidden_states(4)
    x[3, 1, 0] = 1e5
    with pytest.raises(NonFiniteError, match="token 3, layer 1: 100000 .*bfloat16"):
        encode(x, get_encoding("float16"))


def test_a_constant_channel_stays_exact() -> None:
    x = hidden_states(30)
    x[..., 3] = 2.5
    stats = stats_of(x)
    y = decode(*encode(x, get_encoding("int8"), stats), stats)
    torch.testing.assert_close(y[..., 3], x[..., 3], rtol=0, atol=1e-6)


def test_statistics_survive_a_mean_far_larger_than_the_spread() -> None:
    x = 1e4 + 1e-1 * hidden_states(5000, 1, 4).double()
    accumulator = ChannelStatsAccumulator()
    for block in x.split(700):
        accumulator.add(block)
    found = accumulator.result()
    torch.testing.assert_close(found.std.double(), x.std(0, unbiased=False), rtol=1e-4, atol=0)


def test_an_unknown_encoding_names_the_choices() -> None:
    with pytest.raises(InputError, match="'int7'.*int8, bfloat16, float16, float32"):
        get_encoding("int7")
