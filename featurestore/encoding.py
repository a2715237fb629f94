"""Hidden states ↔ codes: float32, bfloat16, float16 and int8, in torch for devices, numpy for Dask.

int8 is standardised per channel before it is scaled per (token, layer), because BERT's outlier
channels would otherwise take the whole range of a token:

    h ≈ scale[t, l] · channel_std[l, c] · q + channel_mean[l, c]        q ∈ [−127, 127]

The float encodings have neither scale nor channel statistics. bfloat16 is no Zarr data type: its
bits are stored as uint16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError

EncodingName = Literal["int8", "bfloat16", "float16", "float32"]
_BLOCK_BYTES = 1 << 19  # float32 scratch that stays in the L2 cache
_INT8_MAX = 127


class Encoding(NamedTuple):
    """How one encoding is held in torch and in Zarr."""

    name: EncodingName
    torch_dtype: torch.dtype
    zarr_dtype: str

    @property
    def quantised(self) -> bool:
        """Whether codes come with a scale per (token, layer) and channel statistics."""
        return self.name == "int8"

    @property
    def itemsize(self) -> int:
        """Bytes per hidden-state value."""
        return np.dtype(self.zarr_dtype).itemsize


ENCODINGS: dict[str, Encoding] = {
    "int8": Encoding("int8", torch.int8, "int8"),
    "bfloat16": Encoding("bfloat16", torch.bfloat16, "uint16"),
    "float16": Encoding("float16", torch.float16, "float16"),
    "float32": Encoding("float32", torch.float32, "float32"),
}


def get_encoding(name: str) -> Encoding:
    """The encoding of that name.

    Raises:
        InputError: there is none.
    """
    if name not in ENCODINGS:
        raise InputError(
            f"unknown encoding {name!r}: choose one of {', '.join(get_args(EncodingName))}"
        )
    return ENCODINGS[name]


class ChannelStats(NamedTuple):
    """Per-channel standardisation of the integer encodings, from a calibration sample.

    Attributes:
        mean: (layers, hidden) float32.
        std: (layers, hidden) float32, > 0.
    """

    mean: Tensor
    std: Tensor


class ChannelStatsAccumulator:
    """Streams (tokens, layers, hidden) blocks into `ChannelStats`, in float64 about a shift.

    Subtracting the first block's mean before squaring keeps the digits that the plain sum of
    squares loses on channels whose mean is far larger than their spread (Chan et al. 1983).
    """

    def __init__(self) -> None:
        self._n = 0
        self._shift: Tensor | None = None
        self._sum: Tensor
        self._square: Tensor

    def add(self, hidden_states: Tensor) -> None:
        """Add a block of hidden states, (tokens, layers, hidden)."""
        x = hidden_states.double()
        if self._shift is None:
            self._shift = x.mean(dim=0)
            self._sum = torch.zeros_like(self._shift)
            self._square = torch.zeros_like(self._shift)
        x = x - self._shift
        self._n += x.shape[0]
        self._sum += x.sum(dim=0)
        self._square += x.square().sum(dim=0)

    def result(self) -> ChannelStats:
        """Mean and standard deviation; a constant channel gets std 1, so that it stays exact.

        Raises:
            InputError: nothing was added.
            NonFiniteError: the sample holds NaN or infinity.
        """
        if self._shift is None:
            raise InputError("no hidden states were given to calibrate on")
        mean = self._sum / self._n
        std = (self._square / self._n - mean.square()).clamp_min(0).sqrt()
        mean = mean + self._shift
        if not bool(torch.isfinite(mean).all() and torch.isfinite(std).all()):
            raise NonFiniteError("the calibration sample holds NaN or infinity: check the snapshot")
        std[std < 1e-6 * mean.abs().clamp_min(1e-6)] = 1.0
        return ChannelStats(mean.float().cpu(), std.float().cpu())


def encode(
    hidden_states: Tensor, encoding: Encoding, stats: ChannelStats | None = None
) -> tuple[Tensor, Tensor | None]:
    """Encode hidden states on the device they are on.

    Args:
        hidden_states: (tokens, layers, hidden), any float dtype.
        encoding: from `get_encoding`.
        stats: channel statistics on the same device; required by the quantised encodings.

    Returns:
        Codes (tokens, layers, hidden) in the encoding's torch dtype, and the scale
        (tokens, layers) float32, or None for float encodings.

    Raises:
        NonFiniteError: a value is NaN, infinite, or too large for float16; the message names the
            token and layer of the first.
    """
    codes = torch.empty(
        hidden_states.shape, dtype=encoding.torch_dtype, device=hidden_states.device
    )
    if not encoding.quantised:
        codes.copy_(hidden_states)
        # Checked after the cast: it also finds what overflowed in it.
        if not bool(torch.isfinite(codes).all()):
            _raise_non_finite(hidden_states, codes, encoding)
        return codes, None
    if stats is None:
        raise InputError(f"encoding {encoding.name} needs channel statistics to standardise with")
    inverse_std = stats.std.reciprocal()
    shape = hidden_states.shape[:2]
    scale = torch.empty(shape, dtype=torch.float32, device=hidden_states.device)
    for block in _blocks(hidden_states):
        z = hidden_states[block].float()
        z = (
            z.sub_(stats.mean)
            if z.data_ptr() != hidden_states[block].data_ptr()
            else z - stats.mean
        )
        z.mul_(inverse_std)
        absmax = torch.maximum(z.amax(dim=-1), z.amin(dim=-1).neg())
        torch.mul(absmax, 1 / _INT8_MAX, out=scale[block])
        z.mul_((_INT8_MAX / absmax.clamp_min(1e-30)).unsqueeze(-1)).round_()
        codes[block].copy_(z)
    if not bool(torch.isfinite(scale).all()):
        _raise_non_finite(hidden_states, scale, encoding)
    return codes, scale


def decode(
    codes: Tensor,
    scale: Tensor | None = None,
    stats: ChannelStats | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode codes on the device they are on: the inverse of `encode`.

    Args:
        codes: (tokens, layers, hidden).
        scale: (tokens, layers) float32, for int8.
        stats: channel statistics for int8, on the same device.
        dtype: of the result; the arithmetic is float32 whatever it is.

    Returns:
        Hidden states (tokens, layers, hidden). Float codes of the same dtype are returned as is.
    """
    if scale is None or stats is None:
        return codes.to(dtype)
    hidden_states = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for block in _blocks(codes):
        out = hidden_states[block]
        # copy, then in-place products: several times faster than one product of mixed dtypes
        h = out.copy_(codes[block]) if dtype == torch.float32 else codes[block].float()
        h.mul_(scale[block].unsqueeze(-1)).mul_(stats.std).add_(stats.mean)
        if dtype != torch.float32:
            out.copy_(h)
    return hidden_states


def decode_numpy(
    codes: npt.NDArray[Any],
    scale: npt.NDArray[np.float32] | None,
    stats: ChannelStats | None,
    encoding: Encoding,
) -> npt.NDArray[np.float32]:
    """Decode stored codes (bfloat16 as uint16 bits) to float32 in numpy, as Dask tasks do.

    Args:
        codes: (tokens, layers, hidden) in the encoding's Zarr dtype.
        scale: (tokens, layers) float32, for int8.
        stats: channel statistics, for int8.
        encoding: from `get_encoding`.
    """
    if encoding.name == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    hidden_states: npt.NDArray[np.float32] = codes.astype(np.float32)
    if scale is not None and stats is not None:
        hidden_states *= scale[..., None]
        hidden_states *= stats.std.numpy()
        hidden_states += stats.mean.numpy()
    return hidden_states


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of tokens whose float32 form fits the cache; one slice on an accelerator."""
    per_token = max(1, x.shape[1] * x.shape[2] * 4)
    step = max(1, _BLOCK_BYTES // per_token) if x.device.type == "cpu" else max(1, len(x))
    return (slice(i, i + step) for i in range(0, len(x), step))


def _raise_non_finite(hidden_states: Tensor, encoded: Tensor, encoding: Encoding) -> None:
    token, layer = (int(i) for i in torch.nonzero(~torch.isfinite(encoded))[0][:2])
    value = hidden_states[token, layer]
    if bool(torch.isfinite(value).all()):
        raise NonFiniteError(
            f"token {token}, layer {layer}: {value.abs().max().item():.6g} does not fit "
            f"{encoding.name}; choose encoding bfloat16, int8 or float32"
        )
    raise NonFiniteError(
        f"token {token}, layer {layer}: the hidden state holds NaN or infinity; "
        "check the snapshot, or run the forward pass in float32"
    )
