"""The tasks by name, and what a task decides.

A task is a class in one file and a line in `TASKS`. Fine-tuning, extraction, heads and probes ask
it for data, windows, model, labels, loss and scores, and know nothing else of it.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from torch import Tensor

    from bertvision.pipelines.batching import Batch
    from bertvision.pipelines.config import TaskConfig
    from bertvision.pipelines.scoring import Scores
    from bertvision.pipelines.tasks.data import TaskData
    from bertvision.pipelines.tasks.windows import Windows

Tokens = Literal["all", "cls", "sep", "mean", "max"]
"""What an extraction keeps of a window: all its tokens, or one vector, a pooling of them."""
POOLINGS: tuple[Tokens, ...] = get_args(Tokens)[1:]
"""Poolings over a window's tokens, in the order in which they are listed."""
Labels = dict[str, npt.NDArray[Any]]


class TaskEntry(NamedTuple):
    """A line of the registry: what can be said of a task without importing anything heavy."""

    target: str
    """Dotted path ``package.module:Class`` of its `Task`."""
    headline: str
    """The metric that stands for a system where there is room for one number."""
    tokens: Tokens
    """What extraction keeps unless told otherwise: what the task's heads need."""
    hub: str | None = None
    """Data set on the hub (``owner/name`` or ``owner/name:config``) where ``--task`` names the
    task; None where it names a data set, or there is none."""
    max_length: int = 386
    """Longest window in tokens, unless told otherwise."""


def _sentences(target: str, headline: str, *, hub: str | None = None) -> TaskEntry:
    return TaskEntry(f"bertvision.pipelines.tasks.{target}", headline, "cls", hub, max_length=128)


def _glue(name: str, headline: str = "accuracy") -> TaskEntry:
    return _sentences("glue:GlueTask", headline, hub=f"nyu-mll/glue:{name}")


def _probing() -> TaskEntry:
    return _sentences("senteval:ProbingTask", "accuracy")


def _downstream() -> TaskEntry:
    return _sentences("senteval:DownstreamTask", "accuracy")


TASKS: dict[str, TaskEntry] = {
    "squad_v2": TaskEntry("bertvision.pipelines.tasks.spans:SpanTask", "f1", "all"),
    "squad_v1": TaskEntry("bertvision.pipelines.tasks.spans:SpanTask", "f1", "all"),
    "answerable": TaskEntry(
        "bertvision.pipelines.tasks.answerable:AnswerableTask", "accuracy", "cls", "squad_v2"
    ),
    "cola": _glue("cola", "matthews"),
    "sst2": _glue("sst2"),
    "mrpc": _glue("mrpc"),
    "qqp": _glue("qqp"),
    "stsb": _glue("stsb", "pearson"),
    "mnli": _glue("mnli"),
    "qnli": _glue("qnli"),
    "rte": _glue("rte"),
    "wnli": _glue("wnli"),
    "sentence_length": _probing(),
    "word_content": _probing(),
    "tree_depth": _probing(),
    "top_constituents": _probing(),
    "bigram_shift": _probing(),
    "past_present": _probing(),
    "subj_number": _probing(),
    "obj_number": _probing(),
    "odd_man_out": _probing(),
    "coordination_inversion": _probing(),
    "mr": _downstream(),
    "cr": _downstream(),
    "subj": _downstream(),
    "mpqa": _downstream(),
    "trec": _downstream(),
    "csv": _sentences("labelled:LabelledTask", "accuracy"),
    "wikiqa": _sentences("wikiqa:WikiqaTask", "map"),
    "features": TaskEntry("bertvision.pipelines.tasks.features:FeaturesTask", "", "all"),
}

SQUAD = ("squad_v1", "squad_v2")
"""Tasks that follow from the data: on the command line their names are those of data sets."""


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


class Task(ABC):
    """What a task decides; made by `load_task` with its name.

    An *item* is a row of its data: a question of SQuAD, a sentence or a pair elsewhere.
    """

    model_class: ClassVar[type[Any]]
    """An ``AutoModelFor…`` of transformers: the encoder with the task's output layer."""
    per_token: ClassVar[bool] = False
    """Whether logits belong to tokens, else they belong to windows."""
    settings: ClassVar[tuple[str, ...]] = ("max_length",)
    """Fields of `TaskConfig` that decide the windows."""
    learns: ClassVar[bool] = True
    """Whether an encoder can be fine-tuned on it."""
    tunes: bool = False
    """Whether scoring fits something, a threshold, on the split ``tune``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """Settings of the model's configuration beside those of the checkpoint."""
        return {}

    @abstractmethod
    def splits(self, source: str) -> tuple[str, ...]:
        """Which splits a source offers, such as ``("train", "dev")``; ``("all",)`` has no parts.

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
    def score(self, dev: Predicted, tune: Predicted | None) -> Scores:
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
    module, _, attribute = TASKS[check_task(name)].target.partition(":")
    task: Task = getattr(import_module(module), attribute)(name)
    return task


def check_task(name: str) -> str:
    """Return ``name`` if it is that of a task.

    Raises:
        InputError: it is not.
    """
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"{name!r} is no task: {hint}there are {', '.join(TASKS)}")
    return name
