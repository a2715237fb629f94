"""The snapshots that a fine-tuning owes, each saved at its step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from transformers import PreTrainedModel

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.finetuning.steps import Step
from bertvision.pipelines.training.lightning import Clock, seconds_per_step
from bertvision.pipelines.variants.variant import Variant, whole
from bertvision.pipelines.workspace.records import is_snapshot
from bertvision.pipelines.workspace.snapshots import save_snapshot
from bertvision.pipelines.workspace.workspace import FILE, Workspace


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
