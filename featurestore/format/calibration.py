"""Calibration of a quantised encoding: channel statistics of a sample, and the error they leave.

A few tokens of some encoders (the first of GPT-2 and Llama, delimiters) have one or two channels
that are hundreds or thousands of their usual deviations off (Sun et al. 2024, "Massive activations
in large language models"). Plain moments of a channel would follow them, and the codes of all other
tokens would tell nothing of it. So a channel's mean and deviation are those of the other tokens.
Its deviation is then widened where a token reaches beyond `REACH` of it, as all channels of a token
share what is left of the codes; but only so far that other tokens keep the channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.format.encoding import ChannelStats, decode, encode
from bertvision.featurestore.format.layout import ENCODINGS, Encoding, get_encoding
from bertvision.featurestore.format.transform import LayerMoments, Transform, fit

REACH = 8.0
"""Deviations that a token may be off in a channel before the channel is widened: in int8 a token's
error in the other channels is at most 8 / 127 / √12 = 1.8 % of the deviations. Ordinary tokens of
BERT seldom are so far off; its [CLS] is 13 off where windows are long."""
_FAR = 5.0
"""A token is left out of a layer's moments where it is so many times as far from the middle as half
of the tokens are. The farthest of all-MiniLM-L6-v2 on SQuAD is 1.3 times, in the last layer 3.6,
and there, fine-tuned, more than 5."""
_RARE = 1 / 3
"""Tokens are left out only where they are no more than this part of the sample, as the first of a
window of three is: more are no exception."""
POOLED = "pooled"
"""Kind of the vectors of a pooling. None of them is left out: those far from the others may well be
the smaller of two classes, and nothing else is stored of them."""
ERROR = "error_"
"""Prefix of the arrays with the error of a kind of token."""
_MIDDLE_TOKENS = 128
_SAMPLE = 256
"""Tokens of each kind that the error is measured on: they are kept in memory."""
_LARGEST_ERROR = {"int8": 0.02, "int4": 0.3}
"""Beyond the error of what is no exception: 0.7 to 0.8 % and 10 to 11 %, MiniLM's [CLS]
and [SEP] 1.8 and 21 % at most, but for the last layer fine-tuned."""


class Calibration(NamedTuple):
    """Channel statistics and errors that a quantised encoding takes from a sample.

    Attributes:
        stats: Statistics for the encoding.
        errors: by kind of token, (layers,) float32: the mean over tokens of the root mean square
            error over channels, in deviations of the channel.
        plain: the moments of all tokens alike, which older versions encoded with.
        transform: Coder of the layers, of the transform alone.
        compared: By encoding, the error that it leaves, the mean over tokens and layers.
    """

    stats: ChannelStats
    errors: Mapping[str, npt.NDArray[np.float32]] = {}
    plain: ChannelStats | None = None
    transform: Transform | None = None
    compared: Mapping[str, float] = {}

    def as_stored(self, kinds: Sequence[str]) -> Calibration:
        """As the version made it that stored errors of these kinds: with none, an earlier one."""
        return self if kinds or self.plain is None else Calibration(self.plain)

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """Stored arrays by name, (layers, …) each, but for the tables of a transform."""
        mean, std = (values.numpy() for values in self.stats)
        errors = {f"{ERROR}{kind}": error for kind, error in self.errors.items()}
        if self.transform is not None:
            return self.transform.arrays | errors
        return {"channel_mean": mean, "channel_std": std, **errors}


def is_beyond_promise(error: float, encoding: str) -> bool:
    """Whether an error is beyond what the encoding promises.

    That is 2 % of int8, 30 % of int4, and of the transform one and a half times what was asked for.

    Args:
        error: Error of a kind of token in a layer, in deviations of the channel.
        encoding: one that is calibrated.
    """
    asked = get_encoding(encoding).error
    return error > (1.5 * asked if asked else _LARGEST_ERROR[encoding])


class Calibrator:
    """Calibrates an encoding on blocks of hidden states.

    Args:
        encoding: one that is calibrated.
        kinds: (tokens,) names, of all tokens that will be added.
    """

    def __init__(self, encoding: Encoding, kinds: npt.NDArray[np.str_]) -> None:
        self._encoding = encoding
        self._kinds = kinds
        self._accumulator = ChannelStatsAccumulator(rare=0 if (kinds == POOLED).any() else _RARE)
        self._seen = 0
        self._measured = np.zeros(len(kinds), bool)
        for kind in np.unique(kinds):
            rows = np.flatnonzero(kinds == kind)
            self._measured[
                rows[np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLE)).astype(int)]
            ] = True
        self._sample: list[Tensor] = []
        self._moments = LayerMoments() if encoding.transformed else None

    def add(self, hidden_states: Tensor, whole: Tensor) -> None:
        """Add a block, (tokens, layers, hidden), leaving out what is not ``whole``, (tokens,)."""
        block = slice(self._seen, self._seen + len(hidden_states))
        self._seen = block.stop
        if not bool(whole.any()):
            self._measured[block] = False
            return
        self._measured[block] &= whole.cpu().numpy()
        rows = torch.from_numpy(np.flatnonzero(self._measured[block])).to(hidden_states.device)
        self._sample.append(hidden_states[rows])
        usable = hidden_states if bool(whole.all()) else hidden_states[whole]
        self._accumulator.add(usable)
        if self._moments is not None:
            self._moments.add(usable, _far_tokens(usable).any(dim=1))

    def result(self) -> Calibration:
        """The calibration.

        Raises:
            InputError: nothing was added.
            NonFiniteError: the sample holds NaN or infinity.
        """
        sample = torch.cat(self._sample)
        spread = self._accumulator.spread()
        kinds = self._kinds[: self._seen][self._measured[: self._seen]]
        transform = None
        if self._moments is None:
            stats = self._accumulator.result(self._encoding.levels)
            error = encoding_error(sample, self._encoding, stats, spread)
        else:
            stats = self._accumulator.ordinary()
            usual = torch.from_numpy(kinds == "ordinary")
            usual = sample[usual] if bool(usual.any()) else sample
            transform = fit(self._moments, stats, usual.cpu(), self._encoding.error)
            lost = transform.restored_states(sample.cpu()).sub_(sample.cpu()).div_(spread.cpu())
            error = lost.square_().mean(dim=2).sqrt_().numpy()
        errors = {str(kind): error[kinds == kind].mean(axis=0) for kind in np.unique(kinds)}
        compared = {self._encoding.name: float(error.mean())}
        for name, other in ENCODINGS.items():
            if name not in compared and sample.shape[-1] % other.packed == 0:
                stats_of_other = self._accumulator.result(other.levels or None)
                compared[name] = float(encoding_error(sample, other, stats_of_other, spread).mean())
        return Calibration(stats, errors, self._accumulator.result(), transform, compared)


def encoding_error(
    hidden_states: Tensor, encoding: Encoding, stats: ChannelStats, spread: Tensor
) -> npt.NDArray[np.float32]:
    """Relative error of each token in each layer, (tokens, layers).

    Args:
        hidden_states: (tokens, layers, hidden).
        encoding: quantised.
        stats: Channel statistics to encode with.
        spread: (layers, hidden) deviation of each channel.

    Returns:
        Root mean square over the channels of (decoded − given) / spread.
    """
    tokens, layers, _ = hidden_states.shape
    error = np.empty((tokens, layers), np.float32)
    for layer in range(layers):  # one at a time: the sample is large enough
        h = hidden_states[:, layer : layer + 1]
        one = slice(layer, layer + 1)
        moments = ChannelStats(stats.mean[one].to(h.device), stats.std[one].to(h.device))
        encoded = encode(h, encoding, moments, nonfinite="record")
        lost = decode(encoded.codes, encoded.scale, moments).sub_(h)
        lost.div_(spread[one].to(h.device))
        error[:, layer] = lost.square_().mean(dim=(1, 2)).sqrt_().cpu().numpy()
    return error


class ChannelStatsAccumulator:
    """Streams (tokens, layers, hidden) blocks into `ChannelStats`, in float64 about a shift.

    Subtracting the first block's mean before squaring keeps the digits that the plain sum of
    squares loses on channels whose mean is far larger than their spread (Chan et al. 1983).
    """

    def __init__(self, rare: float = _RARE) -> None:
        """Begin with nothing.

        Args:
            rare: part of the tokens up to which those with massive activations are left out.
        """
        self._rare = rare
        self._n = 0
        self._shift: Tensor | None = None
        self._sum: Tensor
        self._square: Tensor
        self._far_n: Tensor
        self._far_sum: Tensor
        self._far_square: Tensor
        self._low: Tensor
        self._high: Tensor

    def add(self, hidden_states: Tensor) -> None:
        """Add a block of hidden states, (tokens, layers, hidden)."""
        is_first = self._shift is None
        if self._shift is None:
            self._shift = hidden_states.new_zeros(hidden_states.shape[1:], dtype=torch.float64)
            self._sum, self._square, self._far_sum, self._far_square = (
                torch.zeros_like(self._shift) for _ in range(4)
            )
            self._far_n = self._sum.new_zeros((len(self._sum), 1))
            self._low, self._high = (hidden_states[0].double().clone() for _ in range(2))
        self._n += len(hidden_states)
        far = _far_tokens(hidden_states)
        self._far_n += far.sum(dim=0).unsqueeze(-1)
        for layer, some_are_far in enumerate(far.any(dim=0).tolist()):
            # one at a time: float64 of all would be fresh memory, several times as slow
            x = hidden_states[:, layer].double()
            if is_first:
                self._shift[layer] = x.mean(dim=0)
            self._low[layer] = torch.minimum(self._low[layer], x.amin(dim=0))
            self._high[layer] = torch.maximum(self._high[layer], x.amax(dim=0))
            x = x - self._shift[layer]  # not in place: float64 may have been given
            if some_are_far:
                # apart: of a sum of both the squares of the far would leave no digits for others
                of_far = x[far[:, layer]]
                self._far_sum[layer] += of_far.sum(dim=0)
                self._far_square[layer] += of_far.square_().sum(dim=0)
                x[far[:, layer]] = 0
            self._sum[layer] += x.sum(dim=0)
            self._square[layer] += x.square_().sum(dim=0)

    def result(self, levels: int | None = None) -> ChannelStats:
        """Mean and standard deviation; a constant channel gets the layer's median, and stays exact.

        Args:
            levels: Levels of the codes that they are for; None gives the moments of all tokens
                alike.

        Raises:
            InputError: nothing was added.
            NonFiniteError: the sample holds NaN or infinity.
        """
        mean, std = self._moments(without_far=levels is not None)
        if levels is not None:
            reach = torch.maximum(self._high - mean, mean - self._low) / std
            # an ordinary token, 4 deviations off at most, keeps a step of a quarter of one
            std = std * (reach / REACH).clamp(1, max(1, levels // 16))
        return ChannelStats(mean.float().cpu(), std.float().cpu())

    def ordinary(self) -> ChannelStats:
        """Mean and standard deviation of ordinary tokens, with which the transform standardises."""
        mean, std = self._moments(without_far=True)
        return ChannelStats(mean.float().cpu(), std.float().cpu())

    def spread(self) -> Tensor:
        """Deviation of each channel, (layers, hidden) float32, as ordinary tokens have it."""
        return self._moments(without_far=True)[1].float()

    def _moments(self, *, without_far: bool) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel."""
        if self._shift is None:
            raise InputError("no hidden states were given to calibrate on")
        rare = self._far_n <= (self._rare if without_far else 0) * self._n  # (layers, 1)
        n = self._n - self._far_n * rare
        total = self._sum + self._far_sum * ~rare
        square = self._square + self._far_square * ~rare
        mean = total / n
        std = (square / n - mean.square()).clamp_min(0).sqrt()
        mean = mean + self._shift
        if not bool(torch.isfinite(mean).all() and torch.isfinite(std).all()):
            raise NonFiniteError("the calibration sample holds NaN or infinity: check the snapshot")
        # a channel that is constant but for rounding: its codes are 0, whatever it is divided by
        constant = std <= 1e-6 * mean.abs()
        usual = std.masked_fill(constant, torch.nan).nanmedian(dim=1, keepdim=True).values
        usual = usual.nan_to_num(nan=1.0)
        # or one that is off in the sample: where it is on, it would take a token's whole range
        std = torch.where(constant | (std < 1e-6 * usual), usual, std)
        return mean, std.clamp_min(torch.finfo(torch.float32).tiny)


def _far_tokens(hidden_states: Tensor) -> Tensor:
    """Tokens of a block that are far from all others in a layer, (tokens, layers) bool."""
    every = -(-len(hidden_states) // _MIDDLE_TOKENS)
    middle = hidden_states[::every].median(dim=0).values
    layers = zip(hidden_states.unbind(1), middle, strict=True)
    distance = torch.stack([torch.linalg.vector_norm(h - m, dim=-1) for h, m in layers], dim=1)
    usual = distance.median(dim=0).values
    far: Tensor = (distance > _FAR * usual) & (usual > 0)
    return far
