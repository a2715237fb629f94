"""Extractive question answering as BERT learns it: a start and an end position in each window.

Devlin et al. 2019 (arXiv:1810.04805); a window without the answer has both on its [CLS].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForQuestionAnswering

from bertvision.models.outputs import SpanOutput, span_loss
from bertvision.pipelines.tasks.batch import Batch
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.scores import ORACLE, Rules, Scores
from bertvision.pipelines.tasks.squad.decoding import apply_threshold, decode, tune_threshold
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.tasks.squad.questions import QuestionTask


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

    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """EM and F1 by each decoding rule, the no-answer threshold tuned where the task has one."""
        threshold: float | None = 0.0 if self.tunes else None
        found = None
        if self.tunes and tune is not None:
            found = tune_threshold(decode(tune), tune.windows.items)
        tuned = threshold if found is None else found
        n_best, argmax = decode(dev), decode(dev, rule="argmax")
        rules: Rules = {}
        for name, predictions, at in (
            ("n-best", n_best, tuned),
            ("n-best, threshold 0", n_best, threshold),
            ("argmax", argmax, threshold),
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
            tuned=found is not None,
        )
