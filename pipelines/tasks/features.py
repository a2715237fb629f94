"""No task: an encoder as a source of hidden states alone, with nothing to fine-tune it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from transformers import AutoModel

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Windows


class FeaturesTask(Task):
    """The task of a workspace whose encoder is only looked at: it has no data of its own.

    Data sets are added by ``--task``; every method that needs data of the task raises `InputError`.
    """

    model_class = AutoModel
    refusal = (
        "this workspace is for hidden states alone, without a task to train on: name data "
        "with --task and --data, or make another workspace with `bertvision finetune`"
    )

    def splits(self, source: str) -> tuple[str, ...]:
        """There are none."""
        return ()

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """There is nothing to read."""
        return self._refuse()

    def windows(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> Windows:
        """There are none."""
        return self._refuse()

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        """Refuse what needs labels, or data.

        Raises:
            InputError: always.
        """
        raise InputError(self.refusal.format(name=self.name))

    loss = logits = head_loss = score = _refuse


class UnlabelledTask(FeaturesTask):
    """Data without labels: a model is looked at alone."""

    refusal = (
        "no encoder and no head can be trained on {name}, which has no labels: its hidden states "
        "are for `bertvision.ActivationStore` and split.tokens()"
    )
