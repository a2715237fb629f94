"""Pooled states of examples in two dimensions, layer by layer: PCA, and UMAP where there is it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.poolings import pool_numpy

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]

MOST = 500
"""Examples in a projection."""
_AT_ONCE = 4096  # tokens
_FEWEST = 4  # examples that UMAP arranges


class Projection(NamedTuple):
    """Examples in the plane, by layer."""

    name: str
    points: Floats
    """(layers, examples, 2)"""
    remarks: list[str]
    """A sentence for each layer."""


def pooled_states(split: ActivationSplit, examples: Ints) -> Floats:
    """A state of each example in each layer: the mean of its tokens, or its one vector.

    Args:
        split: Split that is whole.
        examples: (n,) positions in the split, ascending.

    Returns:
        (n, layers, hidden) float32.
    """
    parts = []
    for part in _parts(split.plan.n_tokens[examples], examples):
        batch = split.read(part)
        states = batch.hidden_states.numpy()
        parts.append(pool_numpy(states, batch.lengths.numpy(), "mean"))
    return np.concatenate(parts)


def _parts(lengths: npt.NDArray[np.integer], examples: Ints) -> Iterator[Ints]:
    """Examples that have a bounded number of tokens together, or one alone."""
    number = np.cumsum(lengths, dtype=np.int64) // _AT_ONCE
    yield from np.split(examples, np.flatnonzero(np.diff(number)) + 1)


def pca(states: Floats) -> Projection:
    """The two directions of largest variance in each layer.

    Args:
        states: (examples, layers, hidden)

    Returns:
        The projection; the sign of an axis is that which makes its largest weight positive.
    """
    points = np.zeros((states.shape[1], len(states), 2))
    remarks = []
    for i in range(states.shape[1]):
        centred = states[:, i].astype(np.float64)
        centred -= centred.mean(axis=0)
        left, sizes, right = np.linalg.svd(centred, full_matrices=False)
        sizes, right = sizes[:2], right[:2]
        signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
        points[i, :, : len(sizes)] = left[:, : len(sizes)] * sizes * signs
        total = (centred**2).sum()
        shares = sizes**2 / total if total else np.zeros(2)
        percent = " and ".join(f"{100 * share:.0f} %" for share in shares)
        remarks.append(f"The axes have {percent} of the variance.")
    return Projection("PCA", points, remarks)


def has_umap() -> bool:
    """Whether ``umap-learn`` is installed."""
    return find_spec("umap") is not None


def umap(states: Floats, seed: int) -> Projection | None:
    """UMAP of each layer (McInnes, Healy & Melville 2018, arXiv:1802.03426).

    Args:
        states: (examples, layers, hidden)
        seed: Seed of the layout.

    Returns:
        The projection; None of fewer examples than can be arranged.
    """
    if len(states) < _FEWEST:
        return None
    from umap import UMAP

    near = min(15, len(states) - 1)
    points = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that a seed needs one thread
        for i in range(states.shape[1]):
            start = "spectral" if len(states) > near + 1 else "random"
            reducer = UMAP(n_neighbors=near, random_state=seed, init=start)
            points.append(reducer.fit_transform(states[:, i]))
    remark = f"Distances within a group mean more than those between groups ({near} neighbours)."
    return Projection("UMAP", np.stack(points).astype(np.float64), [remark] * len(points))
