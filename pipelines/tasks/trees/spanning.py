"""The best tree over words: the spanning tree of the largest sum of scores, with one root.

Chu & Liu (1965) and Edmonds (1967), as McDonald et al. (2005, HLT-EMNLP) use them for parsing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


def best_tree(scores: npt.NDArray[np.floating]) -> Int64Array:
    """The head of each word in the tree with one root whose arcs have the largest sum.

    Softmax over each word's heads, which is a constant for the word, would not change the tree.

    Args:
        scores: (words, words + 1), of each word with each head; column 0 is the root. The score of
            a word with itself, column word + 1, is not read.

    Returns:
        (words,) int64: 0 of the root, else the number of the head, from 1.

    Raises:
        InputError: the scores are of another shape, or not finite.
    """
    words = len(scores)
    if scores.shape != (words, words + 1):
        raise InputError(
            f"scores of shape {scores.shape} are of no tree: give (words, words + 1), one for each "
            "word with the root and with each word"
        )
    if not np.isfinite(np.delete(scores.reshape(-1), np.arange(words) * (words + 2) + 1)).all():
        raise InputError("the scores hold NaN or infinity: the model that made them diverged")
    if not words:
        return np.zeros(0, np.int64)
    arcs = np.full((words + 1, words + 1), -np.inf)
    arcs[1:] = scores
    np.fill_diagonal(arcs, -np.inf)
    # a second root costs more than any choice of other arcs can bring
    held = arcs[np.isfinite(arcs)]
    arcs[1:, 0] -= 1.0 + 2.0 * words * (held.max() - held.min())
    heads: Int64Array = _arborescence(arcs)[1:]
    return heads


def _arborescence(arcs: Float64Array) -> Int64Array:
    """The best head of each node, (nodes,); node 0 is the root, whose entry says nothing.

    Args:
        arcs: (nodes, nodes) score of each node's arc from each head, −inf where there is none.
    """
    heads: Int64Array = arcs.argmax(axis=1)
    heads[0] = 0
    cycle = _cycle(heads)
    if cycle is None:
        return heads
    # the cycle becomes one node, the last: what enters it breaks it at the node that is entered
    inside = np.zeros(len(arcs), bool)
    inside[cycle] = True
    outside = np.flatnonzero(~inside)
    kept = arcs[cycle, heads[cycle]]
    entering = arcs[np.ix_(cycle, outside)] - kept[:, None]
    leaving = arcs[np.ix_(outside, cycle)]
    smaller = np.full((len(outside) + 1, len(outside) + 1), -np.inf)
    smaller[:-1, :-1] = arcs[np.ix_(outside, outside)]
    smaller[-1, :-1] = entering.max(axis=0)
    smaller[:-1, -1] = leaving.max(axis=1)
    found = _arborescence(smaller)
    whole: Int64Array = heads.copy()
    enters = found[-1]  # position in outside of the head of the cycle
    whole[cycle[entering[:, enters].argmax()]] = outside[enters]
    for node, head in enumerate(found[:-1]):
        at_cycle = head == len(outside)
        whole[outside[node]] = cycle[leaving[node].argmax()] if at_cycle else outside[head]
    whole[0] = 0
    return whole


def _cycle(heads: Int64Array) -> Int64Array | None:
    """The nodes of a circle of heads; None where all lead to node 0."""
    reached = np.zeros(len(heads), np.int64)  # number of the walk that came by; 0: none
    reached[0] = -1
    for start in range(1, len(heads)):
        at = start
        while not reached[at]:
            reached[at] = start
            at = int(heads[at])
        if reached[at] == start:
            circle = [at]
            while (at := int(heads[at])) != circle[0]:
                circle.append(at)
            return np.array(circle, np.int64)
    return None
