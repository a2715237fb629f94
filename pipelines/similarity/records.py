"""Similarities that were measured, as kept in ``similarity/<data set>/``.

One file holds those of a snapshot and a pooling with the same settings, and what they were made
from. It is replaced as a whole whenever some are added.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bertvision.errors import ProvenanceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import Provenance, first_difference
from bertvision.pipelines.records import (
    Count,
    Record,
    leaving_out,
    read_record,
    write_record,
)
from bertvision.pipelines.similarity.metrics import Agreement, Value
from bertvision.pipelines.similarity.options import ScorerName, SimilarityOptions
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.tasks.soundness import SplitSoundness

FOLDER = "similarity"
Target = Literal["relatedness", "entailment"]
"""What people were asked."""


class SimilarityScore(Record):
    """One scorer on one input."""

    layers: tuple[int, ...]
    """Hidden states, end to end where there are several."""
    scorer: ScorerName
    target: Target
    agreements: list[Agreement] = []
    """Correlations of all pairs, of sub-sets and their means; empty of entailment."""
    mse: Value | None = None
    """Mean squared error in squared points of the score, of the trained scorer of relatedness."""
    accuracy: Value | None = None
    """Per cent, of entailment."""
    dev: float | None
    """Spearman, Pearson (trained) or accuracy on the pairs that are chosen on, mean over seeds;
    None where the data have none but the scored."""
    epochs: list[int] = []
    """The chosen epoch, by seed."""


class SimilarityFile(Record):
    """All similarities of a snapshot, a pooling and one choice of settings."""

    dataset: str
    """Name of the data set, which is that of its task."""
    tag: str
    pooling: TokenPooling
    settings: SimilarityOptions
    made_from: Provenance
    """Provenance of the hidden states and of the data: any difference is refused."""
    scored_part: str
    """``test``, or ``dev`` of data whose test has no scores."""
    pairs: dict[str, Count]
    """How many are scored; where there is a training part, how many train and are chosen on."""
    unscored: dict[str, Count]
    """Pairs that nobody judged and that are left out, by sub-set."""
    missing: list[str]
    """Sub-sets that the data lack."""
    soundness: dict[str, SplitSoundness]
    """Pairs under two scores, and pairs that parts share."""
    sentences: dict[str, SplitSoundness]
    """Single sentences that parts share."""
    overlap: list[Agreement]
    """What the words that both sentences of a pair have tell, the baseline."""
    majority: float | None
    """Accuracy of always naming the most frequent judgement; None without entailment."""
    scores: list[SimilarityScore]

    def find(
        self, layers: tuple[int, ...], scorer: ScorerName, target: Target
    ) -> SimilarityScore | None:
        """The score of a scorer on an input, if it was measured."""
        key = layers, scorer, target
        found = (s for s in self.scores if (s.layers, s.scorer, s.target) == key)
        return next(found, None)

    def adding(self, scores: list[SimilarityScore]) -> SimilarityFile:
        """The same with more scores, in order of target, scorer and layers."""
        ordered = sorted(
            [*self.scores, *scores],
            key=lambda s: (s.target == "entailment", s.scorer, len(s.layers), s.layers),
        )
        return self.model_copy(update={"scores": ordered})


def write(root: Path, file: SimilarityFile) -> None:
    """Keep similarities; the file is whole at any time."""
    path = _place(root, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, file)


def resume(root: Path, new: SimilarityFile) -> SimilarityFile:
    """What was kept of the same snapshot, pooling and settings; ``new`` where nothing was.

    Args:
        root: of the workspace.
        new: without scores, with what they would be made from now.

    Raises:
        ProvenanceError: what was kept was made from something else; names the field.
        WorkspaceError: the file is damaged.
    """
    path = _place(root, new)
    if not path.exists():
        return new
    held = read_record(path, SimilarityFile, "bertvision similarity")
    if difference := first_difference(held.made_from, new.made_from):
        name, there, here = difference
        raise ProvenanceError(
            f"{path} was made with {name} = {there!r}, now it is {here!r}: delete that file to "
            "measure again, or use another --workspace"
        )
    return held


def read_all(root: Path, damaged: list[str] | None = None) -> list[SimilarityFile]:
    """All similarities of the workspace at ``root``, by data set, settings, snapshot and pooling.

    Args:
        root: of the workspace.
        damaged: gets a message for each file that is damaged, which is then left out.

    Raises:
        WorkspaceError: a file is damaged, and there is no list of these.
    """
    found = []
    for path in sorted((root / FOLDER).glob("*/*.json")):
        with leaving_out(damaged):
            found.append(read_record(path, SimilarityFile, "bertvision similarity"))
    return sorted(
        found, key=lambda f: (f.dataset, f.settings.digest, SnapshotTag(f.tag), f.pooling)
    )


def _place(root: Path, file: SimilarityFile) -> Path:
    name = f"{file.tag}-{file.pooling}-{file.settings.digest}.json"
    return root / FOLDER / file.dataset / name
