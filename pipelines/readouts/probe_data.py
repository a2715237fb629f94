"""The labels of a data set, and its examples by what they are for: to train, to stop, to score."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.ranking import WikiqaTask
from bertvision.pipelines.tasks.sentences.similarity import SimilarityTask
from bertvision.pipelines.tasks.soundness import SplitSoundness, soundness
from bertvision.pipelines.tasks.treebank import TreebankTask
from bertvision.pipelines.uncertainty import cluster_numbers
from bertvision.pipelines.workspace.dataset import Dataset

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_OWN_ROLES = {"train": "train", "tune": "dev", "dev": "test"}
_NO_LABELS: dict[type, str] = {
    WikiqaTask: "has no labels of single texts, only of pairs of a question and a passage: rank "
    "them with `bertvision rank {name}`",
    SimilarityTask: "has no labels of single texts, only scores of pairs: correlate with them by "
    "`bertvision similarity {name}`",
    TreebankTask: "has labels of words alone, none of whole texts: probe it with `bertvision "
    "structure`",
}
"""Tasks that have readouts of their own, and the message that names these."""


class Fold(NamedTuple):
    """Numbers of examples, counted through all splits of a data set in their order."""

    train: Rows
    """Examples that probes learn."""
    held_out: Rows
    """Examples that stop the training and choose the weight decay."""
    test: Rows
    """Examples that are scored."""


class Labelled(NamedTuple):
    """The examples of one split, as far as a partition needs them."""

    labels: Rows
    """(examples,) index of the class; −1 where there is none."""
    groups: Sequence[Hashable]
    """(examples,) groups that must stay together: the texts."""


@dataclass(frozen=True)
class ProbeData:
    """Labelled examples of all splits, one after the other."""

    dataset: str | None
    """Name of the data set; None of the workspace's own."""
    task: str
    """Name of its task."""
    sizes: dict[str, int]
    """Examples of each split that is used, in order."""
    labels: Rows
    """(examples,) index of the class; −1 where there is none."""
    texts: list[str]
    """(examples,) the sentence, or both of a pair."""
    classes: tuple[str, ...]
    """Names of the classes."""
    folds: list[Fold]
    """The parts that the examples play."""
    soundness: dict[str, SplitSoundness]
    """Contradictions of each split, and what it shares with others."""
    scores: Floats | None = None
    """(examples,) score of each, NaN where there is none; None of classes. Labels are then 0."""

    @property
    def name(self) -> str:
        """Name of the data set, or of the workspace's own task."""
        return self.dataset or self.task

    @property
    def scored(self) -> Rows:
        """Numbers of the examples that are scored, in order."""
        return np.sort(np.concatenate([fold.test for fold in self.folds]))

    @property
    def counts(self) -> dict[str, int]:
        """Number of folds, of examples that train and are held out in the first, and of scored."""
        first = self.folds[0]
        return {
            "folds": len(self.folds),
            "train": len(first.train),
            "held_out": len(first.held_out),
            "scored": len(self.scored),
        }


def read_data(dataset: Dataset, options: ProbeOptions) -> ProbeData:
    """Read the labels of a data set and part its examples.

    Splits without a label are left out. Of the workspace's own data, ``tune`` stops the training
    and ``dev`` is scored.

    Args:
        dataset: A data set of the workspace.
        options: Settings of the partition.

    Raises:
        InputError: it has no labels of the kind that the solver learns, not enough examples, or
            those of the training are of one class.
        WorkspaceError: its source is gone or not what it was.
    """
    what = dataset.name or dataset.task.name
    for kind, message in _NO_LABELS.items():
        if isinstance(dataset.task, kind):
            raise InputError(f"{what} {message.format(name=what)}")
    if not dataset.classes and options.solver != "ridge":
        raise InputError(
            f"{what} has no classes, which probes learn by default: --solver ridge learns the "
            "scores of a sentence or a pair, such as those of stsb"
        )
    if dataset.classes and options.solver == "ridge":
        raise InputError(
            f"--solver ridge learns scores, and {what} has classes: take lbfgs, or leave it out"
        )
    items = {name: dataset.items(name) for name in dataset.splits}
    labels: dict[str, Labelled] = {}
    texts: list[str] = []
    scores: list[Floats] = []
    for name, sentences in items.items():
        if not all(isinstance(item, Sentence) for item in sentences):
            raise InputError(f"{what} has no sentences to probe: choose a task of sentences")
        given = np.array([np.nan if x.label is None else x.label for x in sentences], np.float64)
        if np.isfinite(given).any():
            own = [x.text if x.pair is None else f"{x.text}\t{x.pair}" for x in sentences]
            present = np.where(np.isfinite(given), 0.0 if not dataset.classes else given, -1)
            labels[name] = Labelled(present.astype(np.int64), own)
            scores.append(given)
            texts += own
    if not labels:
        raise InputError(f"{what} has no labels: a probe needs an example of two classes or more")
    roles = labels
    if dataset.finetune is not None and "tune" in labels:
        roles = {_OWN_ROLES[name]: part for name, part in labels.items()}
    folds = partition(roles, options)
    every = np.concatenate([part.labels for part in labels.values()])
    if dataset.classes:
        _check_classes(folds, every)
    return ProbeData(
        dataset=dataset.name,
        task=dataset.task.name,
        sizes={name: len(part.labels) for name, part in labels.items()},
        labels=every,
        texts=texts,
        classes=tuple(dataset.classes),
        folds=folds,
        soundness=soundness({name: map(dataset.task.example, items[name]) for name in labels}),
        scores=None if dataset.classes else np.concatenate(scores),
    )


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
        splits: Splits in the order in which examples are counted.
        options: Settings with ``folds``, ``dev_fraction`` and ``seed``.

    Raises:
        InputError: a part would be empty.
    """
    start, rows = 0, dict[str, Rows]()
    for name, split in splits.items():
        rows[name] = start + np.flatnonzero(split.labels >= 0)
        start += len(split.labels)
    labels = np.concatenate([split.labels for split in splits.values()])
    groups = [group for split in splits.values() for group in split.groups]
    present = [name for name in rows if len(rows[name])]

    def dealt(some: Rows, parts: int) -> Rows:
        return stratified(labels[some], [groups[i] for i in some], parts, options.seed)

    def hold_out(some: Rows, test: Rows) -> Fold:
        part = dealt(some, max(2, round(1 / options.dev_fraction)))
        return Fold(some[part != 0], some[part == 0], test)

    if {"train", "dev", "test"} <= set(present):
        folds = [Fold(rows["train"], rows["dev"], rows["test"])]
    elif "train" in present and len(present) > 1:
        scored = "test" if "test" in present else "dev" if "dev" in present else present[-1]
        folds = [hold_out(rows["train"], rows[scored])]
    else:
        every = np.concatenate(list(rows.values()))
        part = dealt(every, options.folds)
        folds = [hold_out(every[part != k], every[part == k]) for k in range(options.folds)]
    _check(folds, labels, len(set(groups)))
    return folds


def stratified(labels: Rows, groups: Sequence[Hashable], parts: int, seed: int) -> Rows:
    """Deal examples into parts of equal size with equal shares of every class.

    Groups are shuffled within the class of their first example and dealt one after the other, class
    after class without starting anew, so that sizes differ by one group at most.

    Args:
        labels: (examples,)
        groups: (examples,) examples of a group come into the same part.
        parts: Number of parts.
        seed: Seed of the shuffling.

    Returns:
        (examples,) number of the part.
    """
    random = np.random.default_rng(seed)
    member = cluster_numbers(groups)
    first = np.zeros(len(set(groups)), np.int64)
    first[member[::-1]] = labels[::-1]  # the first example of a group is written last
    shuffled = random.permutation(len(first))
    order = shuffled[np.argsort(first[shuffled], kind="stable")]
    dealt = np.empty(len(first), np.int64)
    dealt[order] = np.arange(len(first)) % parts
    return dealt[member]


def majority(train: Rows, scored: Rows) -> float:
    """Accuracy, in per cent, of always giving the class that is most frequent in training.

    Args:
        train: (training examples,) classes.
        scored: (scored examples,) classes.
    """
    return 100 * float((scored == np.bincount(train).argmax()).mean())


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


def _check_classes(folds: Sequence[Fold], labels: Rows) -> None:
    for fold in folds:
        if len(np.unique(labels[fold.train])) < 2:
            raise InputError(
                f"all {len(fold.train)} training examples are of one class: a probe has nothing to "
                "learn; give data with two classes or more"
            )
