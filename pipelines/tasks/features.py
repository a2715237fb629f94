"""No task: an encoder as a source of hidden states alone, with nothing to fine-tune it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa
from transformers import AutoModel

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Windows


class FeaturesTask(Task):
    """The task of a workspace whose encoder is only looked at: it has no data of its own.

    Data sets are added by ``--task``; every method that needs data of the task raises `InputError`.
    """

    model_class = AutoModel

    def splits(self, source: str) -> tuple[str, ...]:
        """There are none."""
        return ()

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """There is nothing to read."""
        return self._refuse()

    def windows(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> Windows:
        """There are none."""
        return self._refuse()

    def table(self, items: Sequence[Any]) -> pa.Table:
        """There are no items."""
        return self._refuse()

    def items_of(self, table: pa.Table) -> list[Any]:
        """There are no items."""
        return self._refuse()

    def loss(self, output: Any, batch: Any) -> NoReturn:
        """Nothing is learned."""
        self._refuse()

    def logits(self, output: Any) -> NoReturn:
        """Nothing is predicted."""
        self._refuse()

    def head_loss(self, output: Any, labels: Mapping[str, Any]) -> NoReturn:
        """Nothing is learned."""
        self._refuse()

    def score(self, dev: Logits, tune: Logits | None) -> NoReturn:
        """Nothing is predicted."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(
            "this workspace is for hidden states alone, without a task to train on: name data "
            "with --task and --data, or make another workspace with `bertvision finetune`"
        )
