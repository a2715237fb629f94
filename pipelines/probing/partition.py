"""The examples that train a probe, those that stop it, those that score it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.probing.options import ProbeOptions

Rows = npt.NDArray[np.int64]


class Fold(NamedTuple):
    """Numbers of examples, counted through all splits of a data set in their order."""

    train: Rows
    """Probes learn these."""
    held_out: Rows
    """These stop the training and choose the weight decay."""
    test: Rows
    """These are scored."""


class Labelled(NamedTuple):
    """The examples of one split, as far as a partition needs them."""

    labels: Rows
    """(examples,) index of the class; −1 where there is none."""
    groups: Sequence[Hashable]
    """(examples,) what must stay together: the text."""


def partition(splits: Mapping[str, Labelled], options: ProbeOptions) -> list[Fold]:
    """Folds of a data set, by the splits that it has.

    With train, dev and test, these are used as they are. Without a test split, or with one that has
    no labels, dev is scored, and a seeded, stratified part of train is held out in its place.
    Without dev it is held out likewise. A data set in one piece is cross-validated: every example
    is scored once, by the probe of the fold that did not see it.

    SentEval (``senteval/tools/validation.py``) chooses the weight decay of data without dev by a
    cross-validation inside the training examples, ten times the work; here the held-out part does
    that.

    Args:
        splits: in the order in which examples are counted.
        options: with ``folds``, ``dev_fraction`` and ``seed``.

    Raises:
        InputError: a part would be empty, or the training examples are of one class.
    """
    start, rows = 0, dict[str, Rows]()
    for name, split in splits.items():
        known = np.flatnonzero(split.labels >= 0)
        rows[name] = start + known
        start += len(split.labels)
    labels = np.concatenate([split.labels for split in splits.values()])
    groups = [group for split in splits.values() for group in split.groups]
    present = [name for name in rows if len(rows[name])]

    def hold_out(some: Rows, test: Rows) -> Fold:
        parts = max(2, round(1 / options.dev_fraction))
        part = stratified(labels[some], [groups[i] for i in some], parts, options.seed)
        return Fold(some[part != 0], some[part == 0], test)

    if {"train", "dev", "test"} <= set(present):
        folds = [Fold(rows["train"], rows["dev"], rows["test"])]
    elif "train" in present and len(present) > 1:
        scored = "test" if "test" in present else "dev" if "dev" in present else present[-1]
        folds = [hold_out(rows["train"], rows[scored])]
    else:
        every = np.concatenate(list(rows.values()))
        part = stratified(labels[every], [groups[i] for i in every], options.folds, options.seed)
        folds = [hold_out(every[part != k], every[part == k]) for k in range(options.folds)]
    _check(folds, labels, len(set(groups)))
    return folds


def stratified(
    labels: Rows, groups: Sequence[Hashable], parts: int, seed: int
) -> npt.NDArray[np.int64]:
    """Deal examples into parts of equal size with equal shares of every class.

    Groups are shuffled within the class of their first example and dealt one after the other, class
    after class without starting anew, so that sizes differ by one group at most.

    Args:
        labels: (examples,)
        groups: (examples,) examples of a group come into the same part.
        parts: how many.
        seed: of the shuffling.

    Returns:
        (examples,) number of the part.
    """
    random = np.random.default_rng(seed)
    numbers: dict[Hashable, int] = {}
    member = np.array([numbers.setdefault(group, len(numbers)) for group in groups], np.int64)
    first = np.zeros(len(numbers), np.int64)
    first[member[::-1]] = labels[::-1]  # the first example of a group is written last
    shuffled = random.permutation(len(first))
    order = shuffled[np.argsort(first[shuffled], kind="stable")]
    dealt = np.empty(len(first), np.int64)
    dealt[order] = np.arange(len(first)) % parts
    return dealt[member]


def _check(folds: Sequence[Fold], labels: Rows, texts: int) -> None:
    for fold in folds:
        sizes = {name: len(rows) for name, rows in fold._asdict().items()}
        if empty := [name.replace("_", "-") for name, size in sizes.items() if not size]:
            raise InputError(
                f"no {empty[0]} examples are left of {len(labels)} with {texts} different "
                "texts, of which equal ones stay together: give more texts"
                + (f", fewer --folds than {len(folds)}" if len(folds) > 2 and texts > 2 else "")
                + ", or a file with splits of its own"
            )
    for fold in folds:
        if len(np.unique(labels[fold.train])) < 2:
            raise InputError(
                f"all {len(fold.train)} training examples are of one class: a probe has nothing to "
                "learn; give data with two classes or more"
            )
