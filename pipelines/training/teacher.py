"""A teacher: the logits that a snapshot left on training windows, which a student learns from.

They were computed once, with the encoder (`bertvision logits`), and are read here without it. What
is minimised is ``labels_weight`` of the task's own loss, and the rest of the distance from the
teacher (Hinton et al. 2015; see `distillation_loss`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.models.outputs import distillation_loss, pad_packed
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace

_LOWEST = torch.finfo(torch.float32).min


class TeacherFile(NamedTuple):
    """The kept logits of a snapshot on the training windows, found to be of its weights."""

    path: Path
    weights_sha256: str
    """Digest of the weights that left them."""
    command: str
    """Command that makes them again."""

    @classmethod
    def find(cls, workspace: Workspace, tag: str, *, elsewhere: bool = False) -> TeacherFile:
        """The logits of a snapshot on ``train``, without reading them.

        Args:
            workspace: Workspace of the snapshot.
            tag: Tag of the snapshot.
            elsewhere: the workspace is not the one that the command is run in.

        Raises:
            UnknownNameError: there is no such snapshot.
            InputError: it is not fine-tuned, or says neither spans nor classes nor scores.
            WorkspaceError: there are none, or they cannot be read.
            ProvenanceError: they are of other weights than the snapshot has.
        """
        if SnapshotTag(tag).fraction <= 0:
            raise InputError(
                f"{tag} cannot teach: its output layer has random weights; name a snapshot that "
                "was fine-tuned, such as 1e"
            )
        if find_task(workspace.config.task.name).kind not in ("span", "classification"):
            raise InputError(
                f"{tag} of {workspace.root} cannot teach: its output layer reads marks of "
                "tokens, which no student is given; what is learned from a teacher are spans, "
                "classes of windows and scores"
            )
        weights = read_snapshot_info(workspace.require_snapshot(tag)).weights_sha256
        path = workspace.bert_dir(tag) / "train.safetensors"
        command = f"bertvision logits --checkpoint {tag}"
        command += f" --workspace {workspace.root}" if elsewhere else ""
        if not path.is_file():
            raise WorkspaceError(
                f"the logits of {tag} on train are not kept in {workspace.root}: `{command}` "
                "computes them, with the encoder"
            )
        try:
            with safe_open(path, framework="numpy") as file:
                digest = (file.metadata() or {}).get("weights_sha256", "nothing")
        except (OSError, SafetensorError) as error:
            raise WorkspaceError(
                f"{path} is damaged ({error}): `{command}` makes it again"
            ) from None
        if digest != weights:
            raise ProvenanceError(
                f"{path} is of a teacher with the weights {digest[:12]}…, and {tag} now has "
                f"{weights[:12]}…: `{command}` computes its logits anew"
            )
        return cls(path, weights, command)

    def read(self, windows: WindowIndex) -> Logits:
        """Its logits on windows in the order of the data.

        Raises:
            WorkspaceError: they are of other windows, or damaged.
        """
        return Logits.load(self.path, windows, self.command)

    def for_split(self, split: ActivationSplit) -> Logits:
        """Its logits on the examples of a stored split, in the order of the data.

        Raises:
            WorkspaceError: they are of other windows, or damaged.
        """
        plan = split.plan
        rows = split.labels.get("question_index", plan.example_id)
        n_tokens, item_index = np.empty_like(plan.n_tokens), np.empty(len(split), np.int32)
        n_tokens[plan.example_id], item_index[plan.example_id] = plan.n_tokens, rows
        return self.read(WindowIndex([], n_tokens, item_index, None))


class Teacher:
    """Logits of a teacher, which a student learns from beside its labels.

    Args:
        logits: Logits of the teacher.
        rows: (examples,) window of each example that the student is given; None where examples are
            the windows in their order.
        temperature: Divisor of both sides' logits.
        labels_weight: part of the loss that labels have; with 1 the teacher is not asked at all,
            and the student learns as it would without.
    """

    def __init__(
        self,
        logits: Logits,
        rows: np.ndarray | None,
        *,
        temperature: float,
        labels_weight: float,
    ) -> None:
        self._arrays = {name: torch.from_numpy(values) for name, values in logits.arrays.items()}
        self._rows = rows
        self._lengths: Tensor | None = None
        if logits.kind == "span":
            self._lengths = torch.from_numpy(logits.windows.n_tokens.astype(np.int64))
            self._first = self._lengths.cumsum(0) - self._lengths
        self._temperature = temperature
        self._weight = labels_weight
        self._last: tuple[Tensor, dict[str, Tensor]] | None = None

    def of(self, examples: Tensor) -> dict[str, Tensor]:
        """Its logits for a batch, by name; those of the last batch are kept.

        Heads that are trained from one pass thus share what is gathered for a batch.

        Args:
            examples: (batch,) int64, positions of the examples.

        Returns:
            (batch, choices) each; of spans (batch, seq), padded with the smallest finite number;
            where ``examples`` are.
        """
        if self._last is None or self._last[0] is not examples:
            arrays = {
                name: values.to(examples.device)
                for name, values in self._gathered(examples).items()
            }
            self._last = examples, arrays
        return self._last[1]

    def _gathered(self, examples: Tensor) -> dict[str, Tensor]:
        """As `of`, where the logits are."""
        rows = examples.cpu()
        if self._rows is not None:
            rows = torch.from_numpy(self._rows[rows.numpy()])
        if self._lengths is None:
            return {name: values[rows] for name, values in self._arrays.items()}
        lengths = self._lengths[rows]
        begins = self._first[rows] - (lengths.cumsum(0) - lengths)
        tokens = torch.arange(int(lengths.sum())) + begins.repeat_interleave(lengths)
        return {
            name: pad_packed(values[tokens], lengths, fill=_LOWEST)
            for name, values in self._arrays.items()
        }

    def mixed(
        self,
        task: Task,
        output: Any,
        examples: Tensor,
        loss: Tensor,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """The loss of labels and that of the teacher, weighted, ().

        Args:
            task: Task that both learn.
            output: Output of the student for a batch.
            examples: (batch,) positions of its examples.
            loss: Loss of the labels, reduced over the batch.
            reduction: Kind of reduction.
        """
        if self._weight == 1:
            return loss
        distance = self._distance(task.logits(output), self.of(examples))
        told = distance.mean() if reduction == "mean" else distance.sum()
        return self._weight * loss + (1 - self._weight) * told

    def _distance(self, logits: Mapping[str, Tensor], teacher: Mapping[str, Tensor]) -> Tensor:
        """(batch,): the mean over start and end, where spans have both."""
        parts = []
        for name, values in teacher.items():
            told = values.to(logits[name].device)
            own = logits[name].float()
            if self._lengths is not None:  # a student may have computed padding
                own = own.masked_fill(told == _LOWEST, _LOWEST)
            parts.append(
                distillation_loss(own, told, temperature=self._temperature, reduction="none")
            )
        return torch.stack(parts).mean(dim=0)
