"""Extractive question answering as BERT learns it: a start and an end position in each window.

Devlin et al. 2019 (arXiv:1810.04805); a window without the answer has both on its [CLS].

Answerable or not: whether the context answers the question, told from the [CLS] alone.

The binary task of SQuAD 2.0 (Rajpurkar et al. 2018, arXiv:1806.03822). BERT reads a question over a
context as it does for spans; a window is labelled by whether it holds the gold answer, so that a
long context of an answerable question also gives windows without one, and the question counts as
answerable where any of its windows does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from bertvision.errors import InputError
from bertvision.models.outputs import ClassOutput, SpanOutput, class_loss, span_loss
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.scores import ORACLE, Rules, Scores, class_answers
from bertvision.pipelines.tasks.squad.decoding import apply_threshold, decode, tune_threshold
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.tasks.squad.windows import QuestionTask, window_labels
from bertvision.pipelines.tasks.task import Labels, class_labels
from bertvision.pipelines.tasks.windows import Batch, Windows


class SpanTask(QuestionTask):
    """``squad_v2``, which may answer with nothing, and ``squad_v1``, which always answers."""

    kind = "span"
    model_class = AutoModelForQuestionAnswering

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tunes = name == "squad_v2"

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """Two logits of a token, of start and end, however many classes the checkpoint told."""
        return {"num_labels": 2}

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

    def answers(
        self, logits: Logits, config: TaskConfig, threshold: float | None
    ) -> list[Mapping[str, Any]]:
        """For each question ``answer``, its ``score``, ``start`` and ``end``.

        ``start`` and ``end`` are characters of the context, and 0 where there is no answer. A
        ``score`` is the softmax over the best spans and no answer (`Candidate.probability`), whose
        part of no answer is ``no_answer``.
        """
        predictions = decode(logits)
        texts = apply_threshold(predictions, threshold)
        rows: list[Mapping[str, Any]] = []
        for item in logits.windows.items:
            best = {candidate.text: candidate for candidate in predictions[item.id].n_best}
            chosen = best[texts[item.id]]
            start = chosen.start or 0
            rows.append(
                {
                    "score": chosen.probability,
                    "start": start,
                    "end": start + len(chosen.text),
                    "answer": chosen.text,
                    "no_answer": best[""].probability,
                }
            )
        return rows

    def score(self, dev: Logits, tune: Logits | None, *, threshold: float | None = None) -> Scores:
        """EM and F1 by each decoding rule, the no-answer threshold tuned where the task has one.

        Args:
            dev: Logits that are scored.
            tune: Logits of the held-out part, on which the threshold is tuned.
            threshold: A threshold that was tuned elsewhere, in the place of ``tune``.
        """
        zero: float | None = 0.0 if self.tunes else None
        thresholds = threshold if self.tunes else None
        if self.tunes and tune is not None:
            thresholds = tune_threshold(decode(tune), tune.windows.items)
        tuned = zero if thresholds is None else thresholds
        n_best, argmax = decode(dev), decode(dev, rule="argmax")
        rules: Rules = {}
        for name, predictions, at in (
            ("n-best", n_best, tuned),
            ("n-best, threshold 0", n_best, zero),
            ("argmax", argmax, zero),
        ):
            metrics = squad_metrics(apply_threshold(predictions, at), dev.windows.items)
            rules[name] = {"threshold": at, "metrics": dict(metrics)}
        if self.tunes:
            best = tune_threshold(n_best, dev.windows.items)
            metrics = squad_metrics(apply_threshold(n_best, best), dev.windows.items)
            rules[ORACLE] = {"threshold": best, "metrics": dict(metrics)}
        return Scores(
            rules,
            apply_threshold(n_best, tuned),
            {id_: p.na_score for id_, p in n_best.items()},
            tuned=thresholds is not None,
        )


class AnswerableTask(QuestionTask):
    """Two classes of a window: 0 it holds no answer, 1 it holds the gold answer."""

    model_class = AutoModelForSequenceClassification

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """Two classes, by name."""
        return class_labels(("unanswerable", "answerable"))

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

    def answers(
        self, logits: Logits, config: TaskConfig, threshold: float | None
    ) -> list[Mapping[str, Any]]:
        """For each question whether its surest window answers it (see `class_answers`)."""
        gain = _gains(logits)
        names = tuple(self.model_options(config)["id2label"].values())
        return class_answers(np.stack([np.zeros_like(gain), gain], axis=1), names)

    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """A question is answerable where any of its windows is (logit difference above 0)."""
        gain, questions = _gains(dev), dev.windows.items
        gold = np.array([not question.is_impossible for question in questions])
        ids = [question.id for question in questions]
        metrics = binary_metrics(gain > 0, gold)
        return Scores(
            {"argmax": {"threshold": None, "metrics": metrics}},
            dict(zip(ids, (gain > 0).tolist(), strict=True)),
            dict(zip(ids, (-gain).tolist(), strict=True)),
        )


def _gains(logits: Logits) -> npt.NDArray[np.float32]:
    """How much answerable is preferred in the surest window of each question, (questions,)."""
    values, windows = logits.arrays["logits"], logits.windows
    gain = np.full(len(windows.items), -np.inf, np.float32)
    np.maximum.at(gain, windows.item_index, values[:, 1] - values[:, 0])
    return gain


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
