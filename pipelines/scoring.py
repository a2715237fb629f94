"""From the logits of a split's windows to EM/F1: one way for BERT and for heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.tasks.decoding import (
    SpanPrediction,
    apply_threshold,
    decode,
    tune_threshold,
)
from bertvision.pipelines.tasks.squad import Question
from bertvision.pipelines.tasks.squad_metrics import squad_metrics


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
    n_tokens: npt.NDArray[np.int32]
    offset_mapping: npt.NDArray[np.int32]
    question_index: npt.NDArray[np.int32]
    questions: Sequence[Question]

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
        rules: by decoding rule (``n-best`` with the tuned threshold, ``n-best, threshold 0``,
            ``argmax``), the threshold used and the official metrics.
        predictions: the answers of ``n-best``, by question id: the official predictions file.
        na_scores: how much better no answer scores than the best span, by question id.
    """

    rules: dict[str, dict[str, Any]]
    predictions: dict[str, str]
    na_scores: dict[str, float]


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
