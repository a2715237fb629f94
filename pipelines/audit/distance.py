"""How far stored hidden states are from computed ones, and how far they may be.

What all sampled states have in common: a layer or a channel that is scaled or moved.

A state that is 2 % too large is nearer to the right one than arithmetic of 16 bits may be. What
arithmetic loses differs from token to token, and over a sample it averages out; a wrong scale does
not. So what is stored, less what the encoding makes of the computed states, is regressed on the
computed states, by layer and by channel:

    stored − encoded(computed) ≈ slope · (computed − mean) + offset

Standard errors are those of a jackknife over groups of examples, as the tokens of a text are not
independent of each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.split import ActivationSplit

_OF_ENCODING = 1.5


class Yardstick(NamedTuple):
    """Unit of distances.

    Attributes:
        mean: (hidden states, hidden) of the computed states of the sample. States of most encoders
            lie far from 0 on one side, where those of any two tokens are alike; from the mean they
            are not.
        spread: (hidden states,) median distance of a state from it.
    """

    mean: Tensor
    spread: Tensor


def yardstick(states: list[Tensor]) -> Yardstick:
    """The yardstick of a sample: (tokens, hidden states, hidden) of each example."""
    joined = torch.cat(states)
    mean = joined.mean(dim=0)
    spread = (joined - mean).norm(dim=-1).median(dim=0).values
    return Yardstick(mean, spread.clamp_min(torch.finfo(torch.float32).tiny))


def distances(one: Tensor, other: Tensor, measure: Yardstick, layers: list[int]) -> Tensor:
    """How far states are from each other, token by token.

    Args:
        one: (tokens, layers, hidden).
        other: (tokens, layers, hidden), those that should be there.
        measure: of the sample.
        layers: (layers,) which hidden states ``other`` are.

    Returns:
        (tokens, layers): ‖one − other‖ in parts of the distance of ``other`` from the mean, or of
        the median distance where that is larger.
    """
    size = torch.linalg.vector_norm(other - measure.mean[layers], dim=-1)
    apart: Tensor = torch.linalg.vector_norm(one - other, dim=-1)
    return apart / torch.maximum(size, measure.spread[layers])


def encoded_again(split: ActivationSplit, computed: Tensor) -> Tensor:
    """Computed states (tokens, layers, hidden) as the encoding of a split keeps them."""
    encoded = encode(computed, split.encoding, split.stats, nonfinite="record")
    return decode(encoded.codes, encoded.scale, split.stats)


def allowed(
    again: Tensor,
    computed: Tensor,
    measure: Yardstick,
    layers: list[int],
    tolerance: float,
) -> Tensor:
    """How far the stored states of an example may be from computed ones, token by token.

    What the encoding loses of these very states is computed, and not guessed.

    Args:
        again: the computed states as the encoding keeps them (see `encoded_again`).
        computed: (tokens, layers, hidden) of the stored layers.
        measure: of the sample.
        layers: (layers,) which hidden states they are.
        tolerance: what the encoder may give otherwise.

    Returns:
        (tokens, layers) in the units of `distances`.
    """
    return tolerance + _OF_ENCODING * distances(again, computed, measure, layers)


_GROUPS = 20
_LEAST_GROUPS, _LEAST_TOKENS = 8, 64
_SURE, _SURE_OF_MANY = 5.0, 9.0
"""Standard errors that a deviation of a layer has at least, and one of thousands of channels."""
_FLOOR = 0.005
_ROUNDED = 2.0**-8
"""Rounding of bfloat16 in a channel that is nearly constant, in parts of its mean."""
_NAMED = 5


class Deviation(NamedTuple):
    """A deviation that sampled tokens share.

    Attributes:
        layer: Hidden state that the stored layer should be.
        kind: scale or offset.
        channels: Channels that deviate; empty where the whole layer does.
        size: Scale less 1, or the offset in parts of the spread; of several channels the largest.
        what: Sentence for the user.
    """

    layer: int
    kind: str
    channels: list[int]
    size: float
    what: str


class Drift:
    """Sums over the sampled tokens, from which deviations are told.

    Args:
        layers: Hidden state that each stored layer should be.
        measure: Yardstick of the sample.
        tolerance: Distance that random deviations may have; those that tokens share may be a tenth
            of it by layer, and a third by channel.
    """

    def __init__(self, layers: list[int], measure: Yardstick, tolerance: float) -> None:
        self._layers, self._tolerance = layers, tolerance
        self._mean = measure.mean[layers].double()
        # (sums, groups, layers, hidden): d, x, d·x, x² of x = computed − mean
        self._sums = torch.zeros(4, _GROUPS, *self._mean.shape, dtype=torch.float64)
        self._tokens = torch.zeros(_GROUPS, dtype=torch.float64)
        self._examples = 0

    def add(self, stored: Tensor, encoded: Tensor, computed: Tensor) -> None:
        """Add the tokens of an example that is right by itself.

        Args:
            stored: States (tokens, layers, hidden) of the split.
            encoded: The computed states as the split's encoding keeps them, likewise.
            computed: States that should be there, likewise.
        """
        apart, state = stored.double() - encoded.double(), computed.double() - self._mean
        group = self._examples % _GROUPS
        for place, part in enumerate((apart, state, apart * state, state.square())):
            self._sums[place, group] += part.sum(dim=0)
        self._tokens[group] += len(stored)
        self._examples += 1

    def deviations(self) -> list[Deviation]:
        """The deviations that are too large for chance and for arithmetic; none of a few tokens."""
        filled = self._tokens > 0
        groups = int(filled.sum())
        if groups < _LEAST_GROUPS or self._tokens.sum() < _LEAST_TOKENS:
            return []
        sums, tokens = self._sums[:, filled], self._tokens[filled]
        whole = _fit(sums.sum(dim=1), tokens.sum())
        without = [
            _fit(sums.sum(dim=1) - sums[:, g], tokens.sum() - tokens[g]) for g in range(groups)
        ]
        spread = _Fit(
            *(
                torch.stack(values).std(dim=0, correction=0) * (groups - 1) ** 0.5
                for values in zip(*without, strict=True)
            )
        )
        return [
            found
            for place in range(len(self._layers))
            for found in self._of_layer(place, whole, spread)
        ]

    def _of_layer(self, place: int, fit: _Fit, error: _Fit) -> list[Deviation]:
        """The deviations of a layer: of the whole, or of single channels."""
        layer, found = self._layers[place], list[Deviation]()
        limit = max(self._tolerance / 10, _FLOOR)
        slope, slope_error = float(fit.layer[place]), float(error.layer[place])
        scaled = abs(slope) > max(limit, _SURE * slope_error)
        if scaled:
            what = f"hidden state {layer} is scaled by {1 + slope:.4g}"
            found.append(Deviation(layer, "scale", [], slope, what))
        own = fit.spreads[place]
        typical = float(own.square().mean().sqrt())  # of channels that hardly vary, nothing is told
        deviating = fit.channels[place] - (slope if scaled else 0.0)
        large = deviating.abs() > torch.clamp_min(_SURE_OF_MANY * error.channels[place], 3 * limit)
        large &= deviating.abs() * own > limit / 4 * typical
        found += self._of_channels(layer, "scale", deviating, large)
        # what a scale moves the mean by is no offset
        offset = fit.offsets[place] - (slope * self._mean[place] if scaled else 0.0)
        allowed = _ROUNDED * self._mean[place].abs()
        own = own.clamp_min(typical / 4)
        beyond = (offset.abs() - allowed).clamp_min(0)
        size = float(beyond.norm() / own.norm())
        if size > max(3 * limit, 2 * float(error.offsets[place].norm() / own.norm())):
            what = f"hidden state {layer} is moved, by {size:.2g} of its spread"
            return [*found, Deviation(layer, "offset", [], size, what)]
        large = beyond > torch.maximum(_SURE_OF_MANY * error.offsets[place], 10 * limit * own)
        return [*found, *self._of_channels(layer, "offset", offset / own, large)]

    def _of_channels(self, layer: int, kind: str, sizes: Tensor, large: Tensor) -> list[Deviation]:
        """One deviation for all channels of a layer that are as large."""
        channels: list[int] = large.nonzero().flatten().tolist()
        if not channels:
            return []
        named = [
            f"{c} by {1 + float(sizes[c]):.4g}"
            if kind == "scale"
            else f"{c} by {float(sizes[c]):.2g} of its spread"
            for c in channels[:_NAMED]
        ]
        more = f", … ({len(channels):,} channels)" if len(channels) > _NAMED else ""
        verb = "scaled" if kind == "scale" else "moved"
        what = f"channels of hidden state {layer} are {verb}: {', '.join(named)}{more}"
        largest = max((float(sizes[c]) for c in channels), key=abs)
        return [Deviation(layer, kind, channels, largest, what)]


class _Fit(NamedTuple):
    """Result of a regression: (layers,) slopes, and by (layers, hidden) the rest."""

    layer: Tensor
    channels: Tensor
    offsets: Tensor
    spreads: Tensor


def _fit(sums: Tensor, tokens: Tensor) -> _Fit:
    """Regress by layer and channel.

    Args:
        sums: Tensor (4, layers, hidden), as of `Drift`.
        tokens: Number of them.
    """
    d, x, dx, xx = sums
    shared = dx - d * x / tokens
    varied = (xx - x.square() / tokens).clamp_min(1e-24)
    return _Fit(
        shared.sum(dim=-1) / varied.sum(dim=-1),
        shared / varied,
        d / tokens,
        (varied / tokens).sqrt(),
    )
