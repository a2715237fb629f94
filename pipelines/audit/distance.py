"""How far stored hidden states are from computed ones, and how far they may be.

What all sampled states have in common: a layer or a channel that is scaled or moved.

A state that is 2 % too large is nearer to the right one than arithmetic of 16 bits may be. What
arithmetic loses differs from token to token, and over a sample it averages out; a wrong scale does
not. So what is stored, less what the encoding makes of the computed states, is regressed on the
computed states, by layer and by channel:

    stored − encoded(computed) ≈ slope · (computed − mean) + offset

Standard errors are those of a jackknife over groups of examples, as the tokens of a text are not
independent of each other.

Diagnosis of an example whose stored states are not those of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import counted
from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.audit.reference import Ids

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
        measure: Measure of the sample.
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
    if split.transform is not None:
        return split.transform.restored_states(computed)
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
        measure: Measure of the sample.
        layers: (layers,) which hidden states they are.
        tolerance: Largest difference that the encoder may make.

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
            deviation
            for place in range(len(self._layers))
            for deviation in self._of_layer(place, whole, spread)
        ]

    def _of_layer(self, place: int, fit: _Fit, error: _Fit) -> list[Deviation]:
        """The deviations of a layer: of the whole, or of single channels."""
        layer, deviations = self._layers[place], list[Deviation]()
        limit = max(self._tolerance / 10, _FLOOR)
        slope, slope_error = float(fit.layer[place]), float(error.layer[place])
        scaled = abs(slope) > max(limit, _SURE * slope_error)
        if scaled:
            what = f"hidden state {layer} is scaled by {1 + slope:.4g}"
            deviations.append(Deviation(layer, "scale", [], slope, what))
        own = fit.spreads[place]
        typical = float(own.square().mean().sqrt())  # of channels that hardly vary, nothing is told
        deviating = fit.channels[place] - (slope if scaled else 0.0)
        large = deviating.abs() > torch.clamp_min(_SURE_OF_MANY * error.channels[place], 3 * limit)
        large &= deviating.abs() * own > limit / 4 * typical
        deviations += self._of_channels(layer, "scale", deviating, large)
        # what a scale moves the mean by is no offset
        offset = fit.offsets[place] - (slope * self._mean[place] if scaled else 0.0)
        allowed = _ROUNDED * self._mean[place].abs()
        own = own.clamp_min(typical / 4)
        beyond = (offset.abs() - allowed).clamp_min(0)
        size = float(beyond.norm() / own.norm())
        if size > max(3 * limit, 2 * float(error.offsets[place].norm() / own.norm())):
            what = f"hidden state {layer} is moved, by {size:.2g} of its spread"
            return [*deviations, Deviation(layer, "offset", [], size, what)]
        large = beyond > torch.maximum(_SURE_OF_MANY * error.offsets[place], 10 * limit * own)
        return [*deviations, *self._of_channels(layer, "offset", offset / own, large)]

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


_MATCH = 0.9  # of tokens and layers, for a cause to be taken for the one
_LEAST_TOKENS = 6


class Cause(NamedTuple):
    """Why an example is wrong.

    Attributes:
        kind: empty, prefix, truncated, shifted, layer, norm, swapped or other.
        what: Description in words.
    """

    kind: str
    what: str


class Case(NamedTuple):
    """An example that is wrong.

    Attributes:
        stored: (tokens, stored layers, hidden).
        computed: (tokens, hidden states, hidden); perhaps of another number of tokens.
        layers: (stored layers,) which hidden states they should be.
        limit: Largest distance of a token's states.
        ids: (tokens,) of its window.
    """

    stored: Tensor
    computed: Tensor
    layers: list[int]
    limit: float
    ids: Ids


def matches(case: Case, computed: Tensor, measure: Yardstick) -> bool:
    """Whether the stored states are those of other tokens: (tokens, stored layers, hidden)."""
    if computed.shape != case.stored.shape:
        return False
    apart = distances(case.stored, computed, measure, case.layers)
    return bool((apart <= case.limit).float().mean() >= _MATCH)


def diagnose(
    case: Case,
    measure: Yardstick,
    completed: Callable[[], Sequence[tuple[str, str, Tensor]]],
    others: Callable[[], Iterable[tuple[str, Tensor]]],
) -> Cause:
    """The first cause that explains what is stored.

    Args:
        case: the example.
        measure: Measure of the sample.
        completed: computes it with special tokens that it may lack: kind, words, and states (tokens
            of the example, stored layers, hidden).
        others: Other examples with as many tokens, name and states likewise.
    """
    due = case.computed[:, case.layers]
    causes = (_empty(case), _part(case, due, measure), _shifted(case, due, measure))
    for cause in (*causes, wrong_layer(case, measure), _norm(case, due, measure)):
        if cause is not None:
            return cause
    for kind, words, states in completed():
        if matches(case, states, measure):
            return Cause(kind, words)
    for name, states in others():
        if matches(case, states, measure):
            return Cause("swapped", f"it holds the hidden states of {name}")
    return Cause("other", "it holds the hidden states of other weights, or of other tokens")


def _empty(case: Case) -> Cause | None:
    """Rows without values, as a file leaves them that was never filled."""
    flat = (case.stored.amax(dim=-1) == case.stored.amin(dim=-1)).all(dim=-1)
    # quantised, what was constant is a constant number of deviations away from the mean
    if len(case.stored) > 1 and not bool(flat.any()):
        same = (case.stored[1:] - case.stored[:-1]).abs().amax(dim=(1, 2)) == 0
        flat = torch.cat([same[:1], same])
    if not bool(flat.any()):
        return None
    return Cause("empty", f"{counted(int(flat.sum()), 'token')} of {len(flat)} hold no values")


def _part(case: Case, due: Tensor, measure: Yardstick) -> Cause | None:
    """Fewer tokens than the window has: its beginning, or its end."""
    n, missing = len(case.stored), len(due) - len(case.stored)
    if missing <= 0:
        return None
    text = f"{counted(missing, 'token')} of {len(due)} missing"
    if matches(case, due[:n], measure):
        return Cause("truncated", f"it is cut off: the last {text}")
    if matches(case, due[missing:], measure):
        return Cause("prefix", f"its prefix is not there: the first {text}")
    return Cause("truncated", f"it has fewer tokens than its text: {text}")


def _shifted(case: Case, due: Tensor, measure: Yardstick) -> Cause | None:
    """Rows that stand beside their places; those that fell out may have come in at the end."""
    n = len(case.stored)
    if len(due) != n:
        return None
    place = len(case.layers) // 2
    apart = torch.cdist(case.stored[:, place], due[:, place])  # (stored tokens, computed tokens)
    near = {
        by: float(apart.diagonal(by).median()) for by in range(-(n // 2), n // 2 + 1) if by != 0
    }
    for by in sorted(near, key=near.__getitem__)[:2]:
        mine, theirs = slice(max(-by, 0), n - max(by, 0)), slice(max(by, 0), n - max(-by, 0))
        if matches(case._replace(stored=case.stored[mine]), due[theirs], measure):
            if by < 0:
                return Cause("shifted", f"its rows are shifted down by {-by}")
            words = f"its rows are shifted up by {by}: the first {by} are not there"
            return Cause("shifted", words)
    return None


def wrong_layer(case: Case, measure: Yardstick) -> Cause | None:
    """Stored layers that are other hidden states than they should be; None where none is."""
    if len(case.computed) != len(case.stored):
        return None
    wrong = []
    for place, layer in enumerate(case.layers):
        own = case.stored[:, place : place + 1]
        apart = [
            float(distances(own, case.computed[:, j : j + 1], measure, [j]).median())
            for j in range(case.computed.shape[1])
        ]
        best = int(np.argmin(apart))
        if best != layer and apart[best] <= case.limit and apart[best] < apart[layer] / 2:
            wrong.append(f"hidden state {best} in the place of {layer}")
    return Cause("layer", f"wrong layer: {'; '.join(wrong[:3])}") if wrong else None


def _norm(case: Case, due: Tensor, measure: Yardstick) -> Cause | None:
    """The right states in another norm: scaled, or before or behind a layer norm.

    A layer norm is γ_c · (x_tc − μ_t) / σ_t + β_c: standardised by token, what is before it gives
    what is behind it by a line for each channel c.
    """
    if len(due) != len(case.stored):
        return None
    named = []
    apart = distances(case.stored, due, measure, case.layers).median(dim=0).values.tolist()
    for place, far in enumerate(apart):
        if far <= case.limit:
            continue
        one, other = case.stored[:, place], due[:, place]
        left = [_residual(_standard(one), _standard(other))]
        if len(due) >= _LEAST_TOKENS:
            left += [_off_line(_standard(one), other), _off_line(_standard(other), one)]
        if min(left) > min(case.limit, far / 3):  # it must explain what is wrong, of each layer
            return None
        named.append(str(case.layers[place]))
    if not named:
        return None
    sizes = case.stored.norm(dim=-1) / due.norm(dim=-1)
    return Cause(
        "norm",
        f"wrong norm of hidden state {', '.join(named[:5])}: the same states scaled (by "
        f"{float(sizes.median()):.3g} in the median), or before or behind a layer norm",
    )


def _standard(states: Tensor) -> Tensor:
    """States (tokens, hidden), each with mean 0 and deviation 1 over its channels."""
    centred = states - states.mean(dim=-1, keepdim=True)
    return centred / centred.std(dim=-1, keepdim=True).clamp_min(1e-12)


def _residual(one: Tensor, other: Tensor) -> float:
    """Root of the part of the variance over tokens in which (tokens, hidden) states differ."""
    varied = other - other.mean(dim=0) if len(other) > 1 else other
    return float((one - other).norm() / varied.norm().clamp_min(1e-12))


def _off_line(one: Tensor, other: Tensor) -> float:
    """Root of the part of the variance over tokens that a line for each channel leaves."""
    x, y = one - one.mean(dim=0), other - other.mean(dim=0)
    slope = (x * y).sum(dim=0) / x.square().sum(dim=0).clamp_min(1e-12)
    left = float((y - slope * x).norm() / y.norm().clamp_min(1e-12))
    degrees = (len(one) - 1) / (len(one) - 2)  # two numbers explain as many tokens always
    return left * math.sqrt(degrees)
