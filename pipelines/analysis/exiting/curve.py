"""Score against layers for every threshold there is, in one pass over what is stored.

As the threshold falls, a window leaves ever earlier: from the last output layer to where it was
surest, from there to the best of those before it, and so on. Each of these steps happens at one
confidence. All steps of all windows are sorted once, and what they change is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What the answer of each output layer to each window adds to the score of its item.

    Of an item with several windows the one of highest rank answers, with what its own output layer
    said. Where the null rank, the lowest of its windows', is above that by more than the threshold,
    the item is not answered.
    """

    item: Rows
    """(windows,) the item of each."""
    rank: Array
    """(windows, output layers)"""
    counts: Array
    """(windows, output layers, counts) what is summed over items, where this answers."""
    metric: Callable[[Array], Array]
    """(points, counts) sums → (points,) scores in per cent."""
    null: Array | None = None
    """(windows, output layers) rank of no answer; None where there always is one."""
    unanswered: Array | None = None
    """(windows, counts) what is summed where the window's item is not answered."""
    threshold: float = 0.0

    @cached_property
    def alone(self) -> Array:
        """(windows, output layers, counts) of an item that has this window alone."""
        if self.null is None or self.unanswered is None:
            return self.counts
        silent = self.null - self.rank > self.threshold
        return np.where(silent[..., None], self.unanswered[:, None], self.counts)

    @cached_property
    def shared(self) -> dict[int, Rows]:
        """By item the windows of those that have several."""
        order = np.argsort(self.item, kind="stable")
        items, first, many = np.unique(self.item[order], return_index=True, return_counts=True)
        starts = zip(items[many > 1], first[many > 1], many[many > 1], strict=True)
        return {int(i): order[a : a + n] for i, a, n in starts}

    def of_item(self, windows: Rows, exits: Rows) -> Array:
        """(counts,) of an item whose windows leave at these output layers."""
        ranks = self.rank[windows, exits]
        best = int(np.argmax(ranks))
        nothing = -np.inf if self.null is None else self.null[windows, exits].min()
        if self.unanswered is not None and nothing - ranks[best] > self.threshold:
            return np.asarray(self.unanswered[windows[best]])
        return np.asarray(self.counts[windows[best], exits[best]])

    def total(self, exits: Rows) -> Array:
        """(counts,) of all items, where windows leave at these output layers, (windows,)."""
        single = np.ones(len(exits), bool)
        found = np.zeros(self.counts.shape[-1])
        for windows in self.shared.values():
            single[windows] = False
            found += self.of_item(windows, exits[windows])
        rows = np.flatnonzero(single)
        return np.asarray(found + self.alone[rows, exits[rows]].sum(axis=0))


class Curve(NamedTuple):
    """Every threshold at which something changes, from the one at which nothing leaves early."""

    thresholds: Array
    """(points,) descending; ∞ first. A window leaves at the first output layer that is as sure."""
    layers: Array
    """(points,) mean number of the layer at which a window leaves."""
    scores: Array
    """(points,)"""


def exit_curve(confidence: Array, layers: Sequence[int], outcomes: Outcomes) -> Curve:
    """The score at every threshold, exactly, by one sort: O(windows · layers · log).

    Args:
        confidence: (windows, output layers − 1) how sure each but the last is.
        layers: number of the layer of each output layer, ascending.
        outcomes: of each output layer.
    """
    at, last = np.asarray(layers, np.float64), len(layers) - 1
    best = np.maximum.accumulate(confidence, axis=1)
    surer = np.ones(confidence.shape, bool)  # than all before: only there may a window leave
    surer[:, 1:] = confidence[:, 1:] > best[:, :-1]
    origin, following = np.empty(confidence.shape, np.int64), np.full(len(confidence), last)
    for place in reversed(range(last)):
        origin[:, place] = following
        following = np.where(surer[:, place], place, following)
    windows, to = np.nonzero(surer)
    order = np.argsort(-confidence[windows, to], kind="stable")
    windows, to = windows[order], to[order]
    values, come = confidence[windows, to], origin[windows, to]
    changes = outcomes.alone[windows, to] - outcomes.alone[windows, come]
    _correct_shared(changes, windows, to, outcomes, last)
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], True))
    begun = outcomes.total(np.full(len(confidence), last))
    sums = begun + np.concatenate([np.zeros((1, len(begun))), np.cumsum(changes, 0)[ends]])
    sums[-1] = outcomes.total(np.zeros(len(confidence), np.int64))  # without what sums round
    moved = np.concatenate([[0.0], np.cumsum(at[to] - at[come])[ends]])
    return Curve(
        np.append(np.inf, values[ends]),
        at[last] + moved / len(confidence),
        outcomes.metric(sums),
    )


def _correct_shared(
    changes: Array, windows: Rows, to: npt.NDArray[np.integer], outcomes: Outcomes, last: int
) -> None:
    """Put in what a step changes of an item with several windows."""
    where = {int(w): item for item, of in outcomes.shared.items() for w in of}
    exits = np.full(len(outcomes.item), last)
    now = {item: outcomes.of_item(of, exits[of]) for item, of in outcomes.shared.items()}
    for step in np.flatnonzero(np.isin(windows, np.array([*where], np.int64))):
        item = where[int(windows[step])]
        exits[windows[step]] = to[step]
        of = outcomes.shared[item]
        found = outcomes.of_item(of, exits[of])
        changes[step] = found - now[item]
        now[item] = found


def points_of(curve: Curve, budgets: Array) -> Rows:
    """Places of a curve that are shown: for each budget the most layers that it allows.

    Args:
        curve: any.
        budgets: mean layers.

    Returns:
        Ascending, each once, the first and the last among them.
    """
    places = np.searchsorted(-curve.layers, -budgets)  # the first that needs no more
    places = places[places < len(curve.layers)]
    return np.unique(np.concatenate([[0], places, [len(curve.layers) - 1]]))
