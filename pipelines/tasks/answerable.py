"""Answerable or not: whether the context answers the question, told from the [CLS] alone.

The binary task of SQuAD 2.0 (Rajpurkar et al. 2018, arXiv:1806.03822). BERT reads a question over a
context as it does for spans; a window is labelled by whether it holds the gold answer, so that a
long context of an answerable question also gives windows without one, and the question counts as
answerable where any of its windows does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from bertvision.errors import InputError
from bertvision.models.outputs import ClassOutput, class_loss
from bertvision.pipelines.batching import Batch
from bertvision.pipelines.config import TaskConfig
from bertvision.pipelines.scoring import ClassLogits, Scores
from bertvision.pipelines.tasks.questions import QuestionTask, window_labels
from bertvision.pipelines.tasks.registry import Labels, Predicted
from bertvision.pipelines.tasks.squad import Question
from bertvision.pipelines.tasks.windows import Windows


class AnswerableTask(QuestionTask):
    """Two classes of a window: 0 it holds no answer, 1 it holds the gold answer."""

    model_class = AutoModelForSequenceClassification

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """Two classes."""
        return {"num_labels": 2}

    def check_data(self, items: Sequence[Question], source: str) -> None:
        """Refuse data of one class alone.

        Raises:
            InputError: all questions are answerable, or none is.
        """
        impossible = sum(question.is_impossible for question in items)
        if impossible in (0, len(items)):
            lacking = "unanswerable" if impossible == 0 else "answerable"
            raise InputError(
                f"{source} has no {lacking} question, and the task answerable needs both kinds: "
                "use data in the form of SQuAD 2.0"
            )

    def labels(self, windows: Windows) -> Labels:
        """Whether a window holds the gold answer."""
        return {"answerable": window_labels(windows)}

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Cross-entropy, summed over the windows."""
        return functional.cross_entropy(
            output.logits.float(), batch.labels["answerable"], reduction="sum"
        )

    def logits(self, output: Any) -> dict[str, Tensor]:
        """Logits of both classes, (batch, 2)."""
        return {"logits": output.logits}

    def head_loss(self, output: ClassOutput, labels: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy of whether the window holds the answer."""
        return class_loss(output, labels["answerable"].long())

    def score(self, dev: Predicted, tune: Predicted | None) -> Scores:
        """Accuracy and F1 of the questions."""
        return ClassLogits(dev.logits["logits"], dev.item_index, dev.items).score()
