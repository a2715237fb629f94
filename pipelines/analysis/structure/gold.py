"""Trees as distances and depths, trees that know nothing of the words, spanning trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def depths(heads: Sequence[int]) -> Ints:
    """Edges between each word and the root.

    Args:
        heads: of each word the number of its head, from 1; 0 of the root.

    Returns:
        (words,)
    """
    found = np.zeros(len(heads), np.int64)
    for word in range(len(heads)):
        above = heads[word]
        while above:
            found[word] += 1
            above = heads[above - 1]
    return found


def distances(heads: Sequence[int]) -> Ints:
    """Edges on the path between every two words.

    Args:
        heads: see `depths`.

    Returns:
        (words, words), symmetric.
    """
    found = np.zeros((len(heads), len(heads)), np.int64)
    done: list[int] = []
    for word in np.argsort(depths(heads), kind="stable").tolist():
        if done:
            found[word, done] = found[done, word] = found[heads[word] - 1, done] + 1
        done.append(word)
    return found


def chain(words: int) -> list[int]:
    """The heads of a chain: each word hangs on the one before it, the first is the root."""
    return list(range(words))


def random_tree(words: int, random: np.random.Generator) -> list[int]:
    """The heads of a tree drawn uniformly from all labelled trees, with a root drawn uniformly.

    By the sequences of Prüfer (1918), of which each stands for one tree.

    Args:
        words: how many.
        random: that draws.
    """
    if words < 3:
        first = int(random.integers(words))
        return [0 if word == first else first + 1 for word in range(words)]
    sequence = random.integers(words, size=words - 2)
    degree = 1 + np.bincount(sequence, minlength=words)
    beside: list[list[int]] = [[] for _ in range(words)]

    def join(a: int, b: int) -> None:
        beside[a].append(b)
        beside[b].append(a)

    for word in sequence.tolist():
        leaf = int(np.flatnonzero(degree == 1)[0])
        join(leaf, word)
        degree[[leaf, word]] -= 1
    join(*np.flatnonzero(degree == 1).tolist())
    heads = [-1] * words
    root = int(random.integers(words))
    heads[root] = 0
    reached = [root]
    for word in reached:
        for other in beside[word]:
            if heads[other] < 0:
                heads[other] = word + 1
                reached.append(other)
    return heads


def spanning_trees(lengths: npt.NDArray[np.floating]) -> Ints:
    """The minimum spanning tree of every matrix, by the algorithm of Prim (1957), from node 0.

    Of edges of the same length the one to the lower node is taken.

    Args:
        lengths: (…, nodes, nodes) of the edges, symmetric; the diagonal does not enter.

    Returns:
        (…, nodes − 1, 2) the two nodes of each edge.
    """
    *outer, nodes, _ = lengths.shape
    flat = lengths.reshape(-1, nodes, nodes)
    every = np.arange(len(flat))
    nearest = np.zeros((len(flat), nodes), np.int64)  # node of the tree that each is nearest to
    far = flat[:, 0].astype(np.float64)  # and how far off it is; infinite of those in the tree
    far[:, :1] = np.inf
    edges = np.empty((len(flat), max(nodes - 1, 0), 2), np.int64)
    for step in range(nodes - 1):
        new = far.argmin(axis=1)
        edges[:, step, 0], edges[:, step, 1] = nearest[every, new], new
        closer = flat[every, new] < far
        outside = np.isfinite(far)
        nearest = np.where(closer & outside, new[:, None], nearest)
        far = np.where(closer & outside, flat[every, new], far)
        far[every, new] = np.inf
    return edges.reshape(*outer, max(nodes - 1, 0), 2)
