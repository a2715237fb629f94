"""What a system said on a split, and the scores it gets for it: one form for BERT and for heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from bertvision.pipelines.tasks.registry import TASKS

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


class Predicted(NamedTuple):
    """Logits on a split, of BERT or of a head, with what they belong to."""

    logits: Mapping[str, npt.NDArray[np.float32]]
    """By name as `Task.logits` gives them: (tokens,) or (windows, …)."""
    n_tokens: npt.NDArray[np.int32]
    """(windows,)"""
    offset_mapping: npt.NDArray[np.int32] | None
    """(tokens, 2) characters, −1 −1 outside the text; None where logits belong to windows."""
    item_index: npt.NDArray[np.int32]
    """(windows,) row in ``items``."""
    items: Sequence[Any]
    """Of the split."""


class Rule(TypedDict):
    """What one decoding rule came to."""

    threshold: float | None
    """Of no answer; None where there is none."""
    metrics: dict[str, int | float]
    """In per cent, but for counts and thresholds."""


Rules = Annotated[dict[str, Rule], Field(min_length=1)]


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

    rules: Rules
    predictions: dict[str, str] | dict[str, bool] | dict[str, int] | dict[str, float]
    na_scores: dict[str, float]


def headline(rules: Rules) -> Mapping[str, float]:
    """The metrics that stand for a system: of ``n-best`` where it is there, else of ``argmax``.

    Args:
        rules: of its ``metrics.json``.
    """
    return rules["n-best" if "n-best" in rules else "argmax"]["metrics"]


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
