"""Diagnosis of an example whose stored states are not those of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import counted
from bertvision.pipelines.audit.distance import Yardstick, distances
from bertvision.pipelines.audit.reference import Ids

_MATCH = 0.9  # of tokens and layers, for a cause to be taken for the one
_LEAST_TOKENS = 6


class Cause(NamedTuple):
    """Why an example is wrong.

    Attributes:
        kind: empty, prefix, truncated, shifted, layer, norm, swapped or other.
        what: in words.
    """

    kind: str
    what: str


class Case(NamedTuple):
    """An example that is wrong.

    Attributes:
        stored: (tokens, stored layers, hidden).
        computed: (tokens, hidden states, hidden); perhaps of another number of tokens.
        layers: (stored layers,) which hidden states they should be.
        limit: how far the states of a token may be apart.
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
    found = distances(case.stored, computed, measure, case.layers)
    return bool((found <= case.limit).float().mean() >= _MATCH)


def diagnose(
    case: Case,
    measure: Yardstick,
    completed: Callable[[], Sequence[tuple[str, str, Tensor]]],
    others: Callable[[], Iterable[tuple[str, Tensor]]],
) -> Cause:
    """The first cause that explains what is stored.

    Args:
        case: the example.
        measure: of the sample.
        completed: computes it with special tokens that it may lack: kind, words, and states (tokens
            of the example, stored layers, hidden).
        others: of other examples with as many tokens, name and states likewise.
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
