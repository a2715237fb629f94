"""Extractive question answering as BERT learns it: a start and an end position in each window.

Devlin et al. 2019 (arXiv:1810.04805); a window without the answer has both on its [CLS].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BertForQuestionAnswering

from bertvision.pipelines.batching import Batch
from bertvision.pipelines.scoring import Scores, SplitLogits, score
from bertvision.pipelines.tasks.registry import Predicted, Task
from bertvision.pipelines.tasks.windows import Windows


class SpanTask(Task):
    """``squad_v2``, which may answer with nothing, and ``squad_v1``, which always answers."""

    model_class = BertForQuestionAnswering
    output_layer = "qa_outputs"
    per_token = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.tunes = name == "squad_v2"

    def labels(self, windows: Windows) -> dict[str, npt.NDArray[np.integer]]:
        """First and last token of the answer, counted inside the window."""
        return {
            "start_positions": windows.start_positions,
            "end_positions": windows.end_positions,
        }

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

    def score(self, dev: Predicted, tune: Predicted | None) -> Scores:
        """EM and F1 by each decoding rule."""
        held_out = None if tune is None else _with_offsets(tune)
        return score(_with_offsets(dev), held_out, abstains=self.tunes)


def _with_offsets(predicted: Predicted) -> SplitLogits:
    return SplitLogits(
        predicted.logits["start_logits"],
        predicted.logits["end_logits"],
        predicted.windows.n_tokens,
        predicted.windows.offset_mapping,
        predicted.windows.question_index,
        predicted.questions,
    )
