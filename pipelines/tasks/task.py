"""What a task decides.

Fine-tuning, extraction, heads and probes ask a task for data, windows, model, labels, loss and
scores, and know nothing else of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

from bertvision.pipelines.tasks.batch import Batch
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.registry import TokenPooling, find_task
from bertvision.pipelines.tasks.scores import Scores
from bertvision.pipelines.tasks.soundness import Example
from bertvision.pipelines.tasks.windows import Windows
from bertvision.plugins import is_dotted_path, load_class

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from bertvision.models import Kind

Labels = dict[str, npt.NDArray[Any]]


class Task(ABC):
    """What a task decides; made by `load_task` with its name.

    An *item* is a row of its data: a question of SQuAD, a sentence or a pair elsewhere.
    """

    kind: ClassVar[Kind] = "classification"
    """``span`` where a span of the text is looked for, so that logits are of tokens; else they are
    of windows."""
    headline: ClassVar[str] = "accuracy"
    """The metric that stands for a system where there is room for one number. This and the next
    four are those of a task of one's own: the line in `TASKS` says them of the others."""
    tokens: ClassVar[TokenPooling] = "all"
    """What extraction keeps unless told otherwise."""
    hub: ClassVar[str | None] = None
    """Data set on the hub, ``owner/name`` or ``owner/name:config``."""
    max_length: ClassVar[int] = 386
    """Longest window in tokens, unless told otherwise."""
    learns: ClassVar[bool] = True
    """Whether an encoder can be fine-tuned on it."""
    model_class: ClassVar[type[Any]]
    """An ``AutoModelFor…`` of transformers: the encoder with the task's output layer."""
    settings: ClassVar[tuple[str, ...]] = ("max_length",)
    """Fields of `TaskConfig` that decide the windows."""
    words: ClassVar[tuple[str, str]] = ("texts", "items")
    """What people call that which `group` keeps together, and the items."""
    linked: ClassVar[bool] = False
    """Whether `grouping` knows more than `group`: of new data it then says what is held out."""
    tunes: bool = False
    """Whether scoring fits something, a threshold, on the split ``tune``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """Settings of the model's configuration beside those of the checkpoint."""
        return {}

    @abstractmethod
    def splits(self, source: str) -> tuple[str, ...]:
        """The splits that a source offers, such as ``("train", "dev")``; ``("all",)`` has no parts.

        Raises:
            InputError: it is no source of this task.
        """

    @abstractmethod
    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read all items of a split.

        Args:
            source: absolute path of a file or folder, or a name on the hub.
            split: which of `splits`; of a file that holds one split alone, what to take it for.
            config: columns, and whether malformed items are skipped.

        Raises:
            InputError: it is missing, malformed or empty.
        """

    def check_data(self, items: Sequence[Any], source: str) -> None:  # noqa: B027
        """Refuse training data from which the task cannot be learned.

        Raises:
            InputError: names the source, what it lacks, and what to do.
        """

    def group(self, item: Any) -> str:
        """What keeps items together when a part is held out: those of one text."""
        return str(item.text)

    def grouping(self, items: Sequence[Any]) -> Callable[[Any], str]:
        """What keeps items together that share any of their texts, also through others.

        Args:
            items: all among which some are held out.
        """
        return self.group

    def example(self, item: Any) -> Example:
        """What is to be told from what, as data are searched for contradictions and overlaps.

        Returns:
            (the item's text, its label; None where none can be compared).
        """
        return self.group(item), None

    @abstractmethod
    def windows(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> Windows:
        """Make the windows of items, in their order."""

    @abstractmethod
    def table(self, items: Sequence[Any]) -> pa.Table:
        """Items as the text side of a store, a row each."""

    @abstractmethod
    def items_of(self, table: pa.Table) -> list[Any]:
        """The inverse of `table`."""

    def stored(self, windows: Windows) -> Labels:
        """What a store keeps per example beside the activations, by name: (windows, …) each."""
        return dict(windows.labels)

    def labels(self, windows: Windows) -> Labels:
        """What the encoder learns, by name: (windows,) each."""
        return dict(windows.labels)

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
    def head_loss(self, output: Any, labels: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of a head over the examples of a batch, () float32.

        Args:
            output: of a head.
            labels: the per-example arrays of the store, by name.
        """

    def outputs(self, config: TaskConfig) -> int:
        """Logits of a classification head: how many classes there are, 1 of a score."""
        return 2

    @abstractmethod
    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """Score a system, BERT or a head.

        Args:
            dev: what is scored.
            tune: the held-out part of the training data, where the task `tunes` and there is one.
        """


def load_task(name: str) -> Task:
    """The task of this name.

    Raises:
        InputError: there is none.
    """
    task: Task = load_class(find_task(name).target, "task", named=is_dotted_path(name))(name)
    return task
