"""NaN, infinity and what an encoding cannot hold: refused by name, or replaced and counted."""

from __future__ import annotations

import pytest
import torch
from hidden_states import hidden_states, identity, stats_of

from bertvision.errors import NonFiniteError
from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.format.layout import ENCODINGS, get_encoding

QUANTISED = ["int8", "int4"]
NAN, INF = float("nan"), float("inf")


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
