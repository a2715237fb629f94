"""The encoding ``transform:ERROR``: few bits for an error that was asked for, layers coupled.

A layer is predicted from the one below it as it will be decoded, so that errors do not add up; what
is left is rotated to its principal axes (Karhunen–Loève), rounded to one step, and its values are
coded by how wide they are. With z standardised by channel, of layer l and token t:

    p = predictor[l] · ẑ[l − 1]      ẑ[l] = p + basis[l] · c      c ≈ basis[l]ᵀ · (z[l] − p)

One step for all axes is reverse water-filling: each axis gets the bits that its variance is worth,
and those narrower than a step nearly none (Cover & Thomas 2006, "Elements of information theory",
section 10.3.3; rounding and entropy coding is a quarter of a bit above it, Gish & Pierce 1968).
Every token has a class, how much wider its coefficients are than usual, which moves their tables;
beyond sixteen times the step grows with it: massive activations of single tokens cost little, and
lose what they lose in the other encodings.

Mean, deviation, predictor, basis, step and tables are taken from the calibration sample and stored
with the split. The code of an example in a layer stands alone; to decode it takes the example's
codes of all stored layers below. Encoder and decoder agree on the integers; floats may differ in
their last bits between machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import CorruptStoreError, InputError, NonFiniteError
from bertvision.featurestore.format import kernels
from bertvision.featurestore.format.compiled import KERNELS
from bertvision.featurestore.format.encoding import ChannelStats

_Codes: TypeAlias = "npt.NDArray[np.uint16]"
_WIDTHS = np.exp2(np.arange(kernels.TOKEN_CLASSES) / 4 - kernels.NARROWEST / 4).astype(np.float32)
_MOST_CLASS = 1 << 10
_FINITE = ("channel_mean", "channel_std", "predictor", "basis", "step")
_NOISE = 1e-4
_SEARCHES = 12
_PRIOR = 20
"""Symbols by which a table of the sample is drawn to that of a Gaussian."""


class Coded(NamedTuple):
    """An example in one layer.

    Attributes:
        words: (n,) uint16.
        coefficients: (tokens, hidden) float32, as they will be decoded.
        classes: (tokens,) the class of each token.
        counts: (classes, symbols) how often each was used.
    """

    words: _Codes
    coefficients: npt.NDArray[np.float32]
    classes: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class _Decoded(NamedTuple):
    """Standardised values of a layer as they are decoded, (tokens, hidden), and tokens' classes."""

    values: Tensor
    classes: npt.NDArray[np.int64]


class Transform:
    """Encodes and decodes the layers of a split.

    Args:
        arrays: By name, as `ARRAYS` has them, of all stored layers.

    Raises:
        CorruptStoreError: They are not of a transform.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        frequencies = arrays["symbol_frequency"]
        classes, step = arrays["axis_class"], arrays["step"]
        if (
            frequencies.min() < 0
            or frequencies.max() > kernels.TOTAL  # before their sum, which could overflow
            or frequencies[:, -1].min() < 1
            or (frequencies.sum(axis=1) != kernels.TOTAL).any()
            or (np.diff(classes, axis=1) > 0).any()
            or classes.max() > _MOST_CLASS
            or classes.min() < -_MOST_CLASS
            or not all((arrays[name] > 0).all() for name in ("step", "channel_std"))
            or not all(np.isfinite(arrays[name]).all() for name in _FINITE)
        ):
            raise CorruptStoreError("the arrays of its transform contradict themselves")
        self._classes = np.ascontiguousarray(classes, np.int64)
        self._steps = step.astype(np.float32)
        self._mean, self._std = (
            torch.from_numpy(arrays[name]) for name in ("channel_mean", "channel_std")
        )
        self._frequencies = np.ascontiguousarray(frequencies, np.int64)
        self._starts = np.cumsum(self._frequencies, axis=1) - self._frequencies
        self.intervals = _intervals(self._frequencies)

    @cached_property
    def _matrices(self) -> list[tuple[Tensor, Tensor]]:
        """Predictor and basis of each layer, transposed to stand behind rows of tokens."""
        pairs = zip(self.arrays["predictor"], self.arrays["basis"], strict=True)
        return [
            tuple(torch.from_numpy(matrix.astype(np.float32)).T.contiguous() for matrix in pair)  # type: ignore[misc]
            for pair in pairs
        ]

    def standardised(self, hidden_states: Tensor, layer: int) -> Tensor:
        """Values of one layer, (tokens, hidden), in deviations of their channels."""
        return (hidden_states.float() - self._mean[layer]).div_(self._std[layer])

    def predicted(self, below: _Decoded | None, layer: int) -> Tensor:
        """Standardised values as far as the layer below tells, (tokens, hidden).

        Of a token whose activations there are massive it tells nothing: they come and go at once.

        Args:
            below: Decoded layer below; None of the first.
            layer: Place on the stored layer axis.
        """
        if below is None:
            return torch.zeros(1, self._mean.shape[1])
        prediction = below.values @ self._matrices[layer][0]
        if (massive := below.classes > kernels.WIDEST).any():
            prediction[torch.from_numpy(massive)] = 0
        return prediction

    def restored(self, prediction: Tensor, coefficients: npt.NDArray[Any], layer: int) -> Tensor:
        """Standardised values, (tokens, hidden), from prediction and coefficients."""
        return torch.addmm(prediction, torch.from_numpy(coefficients), self._matrices[layer][1])

    def encode(self, residual: Tensor, layer: int) -> Coded:
        """Code what a prediction leaves of an example.

        Args:
            residual: (tokens, hidden) float32.
            layer: Place on the stored layer axis.

        Raises:
            NonFiniteError: A value is too large.
        """
        tokens, hidden = residual.shape
        wanted = (residual @ self._matrices[layer][1].T).contiguous().numpy()
        decoded = np.empty_like(wanted)
        # a symbol of twelve bits, three of a larger value, and bits beside them: four words
        words = np.empty(4 * tokens * (hidden + 1) + 2 * kernels.LANES, np.uint16)
        counts = np.zeros(self._frequencies.size, np.int64)
        of_tokens = np.empty(tokens, np.int64)
        result = np.zeros(2, np.int64)
        KERNELS.require("transform_encode float32")(
            *(wanted.reshape(-1), self._classes[layer], self._steps[layer], _WIDTHS),
            *(_offset(float(self._steps[layer])), self._frequencies.reshape(-1)),
            *(self._starts.reshape(-1), decoded.reshape(-1), of_tokens, words, counts, result),
            *(tokens, hidden),
        )
        if result[1]:
            raise NonFiniteError(
                f"layer {layer} of those stored holds values that are too many deviations off for "
                "encoding transform: choose encoding bfloat16 or float32"
            )
        used = words[len(words) - result[0] :].copy()
        return Coded(used, decoded, of_tokens, counts.reshape(self._frequencies.shape))

    def decode(
        self, words: _Codes, tokens: int, layer: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Coefficients of an example in a layer, (tokens, hidden), and its tokens' classes.

        Args:
            words: (n,) uint16 of `encode`.
            tokens: Their number.
            layer: Place on the stored layer axis.

        Raises:
            CorruptStoreError: The words are not of so many tokens.
        """
        hidden = self._classes.shape[1]
        decoded, of_tokens = np.empty((tokens, hidden), np.float32), np.empty(tokens, np.int64)
        result = np.zeros(1, np.int64)
        KERNELS.require("transform_decode float32")(
            *(words, self._classes[layer], self._steps[layer], _WIDTHS),
            *(self.intervals, decoded.reshape(-1), of_tokens, result, tokens, hidden),
        )
        if result[0]:
            raise CorruptStoreError("its code does not decode")
        return decoded, of_tokens

    def encode_layers(self, states: Tensor, lengths: Sequence[int]) -> Iterator[list[_Codes]]:
        """Code the examples of a shard, a layer after another.

        Args:
            states: (tokens, layers, hidden) float32.
            lengths: (examples,) tokens of each.

        Yields:
            For each layer the words of each example.

        Raises:
            NonFiniteError: A value is too large.
        """
        below: _Decoded | None = None
        for layer in range(states.shape[1]):
            values = self.standardised(states[:, layer], layer)
            prediction = self.predicted(below, layer).expand_as(values)
            residual = (values - prediction).split(list(lengths))
            coded = [self.encode(part, layer) for part in residual]
            coefficients = np.concatenate([part.coefficients for part in coded])
            below = _Decoded(
                self.restored(prediction, coefficients, layer),
                np.concatenate([part.classes for part in coded]),
            )
            yield [part.words for part in coded]

    def restored_states(self, states: Tensor) -> Tensor:
        """States (tokens, layers, hidden) as they come out again, float32."""
        out = np.empty((states.shape[1], len(states), states.shape[2]), np.float32)
        codes = [layer[0] for layer in self.encode_layers(states, [len(states)])]
        self.decode_layers(codes, range(len(codes)), out)
        return torch.from_numpy(out).transpose(0, 1)

    def decode_layers(
        self, words: Sequence[_Codes], positions: Sequence[int], out: npt.NDArray[np.float32]
    ) -> None:
        """Fill the hidden states of an example.

        Args:
            words: Those of each stored layer up to the last one asked for.
            positions: Places on the stored layer axis.
            out: (layers asked for, tokens, hidden) float32.

        Raises:
            CorruptStoreError: The words are not of so many tokens.
        """
        below: _Decoded | None = None
        rows = torch.from_numpy(out)
        for layer, code in enumerate(words):
            coefficients, classes = self.decode(code, out.shape[1], layer)
            values = self.restored(self.predicted(below, layer), coefficients, layer)
            for place in (i for i, position in enumerate(positions) if position == layer):
                torch.addcmul(self._mean[layer], values, self._std[layer], out=rows[place])
            below = _Decoded(values, classes)


class LayerMoments:
    """Second moments of each layer and of each with the one below it, of a stream of blocks.

    In float32 about the mean of the first block, as `ChannelStatsAccumulator` has it; a block's
    sums are of a thousand tokens, and added in float64.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._shift: Tensor
        self._sum: Tensor
        self._own: Tensor
        self._below: Tensor

    def add(self, hidden_states: Tensor, far: Tensor) -> None:
        """Add a block, (tokens, layers, hidden), without the tokens that are ``far``, (tokens,).

        Where these are more than a third they are no exception, and stay.
        """
        usual = hidden_states if 3 * int(far.sum()) > len(far) else hidden_states[~far]
        states = usual.detach().float().cpu()
        if not self.tokens:
            _, layers, hidden = states.shape
            self._shift = states.mean(dim=0)
            self._sum = torch.zeros((layers, hidden), dtype=torch.float64)
            self._own = torch.zeros((layers, hidden, hidden), dtype=torch.float64)
            self._below = torch.zeros_like(self._own)
        self.tokens += len(states)
        below: Tensor | None = None
        for layer in range(states.shape[1]):
            values = states[:, layer] - self._shift[layer]
            self._sum[layer] += values.sum(dim=0)
            self._own[layer] += values.T @ values
            if below is not None:
                self._below[layer] += below.T @ values
            below = values

    def standardised(self, stats: ChannelStats, layer: int) -> tuple[Tensor, Tensor]:
        """Covariance of a layer, and of the one below (rows) with it, (hidden, hidden) float64.

        Args:
            stats: Channel statistics to standardise with.
            layer: Place on the layer axis; below the first is nothing.
        """
        centre, std = stats.mean.double() - self._shift, stats.std
        own = self._about(self._own[layer], layer, layer, centre)
        below = self._about(self._below[layer], max(layer - 1, 0), layer, centre)
        scale = std.double()
        return (
            own / scale[layer] / scale[layer, :, None],
            below / scale[layer] / scale[max(layer - 1, 0), :, None],
        )

    def _about(self, total: Tensor, row: int, column: int, centre: Tensor) -> Tensor:
        """Mean of products about other centres than the shift."""
        rows, columns = (self._sum[i] / self.tokens for i in (row, column))
        outer = torch.outer
        return (
            total / self.tokens
            - outer(rows, centre[column])
            - outer(centre[row], columns)
            + outer(centre[row], centre[column])
        )


def fit(moments: LayerMoments, stats: ChannelStats, sample: Tensor, error: float) -> Transform:
    """The transform of a calibration sample.

    Args:
        moments: Second moments of its tokens.
        stats: Channel statistics to standardise with.
        sample: (tokens, layers, hidden) on which step and tables are chosen.
        error: Root mean square error in deviations of the channel that the step is chosen for.

    Raises:
        InputError: There are no tokens.
    """
    if not moments.tokens or not len(sample):
        raise InputError("there are no hidden states to take a transform from")
    layers, hidden = stats.mean.shape
    arrays: dict[str, npt.NDArray[Any]] = {
        "channel_mean": stats.mean.numpy(),
        "channel_std": stats.std.numpy(),
        "predictor": np.zeros((layers, hidden, hidden), np.float16),
        "basis": np.zeros((layers, hidden, hidden), np.float16),
        "axis_class": np.zeros((layers, hidden), np.int64),
        "step": np.ones(layers, np.float32),
        "symbol_frequency": _frequencies(np.zeros((kernels.CLASSES, kernels.SYMBOLS), np.int64)),
    }
    variances = np.empty((layers, hidden))
    identity = torch.eye(hidden, dtype=torch.float64)
    below = identity
    for layer in range(layers):
        own, across = moments.standardised(stats, layer)
        residual = own
        if layer:
            # as it will be decoded, with the error of that; few tokens know less of many channels
            noisy = below + (error**2 + _NOISE + hidden / moments.tokens / 10) * identity
            predictor = torch.linalg.solve(noisy, across).T
            arrays["predictor"][layer] = predictor.half().numpy()
            residual = own - predictor @ across - (predictor @ across).T
            residual += predictor @ noisy @ predictor.T
        below = own
        values, axes = torch.linalg.eigh(residual)
        arrays["basis"][layer] = axes.flip(1).half().numpy()
        variances[layer] = values.flip(0).clamp_min(1e-12).numpy()
    counts = np.zeros((kernels.CLASSES, kernels.SYMBOLS), np.int64)
    decoded: _Decoded | None = None
    for layer in range(layers):
        # a transform of the layer alone, as each trial makes one
        one = {
            name: array if name == "symbol_frequency" else array[layer : layer + 1]
            for name, array in arrays.items()
        }
        begun = Transform(one)
        values = begun.standardised(sample[:, layer], 0)
        prediction = begun.predicted(decoded, 0).expand_as(values)
        low, high = error / 2, error * 12
        for search in range(_SEARCHES + 1):
            step = (low * high) ** 0.5
            one["step"][0] = step
            wide = kernels.ONE_STEP + 2 * np.log2(variances[layer]) - 4 * np.log2(step)
            one["axis_class"][0] = np.round(wide).astype(np.int64)
            transform = Transform(one)
            coded = transform.encode(values - prediction, 0)
            restored = transform.restored(prediction, coded.coefficients, 0)
            if search < _SEARCHES:
                if float((restored - values).square().mean().sqrt()) > error:
                    high = step
                else:
                    low = step
        counts += coded.counts
        decoded = _Decoded(restored, coded.classes)
    arrays["symbol_frequency"] = _frequencies(counts)
    return Transform(arrays)


def _frequencies(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Frequencies of symbols, which add up to 4,096 in each class."""
    magnitudes = (np.arange(kernels.SYMBOLS) + 1) // 2
    deviations = 2.0 ** ((np.arange(kernels.CLASSES) - kernels.ONE_STEP) / 4)
    prior = np.exp(-0.5 * np.square(magnitudes / (deviations[:, None] + 0.2)))
    prior /= prior.sum(axis=1, keepdims=True)
    # a value and its negative are as likely
    pairs = counts.astype(np.float64)
    inner = slice(1, kernels.SYMBOLS - 1)
    both = pairs[:, inner].reshape(len(counts), -1, 2).mean(axis=2)
    pairs[:, inner] = np.repeat(both, 2, axis=1)
    chances = pairs + _PRIOR * prior
    chances /= chances.sum(axis=1, keepdims=True)
    # what is not to be expected needs no frequency of its own: it is coded as a larger value is
    due = (magnitudes <= np.ceil(6 * deviations[:, None]) + 1) | (counts > 0)
    due[:, -1] = True
    chances *= due
    chances /= chances.sum(axis=1, keepdims=True)
    spare = kernels.TOTAL - due.sum(axis=1, keepdims=True)
    frequencies: npt.NDArray[np.int64] = due + np.floor(chances * spare).astype(np.int64)
    frequencies[:, 0] += kernels.TOTAL - frequencies.sum(axis=1)
    return frequencies


def _intervals(frequencies: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Intervals by state, as `kernels.transform_decode` looks them up, (classes · 4,096,)."""
    lengths = frequencies.reshape(-1)
    symbols = np.tile(np.arange(kernels.SYMBOLS), kernels.CLASSES)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    heads = symbols << 24 | (lengths - 1) << kernels.PRECISION
    intervals: npt.NDArray[np.uint32] = (np.repeat(heads, lengths) | within).astype(np.uint32)
    return intervals


def _offset(step: float) -> np.float32:
    """Addend to a magnitude before it is cut off: half a step, or less where steps are wide.

    Zero costs fewest bits, so values near the middle between two are worth more below (Sullivan
    1996, "Efficient scalar quantization of exponential and Laplacian random variables").
    """
    return np.float32(0.5 - 0.08 * min(1.0, step / 0.4))
