"""Languages, or any groups of texts, by layer: how well they are told apart, as centring leaves it.

See `apart` for the measures and their source. Centres are those of the training half wherever a
classifier is scored on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.groups.apart import (
    between_share,
    centroids,
    identified,
    retrieved,
    v_measure,
)
from bertvision.pipelines.analysis.groups.languages_result import LanguagesResult
from bertvision.pipelines.progress import progress

FEWEST = 10
"""Texts that every group must have."""
Read = Callable[[int], npt.NDArray[np.float32]]
"""Layer → (texts, hidden) pooled vectors."""


def languages(
    read: Read,
    groups: Sequence[npt.NDArray[np.int64]],
    names: Sequence[str],
    *,
    layers: Sequence[int],
    translations: bool = False,
    seed: int = 0,
    name: str = "x",
) -> LanguagesResult:
    """Measure how far groups of texts lie apart in each layer.

    One layer is in memory at a time. Half of the texts of each group, seeded, train the linear
    classifier and give the centres for the other half; clusters and retrieval are of all texts.

    Args:
        read: gives the vectors of a layer.
        groups: for each group, (its texts,) rows of these vectors.
        names: of the groups.
        layers: numbers of the layers.
        translations: whether the n-th text of each group says the same as the n-th of all others.
        seed: of halves and starts.
        name: what it is of, for titles.

    Raises:
        InputError: fewer than two groups, too few texts in one, or translations that are not as
            many in each.
    """
    sizes = [len(rows) for rows in groups]
    check_groups(names, sizes, translations=translations)
    count, order = len(groups), np.concatenate(groups)
    label = np.repeat(np.arange(count), sizes)
    random = np.random.default_rng(seed)
    train = np.zeros(len(order), bool)
    for g in range(count):
        mine = np.flatnonzero(label == g)
        train[random.permutation(mine)[: len(mine) // 2]] = True
    found: dict[str, list[Any]] = {}
    with progress(len(layers), f"groups of {name}", "layer") as bar:
        for layer in layers:
            x = read(layer)[order]
            if not np.isfinite(x).all():
                raise InputError(f"layer {layer} of {name} holds NaN or infinity")
            for key, value in _of_layer(x, label, count, train, translations, seed).items():
                found.setdefault(key, []).append(value)
            bar.update(1)
    scored = np.bincount(label[~train], minlength=count)
    return LanguagesResult(
        **{key: np.array(values, np.float64) for key, values in found.items()},
        majority=float(scored.max() / scored.sum()),
        groups=tuple(names),
        sizes=tuple(sizes),
        name=name,
        layers=tuple(layers),
        n_scored=int(scored.sum()),
        seed=seed,
    )


def check_groups(names: Sequence[str], sizes: Sequence[int], *, translations: bool) -> None:
    """Refuse groups that cannot be compared.

    Raises:
        InputError: fewer than two, too few texts in one, or translations that do not pair off.
    """
    if len(names) < 2:
        raise InputError(
            f"groups are compared, and there is {names[0] if names else 'none'}: give two"
        )
    for group, size in zip(names, sizes, strict=True):
        if size < FEWEST:
            raise InputError(f"group {group!r} has {size} texts: every group needs {FEWEST}")
    if translations and len(set(sizes)) > 1:
        of = ", ".join(f"{g} {n:,}" for g, n in zip(names, sizes, strict=True))
        raise InputError(
            f"translations stand in the same order in every group, and these have different "
            f"numbers of texts ({of}): give the same texts in all, or leave --translations out"
        )


def _of_layer(
    x: npt.NDArray[np.float32],
    label: npt.NDArray[np.int64],
    count: int,
    train: npt.NDArray[np.bool_],
    translations: bool,
    seed: int,
) -> dict[str, Any]:
    centres = centroids(x, label, count)
    centred = (x - centres[label]).astype(np.float32)
    # what is scored must not have moved its own centre
    by_half = (x - centroids(x[train], label[train], count)[label]).astype(np.float32)
    unit = centres / np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    nothing = float("nan")
    return {
        "between": between_share(x, label, count),
        "cosine": unit @ unit.T,
        "identified": identified(x, label, train).mean(),
        "identified_centred": identified(by_half, label, train).mean(),
        "clusters": v_measure(x, label, count, seed),
        "clusters_centred": v_measure(centred, label, count, seed),
        "retrieved": retrieved(x, label, count) if translations else nothing,
        "retrieved_centred": retrieved(centred, label, count) if translations else nothing,
    }
