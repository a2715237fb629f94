"""From the logits of a split's windows to scores: one way for BERT and for heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.tasks.decoding import (
    SpanPrediction,
    apply_threshold,
    decode,
    tune_threshold,
)
from bertvision.pipelines.tasks.registry import TASKS, Predicted
from bertvision.pipelines.tasks.squad import Question
from bertvision.pipelines.tasks.squad_metrics import squad_metrics

METRICS: dict[str, str] = {
    "exact": "EM",
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "matthews": "Matthews",
    "precision": "precision",
    "recall": "recall",
    "HasAns_exact": "HasAns EM",
    "HasAns_f1": "HasAns F1",
    "NoAns_exact": "NoAns",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "majority": "majority",
}
"""Names of the metrics as people read them, in the order of columns; all of them in per cent."""
CORRELATIONS = ("matthews", "pearson", "spearman")
"""Metrics from −100 to 100."""


class SplitLogits(NamedTuple):
    """Span logits of a split, with what decoding needs; ragged like `Windows`.

    Attributes:
        start_logits: (tokens,) float32.
        end_logits: (tokens,) float32.
        n_tokens: (windows,) tokens of each window.
        offset_mapping: (tokens, 2) characters of the context, −1 −1 outside it.
        question_index: (windows,) row in ``questions``.
        questions: of the split.
    """

    start_logits: npt.NDArray[np.float32]
    end_logits: npt.NDArray[np.float32]
    n_tokens: npt.NDArray[np.integer]
    offset_mapping: npt.NDArray[np.int32]
    question_index: npt.NDArray[np.integer]
    questions: Sequence[Question]

    @classmethod
    def of(cls, predicted: Predicted) -> SplitLogits:
        """The span logits of a system."""
        assert predicted.offset_mapping is not None
        return cls(
            predicted.logits["start_logits"],
            predicted.logits["end_logits"],
            predicted.n_tokens,
            predicted.offset_mapping,
            predicted.item_index,
            predicted.items,
        )

    def decode(self, rule: Literal["n-best", "argmax"]) -> dict[str, SpanPrediction]:
        """Predictions by question id."""
        return decode(
            self.start_logits,
            self.end_logits,
            n_tokens=self.n_tokens,
            offset_mapping=self.offset_mapping,
            question_index=self.question_index,
            questions=self.questions,
            rule=rule,
        )


class Scores(NamedTuple):
    """The scores of one system on one split.

    Attributes:
        rules: by decoding rule (of spans ``n-best`` with the tuned threshold, ``n-best, threshold
            0`` and ``argmax``; of classes ``argmax``), the threshold used and the metrics.
        predictions: by item id, the answers of ``n-best``, which is the official predictions
            file; whether the question is answerable; the index of the class; or the score.
        na_scores: by question id, how much better no answer scores than the best span, or than
            answerable; empty where the items are no questions.
    """

    rules: dict[str, dict[str, Any]]
    predictions: dict[str, str] | dict[str, bool] | dict[str, int] | dict[str, float]
    na_scores: dict[str, float]


class ClassLogits(NamedTuple):
    """Class logits of a split's windows: 0 holds no answer, 1 holds the answer.

    Attributes:
        logits: (windows, 2) float32.
        question_index: (windows,) row in ``questions``.
        questions: of the split.
    """

    logits: npt.NDArray[np.float32]
    question_index: npt.NDArray[np.int32]
    questions: Sequence[Question]

    def score(self) -> Scores:
        """A question is answerable where any of its windows is (logit difference above 0)."""
        gain = np.full(len(self.questions), -np.inf, np.float32)
        np.maximum.at(gain, self.question_index, self.logits[:, 1] - self.logits[:, 0])
        gold = np.array([not question.is_impossible for question in self.questions])
        ids = [question.id for question in self.questions]
        metrics = binary_metrics(gain > 0, gold)
        return Scores(
            {"argmax": {"threshold": None, "metrics": metrics}},
            dict(zip(ids, (gain > 0).tolist(), strict=True)),
            dict(zip(ids, (-gain).tolist(), strict=True)),
        )


def binary_metrics(predicted: npt.NDArray[np.bool_], gold: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """How well a yes or no is told, in per cent.

    Args:
        predicted: (questions,)
        gold: (questions,)

    Returns:
        ``accuracy``; ``f1``, ``precision`` and ``recall`` of yes, 0 where they are undefined;
        ``majority``, the accuracy of always saying what is right more often; and ``total``, the
        number of questions.
    """
    right = int((predicted & gold).sum())
    said, true = int(predicted.sum()), int(gold.sum())
    total = len(gold)

    def percent(part: int, whole: int) -> float:
        return 100.0 * part / whole if whole else 0.0

    return {
        "accuracy": percent(int((predicted == gold).sum()), total),
        "f1": percent(2 * right, said + true),
        "precision": percent(right, said),
        "recall": percent(right, true),
        "majority": percent(max(true, total - true), total),
        "total": total,
    }


def headline(rules: Mapping[str, Mapping[str, Any]]) -> Mapping[str, float]:
    """The metrics that stand for a system: of ``n-best`` where it is there, else of ``argmax``.

    Args:
        rules: of its ``metrics.json``.
    """
    metrics: Mapping[str, float] = rules["n-best" if "n-best" in rules else "argmax"]["metrics"]
    return metrics


def headline_metric(task: str, metrics: Mapping[str, float]) -> str:
    """The metric that stands for a system where there is room for one number.

    That of the task; a file with labels of one's own has classes or scores, and of scores it is
    Pearson's correlation.

    Args:
        task: its name.
        metrics: of a system.
    """
    key = TASKS[task].headline
    return key if key in metrics else "pearson"


def score(dev: SplitLogits, tune: SplitLogits | None, *, abstains: bool) -> Scores:
    """Decode and score a split.

    Args:
        dev: what is scored.
        tune: the held-out part of the training data, where the no-answer threshold is tuned; None
            leaves it at 0.
        abstains: whether the task has questions without an answer.
    """
    threshold: float | None = 0.0 if abstains else None
    tuned = threshold
    if abstains and tune is not None:
        found = tune_threshold(tune.decode("n-best"), tune.questions)
        tuned = threshold if found is None else found
    n_best, argmax = dev.decode("n-best"), dev.decode("argmax")
    rules = {}
    for name, predictions, at in (
        ("n-best", n_best, tuned),
        ("n-best, threshold 0", n_best, threshold),
        ("argmax", argmax, threshold),
    ):
        metrics = squad_metrics(apply_threshold(predictions, at), dev.questions)
        rules[name] = {"threshold": at, "metrics": dict(metrics)}
    return Scores(
        rules, apply_threshold(n_best, tuned), {id_: p.na_score for id_, p in n_best.items()}
    )
