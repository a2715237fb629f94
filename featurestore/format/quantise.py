"""Standardised values ↔ integer codes and their scale: the arithmetic of int8 and int4.

    z ≈ step · q        q from −levels to levels, one step per group of channels

int8 has one group of all channels and keeps the step as it is, in float32. int4 has groups of 64
channels and keeps of each step only its logarithm, in a byte: step = 2^((scale − 64) / 8), so that
a value costs 4.125 bits. Rounded to the nearest eighth of an octave it lets |q| reach 7.3, which
still rounds to 7: no value is off by more than half a step. q + 8 is a nibble; the low nibbles are
the first half of the channels, the high ones the second half, because long runs decode fastest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
            s.div_(self.levels)
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
