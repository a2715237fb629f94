"""Similarities that were measured, as kept in ``similarity/<data set>/``."""

from __future__ import annotations

from typing import ClassVar, Literal

from bertvision.pipelines.measurements import Measurements
from bertvision.pipelines.records import Count, Record
from bertvision.pipelines.similarity.metrics import Agreement, Value
from bertvision.pipelines.similarity.options import ScorerName, SimilarityOptions
from bertvision.pipelines.tasks.soundness import SplitSoundness

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


class SimilarityFile(Measurements):
    """All similarities of a snapshot, a pooling and one choice of settings."""

    folder: ClassVar[str] = "similarity"
    makes: ClassVar[str] = "bertvision similarity"

    settings: SimilarityOptions
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

    def adding(self, score: SimilarityScore) -> SimilarityFile:
        """The same with one more score, in order of target, scorer and layers."""
        ordered = sorted(
            [*self.scores, score],
            key=lambda s: (s.target == "entailment", s.scorer, len(s.layers), s.layers),
        )
        return self.model_copy(update={"scores": ordered})
