"""Hidden states ↔ codes: float32, bfloat16, float16, int8 and int4, in torch and in numpy.

The quantised encodings are standardised per channel before they are scaled per token and layer,
because BERT's outlier channels would otherwise take the whole range of a token:

    h ≈ channel_std[l, c] · z[t, l, c] + channel_mean[l, c]

with z as codes and a scale (see `quantise`). The float encodings have neither scale nor channel
statistics. bfloat16 is no Zarr data type: its bits are stored as uint16.

Standardised values ↔ integer codes and their scale: the arithmetic of int8 and int4.

    z ≈ step · q        q from −levels to levels, one step per group of channels

int8 has one group of all channels and keeps the step as it is, in float32. int4 has groups of 64
channels and keeps of each step only its logarithm, in a byte: step = 2^((scale − 64) / 8), so that
a value costs 4.125 bits. Rounded to the nearest eighth of an octave it lets |q| reach 7.3, which
still rounds to 7: no value is off by more than half a step. q + 8 is a nibble; the low nibbles are
the first half of the channels, the high ones the second half, because long runs decode fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.format.compiled import KERNELS
from bertvision.featurestore.format.layout import ENCODINGS, Encoding
from bertvision.featurestore.format.names import NonFinite

# Steps from 2^-8 to 2^23.9, and where one gives way to the next. Tables, because the last bit of
# exp2 and log2 differs between vector lanes, libraries and devices.
_EXPONENTS = (torch.arange(256, dtype=torch.float64) - 64) / 8
_STEPS = _EXPONENTS.exp2().float()
_MIDDLES = (_EXPONENTS[:-1] + 1 / 16).exp2().float()
_NIBBLE_BIAS = 8
_TINY = 1e-30


class Quantiser(NamedTuple):
    """One way to quantise.

    Attributes:
        levels: q goes from −levels to levels.
        group: channels that share a step; 0: all do.
        packed: channels in a byte, 1 or 2.
    """

    levels: int
    group: int = 0
    packed: int = 1

    @property
    def largest_step(self) -> float:
        """The largest step that a scale can tell."""
        if not self.group:
            return torch.finfo(torch.float32).max / self.levels
        return float(_STEPS[-1])

    def quantise_(self, z: Tensor, codes: Tensor, scale: Tensor, step: Tensor) -> None:
        """Fill the last three from the first, which is overwritten.

        Args:
            z: (…, hidden) float32, standardised.
            codes: (…, hidden / packed), int8 or uint8.
            scale: (…, *`Encoding.scale_shape`), float32 or uint8.
            step: like ``scale``, float32: the step wanted; above `largest_step`, infinite or NaN
                where z has a value that codes and scale cannot express.
        """
        for values, s in self._groups(z, step):
            torch.maximum(values.amax(dim=-1), values.amin(dim=-1).neg_(), out=s)
            s.abs_().div_(self.levels)  # or of negative zeros the step would be one
        if self.group:
            scale.copy_(torch.bucketize(step, _MIDDLES.to(step.device)))
        else:
            scale.copy_(step)
        inverse = self._step(scale).clamp_min(_TINY).reciprocal_()
        for values, s in self._groups(z, inverse):
            values.mul_(s.unsqueeze(-1))
        z.round_()
        if self.packed == 1:
            codes.copy_(z)
        else:
            # by way of int8: torch converts float to uint8 several times slower
            nibbles = z.to(torch.int8).add_(_NIBBLE_BIAS).view(torch.uint8)
            half = codes.shape[-1]
            torch.add(nibbles[..., :half], nibbles[..., half:], alpha=16, out=codes)

    def clip_(self, z: Tensor) -> int:
        """Replace what cannot be expressed in z, (…, hidden), and count it.

        NaN becomes 0, the channel's mean; the others the largest magnitude of their group.
        """
        replaced = ~(z.abs() <= self.levels * self.largest_step)
        groups = (-(-z.shape[-1] // self.group),) if self.group else ()
        largest = z.new_zeros((*z.shape[:-1], *groups))
        for values, most in self._groups(z.masked_fill(replaced, 0).abs_(), largest):
            most.copy_(values.amax(dim=-1))
        z.nan_to_num_(nan=0.0)
        for values, most in self._groups(z, largest):
            values.clamp_(-most.unsqueeze(-1), most.unsqueeze(-1))
        return int(replaced.sum())

    def dequantise_(self, codes: Tensor, scale: Tensor, z: Tensor) -> None:
        """Fill z, (…, hidden) float32, from codes and scale."""
        # copy, then in-place products: several times faster than one product of mixed dtypes
        if self.packed == 1:
            z.copy_(codes)
        else:
            half = codes.shape[-1]
            z[..., :half].copy_(codes & 15)
            z[..., half:].copy_(codes >> 4)
            z.sub_(_NIBBLE_BIAS)
        for values, step in self._groups(z, self._step(scale)):
            values.mul_(step.unsqueeze(-1))

    def dequantise_numpy(
        self, codes: npt.NDArray[Any], scale: npt.NDArray[Any]
    ) -> npt.NDArray[np.float32]:
        """The same in numpy, into new memory."""
        if self.packed == 2:
            codes = np.concatenate([codes & 15, codes >> 4], axis=-1).view(np.int8) - _NIBBLE_BIAS
        z: npt.NDArray[np.float32] = codes.astype(np.float32)
        if self.group:
            step = np.repeat(_STEPS.numpy()[scale], self.group, axis=-1)
            z *= step[..., : z.shape[-1]]
        else:
            z *= scale[..., None]
        return z

    def steps_numpy(self, scale: npt.NDArray[Any], hidden: int) -> npt.NDArray[np.float64]:
        """The step of each channel, (tokens, layers, hidden), or 1 where all channels share it.

        Args:
            scale: (tokens, layers, …) as it is stored.
            hidden: Number of channels.
        """
        if not self.group:
            return scale[..., None].astype(np.float64)
        steps = _STEPS.numpy()[scale].astype(np.float64)
        return np.repeat(steps, self.group, axis=-1)[..., :hidden]

    def _step(self, scale: Tensor) -> Tensor:
        if not self.group:
            return scale
        return _STEPS.to(scale.device).take(scale.long())

    def _groups(self, x: Tensor, per_group: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of x as (…, channels of a group), each with its part of ``per_group``.

        The whole groups are one pair, (…, groups, 64); a smaller last group is a pair of its own.
        """
        if not self.group:
            return [(x, per_group)]
        whole, rest = divmod(x.shape[-1], self.group)
        pairs = []
        if whole:
            channels = x[..., : whole * self.group].unflatten(-1, (whole, -1))
            pairs.append((channels, per_group[..., :whole]))
        if rest:
            pairs.append((x[..., -rest:], per_group[..., whole]))
        return pairs


_BLOCK_BYTES = 1 << 21  # float32 scratch: small enough for the cache, large enough for few blocks


_QUANTISERS = {
    encoding.name: Quantiser(encoding.levels, encoding.group, encoding.packed)
    for encoding in ENCODINGS.values()
    if encoding.quantised
}
_BY_DTYPE = {encoding.torch_dtype: encoding for encoding in ENCODINGS.values()}


_MOST_LOST = {"float16": 0.02, "int8": 0.05, "int4": 0.4}
"""Part of its norm that a vector may lose in silence: several times what ordinary ones do."""
_CHECKED_TOKENS = 8
_SMALL_FLOAT16 = 2e-4
"""Where one value is larger, float16's smallest numbers are far below a hundredth of the norm."""
_SMALL_SCALE = {"int8": 1 / 127, "int4": 42}
"""Scales of vectors, or of groups, without a value that is a deviation off: ordinary ones have."""


class ChannelStats(NamedTuple):
    """Per-channel standardisation of the quantised encodings, from a calibration sample.

    Attributes:
        mean: (layers, hidden) float32.
        std: (layers, hidden) float32, > 0.
    """

    mean: Tensor
    std: Tensor


class Encoded(NamedTuple):
    """Codes and scales of encoded hidden states.

    Attributes:
        codes: (tokens, layers, `Encoding.codes_size`) in the encoding's torch dtype.
        scale: (tokens, layers, *`Encoding.scale_shape`), or None for float encodings.
        nonfinite: values that were NaN, infinite or too large for the encoding, and were replaced.
    """

    codes: Tensor
    scale: Tensor | None
    nonfinite: int


def encode(
    hidden_states: Tensor,
    encoding: Encoding,
    stats: ChannelStats | None = None,
    *,
    nonfinite: NonFinite = "error",
    out: Tensor | None = None,
) -> Encoded:
    """Encode hidden states on the device they are on.

    Args:
        hidden_states: (tokens, layers, hidden), any float dtype.
        encoding: Encoding from `layout.get_encoding`.
        stats: channel statistics on the same device; required by the quantised encodings.
        nonfinite: Treatment of NaN, infinity and values too large for the encoding: refuse
            them, or replace and count them. Replaced, NaN becomes the channel's mean, the others
            the largest value beside them in the token's group of channels; in a float encoding,
            NaN becomes 0 and the others the largest finite number.
        out: room for the codes on that device, of any strides; by default new memory, which costs
            as much as encoding a float does. What is in it after an error has no meaning.

    Raises:
        InputError: the encoding needs statistics, or does not take that number of channels.
        NonFiniteError: there is such a value, and ``nonfinite`` is "error"; the message names the
            token and layer of the first.
    """
    tokens, layers, hidden = hidden_states.shape
    device = hidden_states.device
    shape = (tokens, layers, encoding.codes_size(hidden))
    codes = torch.empty(shape, dtype=encoding.torch_dtype, device=device) if out is None else out
    scratch = _scratch(hidden_states.shape, device)
    quantiser = _QUANTISERS.get(encoding.name)
    if quantiser is None:
        total = torch.empty((tokens, layers), dtype=codes.dtype, device=device)
        as_given = hidden_states.dtype == codes.dtype
        for block in _blocks(tokens, len(scratch)):
            cast = codes[block].copy_(hidden_states[block])
            # what was read is nearer than what was just written
            torch.sum(hidden_states[block] if as_given else cast, dim=-1, out=total[block])
        # Only finite values have a finite sum, and sums take a fortieth of `isfinite` for all.
        # They are of what was cast: so they also find what overflowed in that.
        if bool(torch.isfinite(total).all()):
            return Encoded(codes, None, 0)
        finite = torch.isfinite(codes)
        count = int((~finite).sum())
        if count and nonfinite == "error":
            _raise_non_finite(hidden_states, finite.all(dim=-1), encoding)
        return Encoded(codes.nan_to_num_(nan=0.0), None, count)
    if stats is None:
        raise InputError(f"encoding {encoding.name} needs channel statistics to standardise with")
    inverse_std = stats.std.reciprocal()
    groups = encoding.scale_shape(hidden)
    scale = torch.empty((tokens, layers, *groups), dtype=encoding.scale_torch_dtype, device=device)
    step = torch.empty((tokens, layers, *groups), device=device)
    moments = ChannelStats(stats.mean, inverse_std)
    if not _encoded_by_kernel(hidden_states, encoding, moments, codes, scale, step):
        for block in _blocks(tokens, len(scratch)):
            # copy, then in-place: mixed dtypes or fresh memory would take several times longer
            h = hidden_states[block]
            z = scratch[: len(h)].copy_(h).sub_(stats.mean).mul_(inverse_std)
            quantiser.quantise_(z, codes[block], scale[block], step[block])
    fits = (step <= quantiser.largest_step).reshape(tokens, layers, -1).all(dim=-1)
    if bool(fits.all()):
        return Encoded(codes, scale, 0)
    if nonfinite == "error":
        _raise_non_finite(hidden_states, fits, encoding)
    token, layer = torch.nonzero(~fits, as_tuple=True)
    z = (hidden_states[token, layer].float() - stats.mean[layer]) * inverse_std[layer]
    count = quantiser.clip_(z)
    new_codes, new_scale = codes[token, layer], scale[token, layer]
    quantiser.quantise_(z, new_codes, new_scale, step[token, layer])
    codes[token, layer], scale[token, layer] = new_codes, new_scale
    return Encoded(codes, scale, count)


def lossy_layer(
    hidden_states: Tensor, encoded: Encoded, encoding: Encoding, stats: ChannelStats | None
) -> tuple[float, str] | None:
    """Measure on a few tokens what an encoding loses of values that are small.

    float16 has no numbers below 6e-8, and the quantised encodings no digits for vectors that are
    thousands of times smaller than those of the calibration sample: gradients that shrink while a
    model trains, say. bfloat16 and float32 keep them.

    Args:
        hidden_states: (tokens, layers, hidden) as they were given.
        encoded: Codes that `encode` made of them, without replaced values.
        encoding: Encoding of the codes.
        stats: Channel statistics that they were made with, or None.

    Returns:
        Of the layer in which tokens lose most of their norm: the part that half of them lose, from
        0 to 1, and a sentence about it; None where no layer loses several times what is ordinary.
    """
    if encoding.name not in _MOST_LOST:
        return None
    some = slice(None, None, -(-len(hidden_states) // _CHECKED_TOKENS))
    # at first by what is at hand: the rest would double the time that short examples take
    if encoded.scale is None:
        usual_size = bool((hidden_states[some].abs().amax(dim=(0, 2)) > _SMALL_FLOAT16).all())
    else:
        usual_size = bool((encoded.scale[some] >= _SMALL_SCALE[encoding.name]).all())
    if usual_size:
        return None
    given = hidden_states[some].float()
    scale = None if encoded.scale is None else encoded.scale[some]
    lost = decode(encoded.codes[some], scale, stats).sub_(given)
    given, lost = given.double(), lost.double()  # squares of small numbers have no float32
    norms, errors = given.square().sum(dim=-1), lost.square().sum(dim=-1)
    # (tokens, layers); a vector of zeros has nothing to lose
    part = (errors / norms).sqrt().masked_fill(norms == 0, torch.nan)
    usual = part.nanmedian(dim=0).values.nan_to_num()
    layer = int(usual.argmax())
    if (most := float(usual[layer])) <= _MOST_LOST[encoding.name]:
        return None
    small = norms[part[:, layer] >= most, layer].median()
    value = float((small / given.shape[-1]).sqrt())
    said = (
        f"layer {layer} of those stored: values of about {value:.1g} lose {min(most, 1):.0%} of "
        f"themselves in {encoding.name}; choose encoding bfloat16 or float32, or bring all values "
        "to one size"
    )
    return min(most, 1.0), said


def decode(
    codes: Tensor,
    scale: Tensor | None = None,
    stats: ChannelStats | None = None,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Decode codes on the device they are on: the inverse of `encode`.

    Args:
        codes: (tokens, layers, width) as `encode` gives them, in any memory layout.
        scale: (tokens, layers, …) likewise, for the quantised encodings.
        stats: channel statistics for the quantised encodings, on the same device.
        dtype: Type of the result; the arithmetic is float32 whatever it is.
        out: contiguous memory of the result's shape, dtype and device; new memory by default.

    Returns:
        Hidden states (tokens, layers, hidden), contiguous. Contiguous float codes of the same dtype
        are returned as they are, unless there is ``out``.

    Raises:
        InputError: quantised codes without their scale or statistics.
    """
    encoding = _BY_DTYPE[codes.dtype]
    quantiser = _QUANTISERS.get(encoding.name)
    if quantiser is None:
        if out is not None:
            return out.copy_(codes)
        return codes.to(dtype, memory_format=torch.contiguous_format).contiguous()
    if scale is None or stats is None:
        raise InputError(f"{encoding.name} codes need their scale and channel statistics")
    shape = (*codes.shape[:2], stats.mean.shape[-1])
    hidden_states = torch.empty(shape, dtype=dtype, device=codes.device) if out is None else out
    if _decoded_by_kernel(codes, scale, stats, encoding, hidden_states):
        return hidden_states
    scratch = _scratch(shape, codes.device)
    for block in _blocks(len(codes), len(scratch)):
        out = hidden_states[block]
        h = out if dtype == torch.float32 else scratch[: len(out)]
        quantiser.dequantise_(codes[block], scale[block], h)
        if h.is_cpu:
            # each step rounded, as NumPy and the kernels do it: `addcmul` may round once for both
            h.mul_(stats.std).add_(stats.mean)
        else:
            torch.addcmul(stats.mean, h, stats.std, out=h)
        if dtype != torch.float32:
            out.copy_(h)
    return hidden_states


def decode_numpy(
    codes: npt.NDArray[Any],
    scale: npt.NDArray[Any] | None,
    stats: ChannelStats | None,
    encoding: Encoding,
    out: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """Decode stored codes (bfloat16 as uint16 bits) to float32 in numpy, as Dask tasks do.

    Args:
        codes: (tokens, layers, width) in the encoding's Zarr dtype.
        scale: (tokens, layers, …), for the quantised encodings.
        stats: channel statistics, for the quantised encodings.
        encoding: Encoding from `layout.get_encoding`.
        out: room for the result, (tokens, layers, hidden) of any strides; new memory by default.

    Raises:
        InputError: quantised codes without their scale or statistics.
    """
    quantiser = _QUANTISERS.get(encoding.name)
    if quantiser is not None and (scale is None or stats is None):
        raise InputError(f"{encoding.name} codes need their scale and channel statistics")
    hidden = codes.shape[2] if stats is None or quantiser is None else stats.mean.shape[-1]
    shape = (*codes.shape[:2], hidden)
    states = np.empty(shape, np.float32) if out is None else out
    for block in _blocks(len(codes), _block_tokens(shape)):
        if encoding.name == "bfloat16":
            states[block] = (codes[block].astype(np.uint32) << 16).view(np.float32)
        elif quantiser is None or scale is None or stats is None:
            states[block] = codes[block]
        else:
            h = quantiser.dequantise_numpy(codes[block], scale[block])
            h *= stats.std.numpy()
            np.add(h, stats.mean.numpy(), out=states[block])
    return states


def _encoded_by_kernel(
    hidden_states: Tensor,
    encoding: Encoding,
    moments: ChannelStats,
    codes: Tensor,
    scale: Tensor,
    step: Tensor,
) -> bool:
    """Fill codes, scale and wanted step by a compiled kernel; whether there is one for them.

    Args:
        hidden_states: (tokens, layers, hidden).
        encoding: The quantised encoding.
        moments: Mean of each channel, and the reciprocal of its deviation.
        codes: (tokens, layers, width).
        scale: Contiguous.
        step: Likewise.
    """
    bits = _BITS.get(hidden_states.dtype)
    if bits is None or not _in_rows(hidden_states, codes):
        return False
    kernel = KERNELS.get(f"encode_{encoding.name} {_SAME_BITS[bits]}", 4 * hidden_states.numel())
    if kernel is None:
        return False
    given = hidden_states.detach().view(bits)
    of_int4 = (_flat(step), _STEPS.numpy(), _MIDDLES.numpy(), encoding.group)
    kernel(
        _flat(given),
        given.stride()[:2],
        hidden_states.dtype == torch.float16,
        *(_flat(x.contiguous()) for x in moments),
        _flat(codes),
        codes.stride()[:2],
        _flat(scale),
        *(of_int4 if encoding.group else ()),
        *hidden_states.shape[:2],
    )
    if not encoding.group:
        step.copy_(scale)
    return True


def _decoded_by_kernel(
    codes: Tensor, scale: Tensor, stats: ChannelStats, encoding: Encoding, out: Tensor
) -> bool:
    """Fill hidden states, (tokens, layers, hidden), by a compiled kernel; whether there is one."""
    bits = _BITS.get(out.dtype)
    if bits is None or out.dtype == torch.float16 or not _in_rows(codes, out):
        return False
    kernel = KERNELS.get(f"decode_{encoding.name} {_SAME_BITS[bits]}", 4 * out.numel())
    if kernel is None:
        return False
    filled = out if out.dtype == torch.float32 else out.view(bits)
    kernel(
        _flat(codes),
        codes.stride()[:2],
        _flat(scale.contiguous()),
        *((_STEPS.numpy(), encoding.group) if encoding.group else ()),
        *(_flat(x.contiguous()) for x in stats),
        _flat(filled),
        filled.stride()[:2],
        *out.shape[:2],
    )
    return True


_BITS = {
    torch.float32: torch.uint32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.uint16,
}
"""Types of the bits of hidden states, of which kernels know no others."""
_SAME_BITS = {torch.uint32: "float32", torch.uint16: "bfloat16"}


def _in_rows(*arrays: Tensor) -> bool:
    """Whether arrays (tokens, layers, …) have values, here, and each row of them in one piece."""
    return all(x.is_cpu and x.numel() > 0 and x.stride(-1) == 1 for x in arrays)


def _flat(x: Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor, whose last axis is contiguous, from its first value to its last."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    flat: npt.NDArray[Any] = x.detach().as_strided((size,), (1,)).numpy()
    return flat


def squared_steps(
    scale: npt.NDArray[Any], stats: ChannelStats, encoding: Encoding
) -> npt.NDArray[np.float64]:
    """Squared step between neighbouring values, summed over tokens: (layers, hidden).

    The error of rounding to a step is uniform, and has a twelfth of its square for variance.

    Args:
        scale: (tokens, layers, …) of a quantised encoding, as it is stored.
        stats: Channel statistics of the layers.
        encoding: The quantised encoding.
    """
    total = np.zeros(stats.std.shape)
    quantiser = _QUANTISERS[encoding.name]
    for block in _blocks(len(scale), _block_tokens((len(scale), *stats.std.shape))):
        steps = quantiser.steps_numpy(scale[block], stats.std.shape[-1])
        total += np.square(steps).sum(axis=0)
    return total * np.square(stats.std.numpy().astype(np.float64))


def _scratch(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Room for the float32 form of as many tokens as fit the cache; of all on an accelerator."""
    tokens, *rest = shape
    if device.type == "cpu":
        tokens = _block_tokens(shape)
    return torch.empty((tokens, *rest), device=device)


def _block_tokens(shape: tuple[int, ...]) -> int:
    """How many tokens of float32 hidden states (tokens, layers, hidden) fit the cache."""
    return max(1, _BLOCK_BYTES // max(1, 4 * shape[1] * shape[2]))


def _blocks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(i, i + size) for i in range(0, tokens, size))


def _raise_non_finite(hidden_states: Tensor, fits: Tensor, encoding: Encoding) -> None:
    token, layer = torch.nonzero(~fits)[0].tolist()
    value = hidden_states[token, layer]
    if bool(torch.isfinite(value).all()):
        raise NonFiniteError(
            f"token {token}, layer {layer}: {value.abs().max().item():.6g} does not fit "
            f"{encoding.name}; choose encoding bfloat16 or float32"
        )
    raise NonFiniteError(
        f"token {token}, layer {layer}: the hidden state holds NaN or infinity; "
        "check the snapshot, or run the forward pass in float32"
    )
