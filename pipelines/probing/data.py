"""The labels of a data set, as probes need them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.probing.partition import Fold, Labelled, partition
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.similarity import SimilarityTask
from bertvision.pipelines.tasks.sentences.wikiqa import WikiqaTask
from bertvision.pipelines.tasks.soundness import SplitSoundness, soundness
from bertvision.pipelines.tasks.trees.treebank import TreebankTask
from bertvision.pipelines.workspace.dataset import Dataset


@dataclass(frozen=True)
class ProbeData:
    """Labelled examples of all splits, one after the other."""

    dataset: str | None
    """Name of the data set; None of the workspace's own."""
    task: str
    """Name of its task."""
    sizes: dict[str, int]
    """Examples of each split that is used, in order."""
    labels: npt.NDArray[np.int64]
    """(examples,) index of the class; −1 where there is none."""
    texts: list[str]
    """(examples,) the sentence, or both of a pair."""
    classes: tuple[str, ...]
    """Names of the classes."""
    folds: list[Fold]
    """The parts that the examples play."""
    soundness: dict[str, SplitSoundness]
    """Contradictions of each split, and what it shares with others."""

    @property
    def name(self) -> str:
        """Name of the data set, or of the workspace's own task."""
        return self.dataset or self.task

    @property
    def scored(self) -> npt.NDArray[np.int64]:
        """Numbers of the examples that are scored, in order."""
        return np.sort(np.concatenate([fold.test for fold in self.folds]))


def read_data(dataset: Dataset, options: ProbeOptions) -> ProbeData:
    """Read the labels of a data set and part its examples.

    Splits without a label are left out. Of the workspace's own data, ``tune`` stops the training
    and ``dev`` is scored.

    Raises:
        InputError: it has no classes, or not enough examples.
        WorkspaceError: its source is gone or not what it was.
    """
    what = dataset.name or dataset.task.name
    if isinstance(dataset.task, WikiqaTask):
        raise InputError(
            f"{what} has no labels of single texts, only of pairs of a question and a passage: "
            f"rank them with `bertvision rank {what}`"
        )
    if isinstance(dataset.task, SimilarityTask):
        raise InputError(
            f"{what} has no labels of single texts, only scores of pairs: correlate with them by "
            f"`bertvision similarity {what}`"
        )
    if isinstance(dataset.task, TreebankTask):
        raise InputError(
            f"{what} has labels of words alone, none of whole texts: probe it with `bertvision "
            "structure`"
        )
    if not dataset.classes:
        raise InputError(
            f"{what} has no classes: probes are classifiers, for tasks that give a sentence or a "
            "pair one of several labels; scores such as those of stsb are learned by heads "
            "(`bertvision train`)"
        )
    items = {name: dataset.items(name) for name in dataset.splits}
    labels: dict[str, Labelled] = {}
    texts: list[str] = []
    for name, found in items.items():
        if not all(isinstance(item, Sentence) for item in found):
            raise InputError(f"{what} has no sentences to probe: choose a task of sentences")
        given = np.array([-1 if x.label is None else x.label for x in found], np.int64)
        if (given >= 0).any():
            own = [x.text if x.pair is None else f"{x.text}\t{x.pair}" for x in found]
            labels[name] = Labelled(given, own)
            texts += own
    if not labels:
        raise InputError(f"{what} has no labels: a probe needs an example of two classes or more")
    roles = dict(labels)
    if dataset.finetune is not None and "tune" in roles:
        roles = {_OWN_ROLES[name]: part for name, part in labels.items()}
    return ProbeData(
        dataset=dataset.name,
        task=dataset.task.name,
        sizes={name: len(part.labels) for name, part in labels.items()},
        labels=np.concatenate([part.labels for part in labels.values()]),
        texts=texts,
        classes=tuple(dataset.classes),
        folds=partition(roles, options),
        soundness=soundness({name: map(dataset.task.example, items[name]) for name in labels}),
    )


_OWN_ROLES = {"train": "train", "tune": "dev", "dev": "test"}
