"""Fine-tuning BERT on a task, with snapshots at fractions of an epoch.

Snapshots are a pure function of the workspace's settings: the order of batches depends on (seed,
epoch), dropout on (seed, step, batch), and a resumed run continues at an optimiser step. On one CPU
they are the same bit for bit, however often the run was interrupted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from transformers import PreTrainedModel

from bertvision.errors import DiskSpaceError, InputError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.storage.lock import exclusive
from bertvision.featurestore.writer import free_bytes
from bertvision.pipelines.encoders.loading import load_tokenizer, pad_id, takes_token_types
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.finetuning.distilling import find_logits, teacher_of
from bertvision.pipelines.finetuning.frozen import FrozenLayers
from bertvision.pipelines.finetuning.module import FinetuneModule
from bertvision.pipelines.finetuning.steps import Step, StepLoader, steps_per_epoch
from bertvision.pipelines.precision import device, resolve_precision
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.text import size
from bertvision.pipelines.training.lightning import (
    Clock,
    TrainingLog,
    quiet_lightning,
    seconds_per_step,
    trainer,
)
from bertvision.pipelines.training.resume import ResumeFile
from bertvision.pipelines.variants.freezing import FreezeStored
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.variants.variant import Variant, whole
from bertvision.pipelines.workspace.creation import open_workspace
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.pretrained import ensure_snapshot, load_pretrained, pretrained
from bertvision.pipelines.workspace.records import is_snapshot
from bertvision.pipelines.workspace.snapshots import save_snapshot
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import FILE, Workspace

log = logging.getLogger(__name__)


def finetune(
    root: Path | None,
    options: FinetuneOptions,
    *,
    resume: bool = False,
    resume_every_seconds: float = 300.0,
    evaluate: bool = True,
) -> dict[str, Any]:
    """Make every snapshot of a workspace, and BERT's own scores at each; continue what is there.

    Args:
        root: the workspace; None means the one the current folder stands in, or else makes the
            current folder one.
        options: settings of a new workspace; of an existing one they must agree with it.
        resume: refuse to make a new workspace.
        resume_every_seconds: at most this much work is lost when the process is killed.
        evaluate: also score BERT at every snapshot.

    Returns:
        The workspace's `status`, with ``seconds`` and ``steps`` of training done by this call (0
        where all snapshots were there already).

    Raises:
        WorkspaceError: the workspace was made with other settings, or there is none to resume.
        InputError: an option, the model or the data is wrong.
        DiskSpaceError: the disk cannot hold the snapshots; no step was taken.
        LockedError: another process is fine-tuning in this workspace.
        StoppedError: SIGINT or SIGTERM; all is saved, and ``exit_code`` is what to exit with.
    """
    if options.distil is not None:
        find_logits(options.distil)  # before a workspace is made
    workspace = open_workspace(root, options, resume=resume)
    if not find_task(workspace.config.task.name).learns:
        raise InputError(
            f"workspace {workspace.root} is for hidden states alone, without a task: make another "
            "one with --workspace, --model, --task and --data (or --train and --dev)"
        )
    tags = workspace.config.finetune.tags
    with exclusive(workspace.root / ".finetune.lock", f"fine-tuning in {workspace.root}"):
        made = all(is_snapshot(workspace.snapshot_dir(tag)) for tag in tags)
        scored = all((workspace.bert_dir(tag) / "metrics.json").is_file() for tag in tags)
        if made and (scored or not evaluate):
            log.info("every snapshot of %s is there: nothing to do", workspace.root)
        started = time.monotonic()
        steps = 0 if made else _train(workspace, resume_every_seconds)
        seconds = time.monotonic() - started if steps else 0.0
        (workspace.root / "finetune" / "resume.ckpt").unlink(missing_ok=True)
        for tag in tags:
            ensure_snapshot(workspace, tag)  # means, once their parts are there
        if evaluate:
            for tag in tags:
                evaluate_bert(workspace, tag)
    return {**status(workspace), "seconds": seconds, "steps": steps}


def _train(workspace: Workspace, resume_every_seconds: float) -> int:
    """Train to the last snapshot; returns the steps taken by this process."""
    config = workspace.config
    settings = config.finetune
    checkpoint = pretrained(workspace)
    tokenizer = load_tokenizer(checkpoint.folder)
    task = load_task(config.task.name)
    model = load_pretrained(workspace, checkpoint)
    windows = workspace.windows("train", tokenizer)
    teacher = teacher_of(workspace, windows)
    per_epoch = steps_per_epoch(len(windows), settings.batch_size, settings.accumulate)
    clock = Clock()
    folder = workspace.root / "finetune"
    variants = load_variants(settings.variant)
    saver = _Snapshots(workspace, model, tokenizer, per_epoch, clock, folder / "log.csv", variants)
    saver.check()
    _check_space(workspace, model, sum(not saver.made([tag]) for tag in settings.tags))
    saver.save(0)
    missing = [step for step, tags in saver.due.items() if not saver.made(tags)]
    if not missing:
        return 0
    loader = StepLoader(
        windows,
        task.labels(windows),
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        steps=max(missing),
        seed=settings.seed,
        order=settings.order,
        pad_id=pad_id(tokenizer, model.config),
        token_types=takes_token_types(model),
    )
    folder.mkdir(exist_ok=True)
    resume_file = ResumeFile(folder / "resume.ckpt", every_seconds=resume_every_seconds)
    total_steps = round(settings.epochs * per_epoch)
    frozen = _frozen(workspace, model, variants, loader)
    module = FinetuneModule(
        *(model, task, settings),
        total_steps=total_steps,
        digest=config.digest(),
        variants=variants,
        frozen=frozen,
        teacher=teacher,
    )
    training_log = TrainingLog(saver.log_file, max(missing), "fine-tuning", ["loss", "lr"])
    with quiet_lightning(), resume_file.guard():
        trainer(
            folder,
            [training_log, clock, saver, resume_file],
            max_epochs=1,
            logger=False,
            precision="bf16-mixed" if module.precision == "bf16" else "32-true",
        ).fit(module, loader, ckpt_path=resume_file.find(before=min(missing)), weights_only=True)
    resume_file.finish()
    if frozen is not None:
        frozen.remove()
    return module.steps_taken


def _frozen(
    workspace: Workspace,
    model: PreTrainedModel,
    variants: Sequence[Variant],
    loader: StepLoader,
) -> FrozenLayers | None:
    """The lower layers out of a store, where a variant asks for it; checked on the first batch."""
    asked = next((v for v in variants if isinstance(v, FreezeStored)), None)
    if asked is None:
        return None
    precision = resolve_precision(workspace.config.finetune.precision)
    frozen = FrozenLayers(workspace, asked.layers, precision)
    batch, rows = loader.first()
    frozen.check(model.to(device()), batch, rows, precision)  # type: ignore[arg-type]
    return frozen


def _check_space(workspace: Workspace, model: PreTrainedModel, snapshots: int) -> None:
    """Check, before any step, that the disk can hold the snapshots and the resume file.

    The resume file holds the weights and the optimiser's two moments of each.

    Raises:
        DiskSpaceError: it cannot.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    needed, free = (snapshots + 3) * weights, free_bytes(workspace.root)
    if snapshots and free is not None and needed > free:
        raise DiskSpaceError(
            f"{size(needed)} are needed in {workspace.root}, for {counted(snapshots, 'snapshot')} "
            f"of {size(weights)} and the file to resume from; {size(free)} are free: free some "
            "space, save fewer snapshots with --save-at or name another --workspace"
        )


class _Snapshots(pl.Callback):
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
        return all(is_snapshot(self.workspace.snapshot_dir(tag)) for tag in tags)

    def save(self, step: int) -> None:
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
        self.save(batch.number + 1)
