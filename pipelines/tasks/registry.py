"""What BERT is fine-tuned for: the tasks by name, and what a task decides.

A task is a class in one file and a line in `TASKS`. Fine-tuning, BERT's own evaluation and
extraction ask it for the model, the labels, the loss and the scores, and know nothing else of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bertvision.pipelines.batching import Batch
    from bertvision.pipelines.scoring import Scores
    from bertvision.pipelines.tasks.squad import Question
    from bertvision.pipelines.tasks.windows import Windows

Tokens = Literal["all", "cls"]
"""Which tokens of a window an extraction keeps: all, or the [CLS] alone."""


class TaskEntry(NamedTuple):
    """A line of the registry: what can be said of a task without importing anything heavy."""

    target: str
    """Dotted path ``package.module:Class`` of its `Task`."""
    headline: str
    """The metric that stands for a system where there is room for one number."""
    tokens: Tokens
    """What extraction keeps unless told otherwise: what the task's heads need."""
    hub: str | None = None
    """Data set on the hub where ``--task`` names the task; None where it names a data set."""


TASKS: dict[str, TaskEntry] = {
    "squad_v2": TaskEntry("bertvision.pipelines.tasks.spans:SpanTask", "f1", "all"),
    "squad_v1": TaskEntry("bertvision.pipelines.tasks.spans:SpanTask", "f1", "all"),
    "answerable": TaskEntry(
        "bertvision.pipelines.tasks.answerable:AnswerableTask", "accuracy", "cls", "squad_v2"
    ),
}


class Predicted(NamedTuple):
    """BERT's logits on a split, with what they were computed from."""

    logits: Mapping[str, npt.NDArray[np.float32]]
    """By name as `Task.logits` gives them, in data order: (tokens,) or (windows, …)."""
    windows: Windows
    """Of the split."""
    questions: Sequence[Question]
    """Of the split; ``windows.question_index`` points into them."""


class Task(ABC):
    """What a task decides; made by `load_task` with its name."""

    model_class: ClassVar[type[Any]]
    """BERT with the task's output layer, of transformers."""
    model_options: ClassVar[Mapping[str, Any]] = {}
    """Settings of the model's configuration beside those of the checkpoint."""
    output_layer: ClassVar[str]
    """Name of the output layer; everything else of the model is its encoder."""
    per_token: ClassVar[bool]
    """Whether logits belong to tokens, else they belong to windows."""
    tunes: bool = False
    """Whether scoring fits something, a threshold, on the split ``tune``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check_data(self, questions: Sequence[Question], source: str) -> None:  # noqa: B027
        """Refuse training data from which the task cannot be learned.

        Raises:
            InputError: names the source, what it lacks, and what to do.
        """

    @abstractmethod
    def labels(self, windows: Windows) -> dict[str, npt.NDArray[np.integer]]:
        """What is learned, by name: (windows,) each."""

    @abstractmethod
    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The loss summed over the windows of a batch, a scalar.

        A window's loss must not depend on its batch: steps weight batches by their windows.

        Args:
            output: what the model gave for ``batch.inputs``.
            batch: with ``labels``.
        """

    @abstractmethod
    def logits(self, output: Any) -> dict[str, Tensor]:
        """What is kept of the model's output, by name: (batch, seq) or (batch, …)."""

    @abstractmethod
    def score(self, dev: Predicted, tune: Predicted | None) -> Scores:
        """Score BERT.

        Args:
            dev: what is scored.
            tune: the held-out part of the training data, where the task `tunes` and there is one.
        """


def load_task(name: str) -> Task:
    """The task of this name.

    Raises:
        InputError: there is none.
    """
    module, _, attribute = TASKS[check_task(name)].target.partition(":")
    task: Task = getattr(import_module(module), attribute)(name)
    return task


def check_task(name: str) -> str:
    """Return ``name`` if it is that of a task.

    Raises:
        InputError: it is not.
    """
    if name not in TASKS:
        raise InputError(f"{name!r} is no task: there are {', '.join(TASKS)}")
    return name
