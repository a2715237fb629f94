"""The pairs of a data set by what they are for: to train, to choose, to be scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.grouping import linked
from bertvision.pipelines.tasks.sentences.similarity import SPLIT, SimilarityTask
from bertvision.pipelines.tasks.sentences.similarity_data import (
    HIGH,
    SIMILARITY,
    SimilarityPair,
    read_similarity,
)
from bertvision.pipelines.tasks.soundness import SplitSoundness, soundness
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.selection import hold_out_items

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """Some pairs, as arrays: (pairs,) each."""

    first: Ints
    """Index among the texts."""
    second: Ints
    score: Floats
    label: Ints
    """Index of the judgement of entailment; −1 where nobody was asked."""
    subset: Ints
    """Index among the sub-sets of the data."""

    def __len__(self) -> int:
        return len(self.score)


@dataclass(frozen=True)
class SimilarityParts:
    """A data set, its pairs parted."""

    name: str
    classes: npt.NDArray[np.int64]
    """Scores that a class of the softmax regression stands for, ascending."""
    subsets: list[str]
    """Names of the sub-sets that there are; of data without any its own name."""
    texts: list[str]
    train: Pairs | None
    """None where the data have no training part."""
    chosen_on: Pairs | None
    """Pairs that epochs and layers are chosen on; None where there are none but the scored."""
    scored: Pairs
    scored_part: str
    """``test``, or ``dev`` of data whose test has no scores."""
    unscored: dict[str, int]
    """Pairs without a score, by sub-set."""
    missing: tuple[str, ...]
    """Sub-sets that are not there."""
    soundness: dict[str, SplitSoundness]
    """Pairs under two scores, and pairs that parts share, whichever sentence comes first."""
    sentences: dict[str, SplitSoundness]
    """The same of single sentences: those of a part that an earlier part has too."""

    @property
    def entailment(self) -> bool:
        """Whether people judged entailment too."""
        return bool((self.scored.label >= 0).all())


def read_parts(dataset: Dataset, dev_fraction: float) -> SimilarityParts:
    """Read a data set and part its pairs.

    Scored is ``test`` where there is one, else ``dev``. Chosen is on ``dev``; where that is scored
    itself or missing, on a part of ``train`` that shares no sentence with the rest.

    Args:
        dataset: added to the workspace.
        dev_fraction: part of the training pairs to hold out where it is needed.

    Raises:
        InputError: it is no data set of similarity.
        WorkspaceError: its files changed since it was added.
    """
    if not isinstance(dataset.task, SimilarityTask):
        raise InputError(
            f"{dataset.name or dataset.task.name} has no similarities: the tasks are "
            f"{', '.join(SIMILARITY)}"
        )
    name, recorded = dataset.task.name, dataset.data[SPLIT]
    data = read_similarity(name, recorded.source)
    if data.sha256 != recorded.sha256:
        raise WorkspaceError(
            f"{recorded.source} changed since it was added (sha256 {data.sha256[:12]}…, recorded "
            f"{recorded.sha256[:12]}…): put the old files back, or use another --workspace"
        )
    parts: dict[str, list[SimilarityPair]] = {}
    for pair in data.pairs:
        parts.setdefault(pair.part, []).append(pair)
    scored_part = "test" if "test" in parts else "dev"
    if "dev" not in parts or scored_part == "dev":
        parts |= _held_out(parts.get("train", []), data.texts, dev_fraction)
    subsets = list(dict.fromkeys(pair.subset for pair in data.pairs))

    def arrays(part: str) -> Pairs | None:
        return _arrays(parts[part], subsets) if parts.get(part) else None

    scored = arrays(scored_part)
    assert scored is not None  # the reader refuses data without a scored part
    texts = [sentence.text for sentence in data.texts]
    return SimilarityParts(
        name=name,
        classes=np.arange(SIMILARITY[name].low, HIGH + 1),
        subsets=subsets,
        texts=texts,
        train=arrays("train"),
        chosen_on=arrays("tune" if scored_part == "dev" or "tune" in parts else "dev"),
        scored=scored,
        scored_part=scored_part,
        unscored=data.unscored,
        missing=data.missing,
        soundness=soundness(
            {
                part: [(frozenset((p.first, p.second)), p.score) for p in found]
                for part, found in parts.items()
            }
        ),
        sentences=soundness(
            {
                part: [(i, None) for i in sorted({i for p in found for i in (p.first, p.second)})]
                for part, found in parts.items()
            }
        ),
    )


def _held_out(
    train: list[SimilarityPair], texts: Sequence[Sentence], fraction: float
) -> dict[str, list[SimilarityPair]]:
    """``train`` without the part that is held out, and this as ``tune``."""
    names = linked((texts[pair.first].text, texts[pair.second].text) for pair in train)
    kept, held = hold_out_items(train, fraction, lambda pair: names[texts[pair.first].text], seed=0)
    return {"train": kept, "tune": held} if kept and held else {}


def _arrays(pairs: Sequence[SimilarityPair], subsets: Sequence[str]) -> Pairs:
    labels = [-1 if pair.label is None else pair.label for pair in pairs]
    return Pairs(
        np.array([pair.first for pair in pairs], np.int64),
        np.array([pair.second for pair in pairs], np.int64),
        np.array([pair.score for pair in pairs], np.float64),
        np.array(labels, np.int64),
        np.array([subsets.index(pair.subset) for pair in pairs], np.int64),
    )
