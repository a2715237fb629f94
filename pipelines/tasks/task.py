"""Base class of tasks.

Fine-tuning, extraction, heads and probes ask a task for data, windows, model, labels, loss and
scores, and know nothing else of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.tasks.data import Target, TaskConfig, TaskData
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.registry import TaskKind, find_task
from bertvision.pipelines.tasks.scores import Scores
from bertvision.pipelines.tasks.soundness import Example
from bertvision.pipelines.tasks.tables import Column
from bertvision.pipelines.tasks.windows import Batch, Windows
from bertvision.plugins import is_dotted_path, load_class

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

Labels = dict[str, npt.NDArray[Any]]


class Task(ABC):
    """A task, made by `load_task` with its name.

    An *item* is a row of its data: a question of SQuAD, a sentence or a pair elsewhere.
    """

    kind: ClassVar[TaskKind] = "classification"
    of_decoders: ClassVar[bool] = False
    """Whether windows without special tokens can be learned, as those of decoders are."""
    """``span`` where a span of the text is looked for, so that logits are of tokens; of classes and
    scores they are of windows. What no heads learn is of another kind."""
    headline: ClassVar[str] = "accuracy"
    """The metric that stands for a system where there is room for one number. This and the next
    four are those of a task of one's own: the line in `TASKS` says them of the others."""
    tokens: ClassVar[TokenPooling] = "all"
    """Default of an extraction."""
    hub: ClassVar[str | None] = None
    """Data set on the hub, ``owner/name`` or ``owner/name:config``."""
    max_length: ClassVar[int] = 386
    """Longest window in tokens, unless told otherwise."""
    learns: ClassVar[bool] = True
    """Whether an encoder can be fine-tuned on it."""
    model_class: ClassVar[Any]
    """The encoder with the task's output layer: an ``AutoModelFor…`` of transformers, or an
    `OwnOutput`."""
    settings: ClassVar[tuple[str, ...]] = ("max_length",)
    """Fields of `TaskConfig` that decide the windows."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Fields of `TaskConfig` that name a column of a file of one's own."""
    words: ClassVar[tuple[str, str]] = ("texts", "items")
    """Names of the groups and of the items."""
    linked: ClassVar[bool] = False
    """Whether `grouping` knows more than `group`: of new data it then says what is held out."""
    ratios: ClassVar[tuple[str, ...]] = ()
    """Metrics whose parts `parts` says of an item, the task's own first; the others are those that
    `Scores` has of spans, classes and scores."""
    refusal: ClassVar[str] = ""
    """Why no encoder learns it, with ``{name}`` for the task and ``{data}`` for the source; empty
    of a task that one learns."""
    item: ClassVar[Any]
    """Type of an item, a NamedTuple; not needed of a task with an `items_of` of its own."""
    schema: ClassVar[Mapping[str, Any]] = {}
    """The fields of an item that a store keeps, with their types in Arrow."""
    forms: ClassVar[tuple[str, ...]] = ()
    """Forms of files whose items `read_unlabelled` reads; others have a row for each item."""
    tunes: bool = False
    """Whether scoring fits something, a threshold, on the split ``tune``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """Settings of the model's configuration beside those of the checkpoint."""
        return {}

    @property
    def of_tokens(self) -> bool:
        """Whether logits are of tokens, and not of windows."""
        return self.kind in ("span", "token")

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

    def check_data(self, items: Sequence[Any], source: str) -> None:
        """Refuse training data from which the task cannot be learned.

        Raises:
            InputError: names the source, what it lacks, and what to do.
        """
        if self.refusal:
            raise InputError(self.refusal.format(name=self.name, data=source))

    def group(self, item: Any) -> str:
        """Group of an item, which is held out as a whole: the items of one text."""
        return str(item.text)

    def texts(self, item: Any) -> tuple[str, ...]:
        """The texts of an item, none of which should be both in ``train`` and in ``dev``."""
        return (self.group(item),)

    def grouping(self, items: Sequence[Any]) -> Callable[[Any], str]:
        """Groups of items that share any of their texts, also through others.

        Args:
            items: all among which some are held out.
        """
        return self.group

    def example(self, item: Any) -> Example:
        """Text and label of an item, by which data are searched for contradictions and overlaps.

        Returns:
            (the item's text, its label; None where none can be compared).
        """
        return self.group(item), None

    @abstractmethod
    def windows(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> Windows:
        """Make the windows of items, in their order."""

    def targets(self, item: Any) -> Sequence[Target]:
        """Labelled words of an item, which probes learn; of tasks of windows there are none."""
        return ()

    def misfits(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> dict[str, str]:
        """Tell the items that no window of this length can hold, before a workspace has the length.

        Args:
            items: Items of a split's source, each with an ``id``.
            tokenizer: Tokenizer of the encoder.
            config: settings of the task.

        Returns:
            Why they do not fit, by id; of most tasks there are none.
        """
        return {}

    def settled(self, config: TaskConfig, tokenizer: Any) -> TaskConfig:
        """The settings of new data, with what follows from the tokenizer; of most tasks nothing.

        Args:
            config: settings of the task.
            tokenizer: Tokenizer of the encoder.
        """
        return config

    def table(self, items: Sequence[Any]) -> pa.Table:
        """Items as the text side of a store, a row each."""
        return as_table(items, self.schema)

    def items_of(self, table: pa.Table) -> list[Any]:
        """The inverse of `table`."""
        names = [name for name in self.schema if name in self.item._fields]
        rows = table.select(names).to_pylist()
        return [
            self.item(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
            for row in rows
        ]

    def stored(self, windows: Windows) -> Labels:
        """Arrays that a store keeps beside the activations, by name: (windows, …) each."""
        return dict(windows.labels)

    def labels(self, windows: Windows) -> Labels:
        """Labels of the encoder by name: (windows,) each, or (tokens,) of tokens."""
        return {**windows.labels, **windows.token_labels}

    @abstractmethod
    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The loss summed over the windows of a batch, a scalar.

        A window's loss must not depend on its batch: steps weight batches by their windows.

        Args:
            output: Output of the model for ``batch.inputs``.
            batch: Batch with ``labels``.
        """

    @abstractmethod
    def logits(self, output: Any) -> dict[str, Tensor]:
        """Kept arrays of the model's output by name: (batch, seq) or (batch, …)."""

    def window_logits(self, output: Any, batch: Batch) -> dict[str, list[Tensor]]:
        """Kept arrays of each window of a batch by name: (rows, …) each.

        Of spans there is a row for each of its tokens, of classes one; a task whose logits are of
        something else, such as words, says here which they are.

        Args:
            output: Output of the model for ``batch.inputs``.
            batch: Batch with marks; its labels are not read.
        """
        ragged = self.of_tokens
        lengths = batch.attention_mask.sum(1).tolist() if ragged else [1] * len(batch.input_ids)
        return {
            name: [one[:n] if ragged else one[None] for one, n in zip(values, lengths, strict=True)]
            for name, values in self.logits(output).items()
        }

    @abstractmethod
    def head_loss(self, output: Any, labels: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of a head over the examples of a batch, () float32.

        Args:
            output: Output of a head.
            labels: the per-example arrays of the store, by name.
        """

    def outputs(self, config: TaskConfig) -> int:
        """Logits of a classification head: how many classes there are, 1 of a score."""
        return 2

    def parts(self, item: Any, answer: Any) -> dict[str, tuple[float, float]]:
        """Contribution of an answer to each of `ratios`: numerator and denominator.

        The metric is 100 times the sum of the first over the sum of the second. Differences and
        intervals are drawn from these.

        Args:
            item: Item with what is right.
            answer: As in `Scores.predictions`.
        """
        return {}

    def answer_text(self, answer: Any, classes: Sequence[str]) -> Any:
        """An answer as people read it: of a class its name.

        Args:
            answer: As in `Scores.predictions`, or what is right.
            classes: their names, where there are any.
        """
        return classes[answer] if classes and isinstance(answer, int) else answer

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """Columns of the texts of an item, by the name that `unlabelled` gives them.

        Args:
            config: Settings of the task, which may name columns.

        Raises:
            InputError: The items of the task are no texts that somebody types.
        """
        raise self._answers_nothing()

    def unlabelled(self, texts: Mapping[str, str], name: str) -> Any:
        """An item without its label.

        Args:
            texts: Its texts, by the names of `inputs`.
            name: Id of the item.

        Raises:
            InputError: As of `inputs`.
        """
        raise self._answers_nothing()

    def read_unlabelled(self, path: Path, config: TaskConfig) -> list[Any]:
        """Read the items of a file in one of `forms`, whose labels are not looked at.

        Args:
            path: Path of the file.
            config: Settings of the task.

        Raises:
            InputError: The file is missing or malformed.
        """
        return list(self.read(str(path), "all", config).items)

    def answers(
        self, logits: Logits, config: TaskConfig, threshold: float | None
    ) -> list[Mapping[str, Any]]:
        """Answers of a system to all items, in their order; labels are not read.

        Args:
            logits: Logits of all windows of the items.
            config: Settings of the task, with the names of the classes.
            threshold: Threshold of no answer; None never abstains.

        Returns:
            For each item its ``answer`` as in `Scores.predictions`, and what
            `transformers.pipeline` gives for the task beside it; probabilities are 0 to 1.

        Raises:
            InputError: As of `inputs`.
        """
        raise self._answers_nothing()

    def _answers_nothing(self) -> InputError:
        return InputError(
            f"{self.name} is no task that answers texts: `bertvision predict` takes those that an "
            "encoder is fine-tuned on; a task of your own defines inputs, unlabelled and answers"
        )

    @abstractmethod
    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """Score a system, BERT or a head.

        Args:
            dev: Logits that are scored.
            tune: the held-out part of the training data, where the task `tunes` and there is one.
        """


def as_table(items: Sequence[Any], schema: Mapping[str, Any]) -> pa.Table:
    """Fields of items as a table.

    Args:
        items: The rows.
        schema: As `Task.schema`.
    """
    import pyarrow as pa  # tasks are looked at where nothing is stored

    columns = {name: [getattr(item, name) for item in items] for name in schema}
    return pa.table({name: pa.array(values, schema[name]) for name, values in columns.items()})


def class_labels(names: Sequence[str]) -> dict[str, Any]:
    """Settings of a model's configuration that name its classes, in the order of their logits."""
    return {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}


def load_task(name: str) -> Task:
    """The task of this name.

    Raises:
        InputError: there is none.
    """
    task: Task = load_class(find_task(name).target, "task", named=is_dotted_path(name))(name)
    return task
