"""Every metric of a task: what it is called, what it means, and how it may be used.

Tables, comparisons, intervals, the report and the command line read this table. A task computes its
metrics itself, in ``score``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class Metric(NamedTuple):
    """One metric, on a scale of per cent.

    Attributes:
        label: Its name at the head of a column.
        meaning: A sentence that explains it; empty where the label says enough.
        correlation: Whether it runs from −100 to 100.
        whole: Whether it has no value for a single item. `sentences.metrics` then has a function of
            the same name that computes it from all answers; of the ratios of a task
            (`Task.ratios`) the task says the parts.
        comparable: Whether `compare` takes it.
        trivial: Name of the answer that scores ``majority``; empty where there is none.
        always: The same answer at the beginning of a sentence.
        score: Whether it rates a system, and so has a column in tables.
    """

    label: str
    meaning: str = ""
    correlation: bool = False
    whole: bool = False
    comparable: bool = False
    trivial: str = ""
    always: str = ""
    score: bool = True

    @property
    def name(self) -> str:
        """The name inside a sentence."""
        return self.label + (" correlation" if self.correlation else "")

    @property
    def unit(self) -> str:
        """The unit on an axis."""
        return "× 100" if self.correlation else "%"


METRICS: dict[str, Metric] = {
    "exact": Metric("EM", comparable=True),
    "accuracy": Metric(
        "accuracy",
        comparable=True,
        trivial="majority class",
        always="Always giving the commonest class",
    ),
    "f1": Metric("F1", comparable=True),
    "macro_f1": Metric(
        "macro F1",
        "Macro F1 is the mean of all classes' F1; an F1 beside it is that of the class that is "
        "looked for.",
        whole=True,
        comparable=True,
    ),
    "matthews": Metric(
        "Matthews",
        "Matthews is the correlation of the classes × 100: guessing scores 0.",
        correlation=True,
        whole=True,
        comparable=True,
    ),
    "precision": Metric("precision", "F1, precision and recall are those of answerable questions."),
    "recall": Metric("recall"),
    "HasAns_exact": Metric("HasAns EM"),
    "HasAns_f1": Metric("HasAns F1"),
    "NoAns_exact": Metric("NoAns"),
    "balanced": Metric(
        "balanced",
        "Balanced: the mean of HasAns F1 and NoAns, which the share of unanswerable questions does "
        "not move; never answering has 50.",
    ),
    "best_f1": Metric(
        "oracle F1",
        "Oracle F1: with the best threshold for the scored questions themselves (best_f1 of the "
        "official script), which no system can know.",
    ),
    "entity_f1": Metric(
        "entity F1",
        "Entity F1 is that of whole entities with the right kind, precision and recall are its "
        "parts; surface F1 counts an entity once, however often it occurs.",
        whole=True,
        comparable=True,
    ),
    "entity_precision": Metric("precision"),
    "entity_recall": Metric("recall"),
    "surface_f1": Metric("surface F1"),
    "las": Metric(
        "LAS",
        "LAS is the share of words with the right head and relation; punctuation counts, and so do "
        "words that the encoder did not see.",
        whole=True,
        comparable=True,
        trivial="commonest arc",
        always="Always giving one arc",
    ),
    "uas": Metric(
        "UAS", "UAS is the share of words with the right head.", whole=True, comparable=True
    ),
    "tau": Metric(
        "Kendall's τ",
        "Kendall's τ × 100 is the mean over paragraphs, a random order scores 0.",
        correlation=True,
        whole=True,
        comparable=True,
    ),
    "perfect": Metric(
        "perfect order",
        "Perfect orders are those in which every sentence is at its place.",
        whole=True,
        comparable=True,
    ),
    "pearson": Metric(
        "Pearson",
        "Pearson is the correlation of scores × 100.",
        correlation=True,
        whole=True,
        comparable=True,
    ),
    "spearman": Metric(
        "Spearman",
        "Spearman is the correlation of the ranks of scores × 100.",
        correlation=True,
        whole=True,
        comparable=True,
    ),
    "majority": Metric("majority", score=False),
}
"""The metrics by their key in a task's scores, in the order of columns."""

COMPARABLE = tuple(key for key, metric in METRICS.items() if metric.comparable)
"""The metrics that `compare` takes."""
if TYPE_CHECKING:
    MetricName = str
else:
    MetricName = Literal[COMPARABLE]
