"""Extractive question answering as BERT learns it: a start and an end position in each window.

Devlin et al. 2019 (arXiv:1810.04805); a window without the answer has both on its [CLS].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForQuestionAnswering

from bertvision.models.outputs import SpanOutput, span_loss
from bertvision.pipelines.tasks.batch import Batch
from bertvision.pipelines.tasks.scores import Predicted, Rules, Scores
from bertvision.pipelines.tasks.squad.decoding import (
    SpanPrediction,
    apply_threshold,
    decode,
    tune_threshold,
)
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.tasks.squad.questions import QuestionTask
from bertvision.pipelines.tasks.squad.read import Question


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


class SpanTask(QuestionTask):
    """``squad_v2``, which may answer with nothing, and ``squad_v1``, which always answers."""

    model_class = AutoModelForQuestionAnswering
    per_token = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tunes = name == "squad_v2"

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Cross-entropy of start and end position, averaged over both, summed over the windows.

        Padding takes no part in the softmax, so a window's loss does not depend on its batch.
        """
        padding = batch.attention_mask == 0
        lowest = torch.finfo(torch.float32).min
        start = output.start_logits.float().masked_fill(padding, lowest)  # (batch, seq)
        end = output.end_logits.float().masked_fill(padding, lowest)
        return (
            functional.cross_entropy(start, batch.labels["start_positions"], reduction="sum")
            + functional.cross_entropy(end, batch.labels["end_positions"], reduction="sum")
        ) / 2

    def logits(self, output: Any) -> dict[str, Tensor]:
        """Start and end logits, (batch, seq)."""
        return {"start_logits": output.start_logits, "end_logits": output.end_logits}

    def head_loss(self, output: SpanOutput, labels: Mapping[str, Tensor]) -> Tensor:
        """Mean of the cross-entropies of start and end (see `span_loss`)."""
        start, end = (labels[f"{which}_positions"].long() for which in ("start", "end"))
        return span_loss(output, start, end)

    def score(self, dev: Predicted, tune: Predicted | None) -> Scores:
        """EM and F1 by each decoding rule."""
        held_out = None if tune is None else SplitLogits.of(tune)
        return score(SplitLogits.of(dev), held_out, abstains=self.tunes)


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
    rules: Rules = {}
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
