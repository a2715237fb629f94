"""The labels of a data set, and its examples by what they are for: to train, to stop, to score."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, counted
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.targets import SpanTokens, has_targets, span_tokens
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.ranking import WikiqaTask
from bertvision.pipelines.tasks.sentences.similarity import SimilarityTask
from bertvision.pipelines.tasks.soundness import SplitSoundness, soundness
from bertvision.pipelines.tasks.treebank import TreebankTask
from bertvision.pipelines.uncertainty import cluster_numbers
from bertvision.pipelines.workspace.dataset import Dataset

log = logging.getLogger(__name__)
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
    texts: Sequence[Hashable]
    """(examples,) texts, equal ones of which must stay together."""
    groups: Sequence[Hashable] | None = None
    """(examples,) groups of which each is left out once; None deals the texts into folds."""


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
    """(examples,) index of the class; −1 where there is none, the number of classes where it is one
    that training lacks."""
    texts: list[str]
    """(examples,) the sentence, or both of a pair; of words themselves. Control tasks give equal
    ones the same label."""
    classes: tuple[str, ...]
    """Names of the classes."""
    folds: list[Fold]
    """The parts that the examples play."""
    soundness: dict[str, SplitSoundness]
    """Contradictions of each split, and what it shares with others."""
    scores: Floats | None = None
    """(examples,) score of each, NaN where there is none; None of classes. Labels are then 0."""
    clusters: list[str] | None = None
    """(examples,) cluster of each, which intervals draw: the sentence of words, or the group that
    is left out; None draws examples."""
    spans: dict[str, SpanTokens] | None = None
    """Tokens of the examples of each split, of data whose labels are those of words."""

    @property
    def name(self) -> str:
        """Name of the data set, or of the workspace's own task."""
        return self.dataset or self.task

    @property
    def scored(self) -> Rows:
        """Numbers of the examples that are scored, in order."""
        return np.sort(np.concatenate([fold.test for fold in self.folds]))

    @property
    def scored_clusters(self) -> list[int] | None:
        """(scored,) number of the cluster of each scored example, in order; None without any."""
        if self.clusters is None:
            return None
        numbers: list[int] = cluster_numbers([self.clusters[i] for i in self.scored]).tolist()
        return numbers

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


class _Part(NamedTuple):
    """The examples of a split, with what is read of them."""

    labelled: Labelled
    texts: list[str]
    """(examples,) text of each, as in `ProbeData.texts`."""
    scores: Floats
    """(examples,) score or class of each; NaN where there is none."""
    clusters: Sequence[str] = ()
    """(examples,) cluster of each, or nothing."""
    spans: SpanTokens | None = None
    """Tokens of the examples, of data whose labels are those of words."""


def read_data(
    dataset: Dataset, options: ProbeOptions, tokenizer: Callable[[], Any] | None = None
) -> ProbeData:
    """Read the labels of a data set and part its examples.

    Splits without a label are left out. Of the workspace's own data, ``tune`` stops the training
    and ``dev`` is scored. Where labels are those of words, each labelled word or span is an
    example, and those of a sentence stay together.

    Args:
        dataset: A data set of the workspace.
        options: Settings of the partition.
        tokenizer: Loads the tokenizer of the encoder, where labels are those of words.

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
    parts: dict[str, _Part] = {}
    for name in dataset.splits:
        if has_targets(dataset.task) and tokenizer is not None:
            part = _of_targets(dataset, name, options, tokenizer())
        else:
            part = _of_sentences(dataset, name, options)
        if np.isfinite(part.scores).any():
            parts[name] = part
    if not parts:
        raise InputError(f"{what} has no labels: a probe needs an example of two classes or more")
    labels = {name: part.labelled for name, part in parts.items()}
    roles = labels
    if dataset.finetune is not None and "tune" in labels:
        roles = {_OWN_ROLES[name]: part for name, part in labels.items()}
    folds = partition(roles, options)
    every = np.concatenate([part.labels for part in labels.values()])
    if dataset.classes:
        _check_classes(folds, every)
    spans = {name: part.spans for name, part in parts.items() if part.spans is not None}
    return ProbeData(
        dataset=dataset.name,
        task=dataset.task.name,
        sizes={name: len(part.labels) for name, part in labels.items()},
        labels=every,
        texts=[text for part in parts.values() for text in part.texts],
        classes=tuple(dataset.classes),
        folds=folds,
        soundness=soundness(
            {name: map(dataset.task.example, dataset.items(name)) for name in labels}
        ),
        scores=None
        if dataset.classes
        else np.concatenate([part.scores for part in parts.values()]),
        clusters=[x for part in parts.values() for x in part.clusters] or None,
        spans=spans or None,
    )


def _of_sentences(dataset: Dataset, split: str, options: ProbeOptions) -> _Part:
    """The labelled sentences of a split."""
    sentences = dataset.items(split)
    if not all(isinstance(item, Sentence) for item in sentences):
        raise InputError(
            f"{dataset.name or dataset.task.name} has no sentences to probe: choose a task of "
            "sentences, or of words, such as tagging"
        )
    given = np.array([np.nan if x.label is None else x.label for x in sentences], np.float64)
    texts = [x.text if x.pair is None else f"{x.text}\t{x.pair}" for x in sentences]
    present = np.where(np.isfinite(given), 0.0 if not dataset.classes else given, -1)
    groups = None
    if options.group is not None:
        groups = _groups(dataset.column(split, options.group), sentences, options.group)
    labelled = Labelled(present.astype(np.int64), texts, groups)
    return _Part(labelled, texts, given, groups or ())


def _of_targets(dataset: Dataset, split: str, options: ProbeOptions, tokenizer: Any) -> _Part:
    """The labelled words or spans of a split of which every word has a token."""
    what = dataset.name or dataset.task.name
    if options.group is not None:
        raise InputError(
            f"--group {options.group}: the examples of {what} are words, of which those of a "
            "sentence stay together: leave it out"
        )
    tokens = span_tokens(dataset, split, tokenizer)
    rows = np.flatnonzero(tokens.whole)
    if lacking := len(tokens.window) - len(rows):
        log.warning(
            "%s of %s have a word without a token in its window: no probe reads them "
            "(--max-length, where the data are first named, makes room)",
            *(
                f"{lacking:,} of {counted(len(tokens.window), 'labelled span')}",
                f"{split} of {what}",
            ),
        )
    number = {name: i for i, name in enumerate(dataset.classes)}
    items = dataset.items(split)
    targets = [(item, target) for item in items for target in dataset.task.targets(item)]
    chosen = [targets[row] for row in rows]
    # a label that training lacks can never be told, and counts as wrong
    unknown = len(number) if split != "train" and "train" in dataset.splits else -1
    labels = np.array(
        [number.get(target.label, unknown) if target.label else -1 for _, target in chosen],
        np.int64,
    )
    words = [
        "\t".join(" ".join(item.words[a:b]) for a, b in target.spans) for item, target in chosen
    ]
    return _Part(
        Labelled(labels, [item.text for item, _ in chosen]),
        words,
        np.where(labels < 0, np.nan, labels),
        [f"{split} {item.id}" for item, _ in chosen],
        tokens.take(rows),
    )


def partition(splits: Mapping[str, Labelled], options: ProbeOptions) -> list[Fold]:
    """Folds of a data set, by the splits that it has.

    With train, dev and test, these are used as they are. Without a test split, or with one that has
    no labels, dev is scored, and a seeded, stratified part of train is held out in its place.
    Without dev it is held out likewise. A data set in one piece is cross-validated: every example
    is scored once, by the probe of the fold that did not see it. With groups each of these is a
    fold; of its texts the training sees none, not even those that other groups have too.

    SentEval (``senteval/tools/validation.py``) chooses the weight decay of data without dev by a
    cross-validation inside the training examples, ten times the work; here the held-out part does
    that.

    Args:
        splits: Splits in the order in which examples are counted.
        options: Settings with ``folds``, ``dev_fraction`` and ``seed``.

    Raises:
        InputError: a part would be empty, or there are groups and splits to score.
    """
    start, rows = 0, dict[str, Rows]()
    for name, split in splits.items():
        rows[name] = start + np.flatnonzero(split.labels >= 0)
        start += len(split.labels)
    labels = np.concatenate([split.labels for split in splits.values()])
    texts = [text for split in splits.values() for text in split.texts]
    groups = [group for split in splits.values() for group in split.groups or ()]
    present = [name for name in rows if len(rows[name])]

    def dealt(some: Rows, parts: int) -> Rows:
        return stratified(labels[some], [texts[i] for i in some], parts, options.seed)

    def hold_out(some: Rows, test: Rows) -> Fold:
        part = dealt(some, max(2, round(1 / options.dev_fraction)))
        return Fold(some[part != 0], some[part == 0], test)

    if groups:
        if len(present) > 1:
            raise InputError(
                f"--group {options.group}: the data have the splits {', '.join(present)}, which "
                "say what is scored: give them in one file, or leave the option out"
            )
        folds = [hold_out(*part) for part in _left_out(groups, texts, rows[present[0]])]
    elif {"train", "dev", "test"} <= set(present):
        folds = [Fold(rows["train"], rows["dev"], rows["test"])]
    elif "train" in present and len(present) > 1:
        scored = "test" if "test" in present else "dev" if "dev" in present else present[-1]
        folds = [hold_out(rows["train"], rows[scored])]
    else:
        every = np.concatenate(list(rows.values()))
        part = dealt(every, options.folds)
        folds = [hold_out(every[part != k], every[part == k]) for k in range(options.folds)]
    _check(folds, labels, len(set(texts)))
    return folds


def _groups(values: Sequence[Any], sentences: Sequence[Sentence], column: str) -> list[str]:
    """The group of each example, as text.

    Raises:
        InputError: an example has none, or all have the same.
    """
    for value, sentence in zip(values, sentences, strict=True):
        if not isinstance(value, str | int) or (isinstance(value, str) and not value.strip()):
            raise InputError(
                f"--group {column}: {sentence.id} has {value!r}: give every example a group, a "
                "text or a number"
            )
    groups = [str(value).strip() for value in values]
    if len(set(groups)) < 2:
        raise InputError(
            f"--group {column}: all {len(groups)} examples are of one group: there must be another "
            "to learn from"
        )
    return groups


def _left_out(
    groups: Sequence[Hashable], texts: Sequence[Hashable], scored: Rows
) -> Iterator[tuple[Rows, Rows]]:
    """Numbers of the examples to learn from and of those to score, a pair for each group."""
    numbers = cluster_numbers([groups[i] for i in scored])
    for number in range(numbers.max() + 1):
        test = scored[numbers == number]
        seen = {texts[i] for i in test}
        train = [i for i in scored[numbers != number] if texts[i] not in seen]
        yield np.array(train, np.int64), test


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
