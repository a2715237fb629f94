"""BERT as it is fine-tuned: one optimiser step, its learning rate, its dropout.

The snapshots that a fine-tuning owes, each saved at its step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Self

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.finetuning.frozen import FrozenLayers
from bertvision.pipelines.finetuning.steps import Step
from bertvision.pipelines.precision import autocast, resolve_precision
from bertvision.pipelines.ranks import Rank
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Batch, Int64Array
from bertvision.pipelines.training.group import Group
from bertvision.pipelines.training.lightning import Clock, seconds_per_step
from bertvision.pipelines.training.teacher import Teacher
from bertvision.pipelines.variants.variant import Groups, Variant, whole
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.records import is_snapshot
from bertvision.pipelines.workspace.snapshots import save_snapshot
from bertvision.pipelines.workspace.workspace import FILE, Workspace


class FinetuneModule(pl.LightningModule):
    """BERT with a task's output layer, the task's loss, and the optimiser.

    Optimisation is manual, because a step's batches come together (`Step`): each is weighted by its
    windows, so that accumulation is the gradient of one larger batch also where the last is short.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        task: Task,
        settings: FinetuneConfig,
        *,
        total_steps: int,
        digest: str,
        saved_after: Set[int] = frozenset(),
        variants: Sequence[Variant] = (),
        frozen: FrozenLayers | None = None,
        teacher: Teacher | None = None,
        group: Group | None = None,
    ) -> None:
        """Train ``model``; ``digest`` of the workspace's settings guards the resume file.

        Where lower layers are ``frozen`` in a store, they are not run. A ``teacher`` is learned
        from beside the labels. A ``group`` of several ranks takes each step together, and compares
        weights before they are saved: with a resume file, and ``saved_after`` so many steps.
        """
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.variants = variants
        self.frozen = frozen
        self.teacher = teacher
        self.group = group or Group(Rank())
        self.task = task
        self.settings = settings
        self.precision = resolve_precision(settings.precision)
        self.total_steps = total_steps
        self.digest = digest
        self.saved_after = saved_after
        self.steps_taken = 0
        self.train()

    def train(self, mode: bool = True) -> Self:
        """As of every module; variants may keep a part out of training."""
        super().train(mode)
        for variant in self.variants if mode else ():
            variant.train(self.model)
        return self

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with bias correction; AdamW where weights decay: matrices, and not vectors."""
        lr, decay = self.settings.lr, self.settings.weight_decay
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups: Groups = [{"params": parameters}]
        if decay:
            spared = {id(p) for p in parameters if self.settings.spare_vectors and p.dim() < 2}
            groups = [
                {"params": [p for p in parameters if id(p) not in spared], "weight_decay": decay},
                {"params": [p for p in parameters if id(p) in spared], "weight_decay": 0.0},
            ]
        for variant in self.variants:
            groups = variant.groups(self.model, groups)
        for variant in self.variants:
            if (other := variant.optimizer(groups, lr)) is not None:
                return other
        kind = torch.optim.AdamW if decay else torch.optim.Adam
        return kind(groups, lr=lr, weight_decay=decay, fused=True)

    def training_step(self, step: Step, batch_idx: int) -> dict[str, Any]:
        """Take one optimiser step; returns its mean loss and learning rate."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        lr = learning_rate(self.settings, step.number, self.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        total = torch.zeros((), device=self.device)
        optimizer.zero_grad()
        for i, batch in enumerate(step.batches):
            torch.manual_seed(self._dropout_seed(step.number, i))
            loss = self._loss(batch, step.rows[i]) / step.windows
            with autocast("32", self.device):
                self.manual_backward(loss)
            total += loss.detach()
        self.group.sum(total)
        self.group.sum_gradients(self.model.parameters())
        if self.settings.gradient_clip:
            # not Lightning's: it refuses fused optimisers, though bf16 scales no gradient
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        optimizer.step()
        self.steps_taken += 1
        if step.number + 1 in self.saved_after:
            self.group.check_weights(self.model.parameters(), step.number + 1)
        return {"loss": total, "log": {"loss": total, "lr": lr}}

    def _dropout_seed(self, step: int, batch: int) -> int:
        """The same whenever the step is taken; another on each of several ranks."""
        seed_text = f"{self.settings.seed}/{step}/{batch}"
        rank = self.group.rank
        seed_text += "" if rank.alone else f"/{rank.number}"
        return int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:8], "big")

    def _loss(self, batch: Batch, rows: Int64Array) -> Tensor:
        """Loss, summed over the windows of a batch."""
        output = self._output(batch, rows)
        loss = self.task.loss(output, batch)
        if self.teacher is not None:
            loss = self.teacher.mixed(self.task, output, torch.from_numpy(rows), loss, "sum")
        for variant in self.variants:
            loss = variant.loss(self.model, self.task, batch, output, loss)
        return loss

    def _output(self, batch: Batch, rows: Int64Array) -> Any:
        inputs: dict[str, Any] = dict(batch.inputs)
        if any(variant.reads_states for variant in self.variants):
            inputs["output_hidden_states"] = True
        if self.frozen is None:
            return self.model(**inputs)
        with self.frozen.below(self.model, self.frozen.states(rows).to(self.device)):
            return self.model(**inputs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record what the resume file belongs to; every rank comes here.

        Raises:
            RanksDifferError: they have different weights.
        """
        self.group.check_weights(self.model.parameters(), self.trainer.global_step)
        checkpoint["workspace"] = self.digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the resume file of other settings."""
        if checkpoint.get("workspace") != self.digest:
            raise WorkspaceError(
                "the resume file belongs to other settings than bertvision.yaml: delete "
                "finetune/resume.ckpt to start again"
            )


def learning_rate(settings: FinetuneConfig, step: int, total_steps: int) -> float:
    """The rate of the step after ``step`` steps: linear warm-up, then constant or linear to 0."""
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    if settings.decay == "linear":
        return settings.lr * (total_steps - step) / max(1, total_steps - warmup)
    return settings.lr


class DueSnapshots(pl.Callback):
    """Saves the snapshots that are due at a step and not there yet."""

    def __init__(
        self,
        workspace: Workspace,
        model: PreTrainedModel,
        tokenizer: Any,
        per_epoch: int,
        clock: Clock,
        log_file: Path,
        variants: Sequence[Variant],
    ) -> None:
        self.workspace = workspace
        self.variants = variants
        self.model = model
        self.tokenizer = tokenizer
        self.per_epoch = per_epoch
        self.clock = clock
        self.log_file = log_file
        self.due: dict[int, list[SnapshotTag]] = {}
        for tag in (tag for tag in workspace.config.finetune.tags if not tag.is_mean):
            self.due.setdefault(tag.step(per_epoch), []).append(tag)

    def check(self) -> None:
        """Refuse several names for the weights of one step, unless some were made before.

        Raises:
            InputError: tags fall on one step, and none of their snapshots is there.
        """
        for step, tags in self.due.items():
            if len(tags) > 1 and not any(self.made([tag]) for tag in tags):
                raise InputError(
                    f"--save-at {','.join(tags)}: all of them fall on step {step} of the "
                    f"{counted(self.per_epoch, 'step')} of an epoch and would be one snapshot: "
                    f"name one of them; delete {self.workspace.root / FILE}, which names them "
                    "all, or start another --workspace"
                )

    def made(self, tags: list[SnapshotTag]) -> bool:
        """Whether all these snapshots are there."""
        return all(is_snapshot(self.workspace.snapshot_dir(tag)) for tag in tags)

    def save(self, step: int) -> None:
        """Save the snapshots that are due when ``step`` steps were taken and not there yet."""
        for tag in self.due.get(step, []):
            if not self.made([tag]):
                save_snapshot(
                    self.workspace.snapshot_dir(tag),
                    whole(self.variants, self.model),
                    self.tokenizer,
                    self.workspace.config,
                    tag=tag,
                    step=step,
                    steps_per_epoch=self.per_epoch,
                    seconds=self.clock.seconds if step else 0.0,
                    seconds_per_step=seconds_per_step(self.log_file) if step else None,
                    trained_parameters=sum(
                        p.numel() for p in self.model.parameters() if p.requires_grad
                    ),
                )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Step, batch_idx: int
    ) -> None:
        """Save what is due after this step."""
        self.save(batch.number + 1)
