"""Fine-tuning BERT on a task, with snapshots at fractions of an epoch, by one process or several.

Snapshots are a pure function of the workspace's settings: the order of batches depends on (seed,
epoch), dropout on (seed, step, batch, rank), and a resumed run continues at an optimiser step. On
one CPU they are the same bit for bit, however often the run was interrupted; with several ranks
too, of which there must be as many each time.

Fine-tuning by several processes of this machine, each with a device of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from transformers import PreTrainedModel

from bertvision.errors import DiskSpaceError, InputError, counted
from bertvision.featurestore.storage.lock import exclusive
from bertvision.featurestore.writer import free_bytes
from bertvision.pipelines.encoders.loading import (
    check_token_ids,
    load_tokenizer,
    pad_id,
    takes_token_types,
)
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.finetuning.frozen import FrozenLayers
from bertvision.pipelines.finetuning.kept_logits import open_student, teacher_of
from bertvision.pipelines.finetuning.module import DueSnapshots, FinetuneModule
from bertvision.pipelines.finetuning.steps import StepLoader, steps_per_epoch
from bertvision.pipelines.precision import device, resolve_precision
from bertvision.pipelines.ranks import this_rank
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.text import size
from bertvision.pipelines.training.group import Group, joined
from bertvision.pipelines.training.launch import check_devices, launch
from bertvision.pipelines.training.lightning import Clock, TrainingLog, quiet_lightning, trainer
from bertvision.pipelines.training.resume import ResumeFile
from bertvision.pipelines.variants.freezing import FreezeStored
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.variants.variant import Variant
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.pretrained import ensure_snapshot, load_pretrained, pretrained
from bertvision.pipelines.workspace.records import is_snapshot
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

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
        resume_every_seconds: Most seconds of work that a kill loses.
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
        RankLostError: another rank ended, or was stopped.
        RanksDifferError: a rank sees other files than the first, or computes otherwise.
    """
    rank = this_rank()
    if not rank.first:
        return _follow(root, resume_every_seconds)
    workspace = open_student(root, options, resume=resume)
    if not find_task(workspace.config.task.name).learns:
        raise InputError(
            f"workspace {workspace.root} is for hidden states alone, without a task: make another "
            "one with --workspace, --model, --task and --data (or --train and --dev)"
        )
    for variant in load_variants(workspace.config.finetune.variant):
        variant.check_shared(rank.count)
    tags = workspace.config.finetune.tags
    with exclusive(workspace.root / ".finetune.lock", f"fine-tuning in {workspace.root}"):
        made = all(is_snapshot(workspace.snapshot_dir(tag)) for tag in tags)
        learned = [tag for tag in tags if not tag.is_named]  # whose output layer is no new one
        scored = all((workspace.bert_dir(tag) / "metrics.json").is_file() for tag in learned)
        if made and (scored or not evaluate):
            log.info("every snapshot of %s is there: nothing to do", workspace.root)
        started = time.monotonic()
        with joined() as group:
            (go,) = group.first_says(int(not made and workspace.config.adopted is None))
            steps = _train(workspace, group, resume_every_seconds) if go else 0
        seconds = time.monotonic() - started if steps else 0.0
        (workspace.root / "finetune" / "resume.ckpt").unlink(missing_ok=True)
        for tag in tags:
            ensure_snapshot(workspace, tag)  # means, once their parts are there; adopted ones
        if evaluate:
            for tag in learned:
                evaluate_bert(workspace, tag)
    return {**status(workspace), "seconds": seconds, "steps": steps}


def _follow(root: Path | None, resume_every_seconds: float) -> dict[str, Any]:
    """Run a rank other than the first: its part of every step, and nothing else.

    The first makes the workspace, holds its lock, writes and scores.
    """
    with joined() as group:
        (go,) = group.first_says(0)
        workspace = Workspace.find(root)
        steps = _train(workspace, group, resume_every_seconds) if go else 0
    return {**status(workspace), "seconds": 0.0, "steps": steps}


def _train(workspace: Workspace, group: Group, resume_every_seconds: float) -> int:
    """Train to the last snapshot; returns the steps taken by this call."""
    config = workspace.config
    settings = config.finetune
    checkpoint = pretrained(workspace)
    tokenizer = load_tokenizer(checkpoint.folder)
    task = load_task(config.task.name)
    model = load_pretrained(workspace, checkpoint)
    windows = workspace.windows("train", tokenizer)
    check_token_ids(windows.input_ids, tokenizer, model)
    teacher = teacher_of(workspace, windows)
    per_epoch = steps_per_epoch(len(windows), settings.batch_size, settings.accumulate)
    clock = Clock()
    folder = workspace.root / "finetune"
    variants = load_variants(settings.variant)
    log_file = folder / "log.csv"
    saver = DueSnapshots(workspace, model, tokenizer, per_epoch, clock, log_file, variants)
    if group.rank.first:
        saver.check()
        _check_space(workspace, model, sum(not saver.made([tag]) for tag in settings.tags))
        saver.save(0)
    missing = [step for step, tags in saver.due.items() if not saver.made(tags)]
    # as the first sees the files: a file system may show what it has just written late to others
    soonest, last = group.first_says(min(missing, default=0), max(missing, default=0))
    if not last:
        return 0
    loader = StepLoader(
        windows,
        task.labels(windows),
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        steps=last,
        seed=settings.seed,
        order=settings.order,
        pad_id=pad_id(tokenizer, model.config),
        token_types=takes_token_types(model),
        share=group.share,
    )
    folder.mkdir(exist_ok=True)
    resume_file = ResumeFile(folder / "resume.ckpt", every_seconds=resume_every_seconds)
    resumed = resume_file.find(before=soonest)
    if not group.rank.alone:  # or they would go on from different steps, and sum what they learn
        group.check_same(
            {
                "bertvision.yaml": config.digest().encode(),
                "set of training windows": _contents(windows),
                "resume file": resume_file.contents() if resumed else b"",
            }
        )
    total_steps = round(settings.epochs * per_epoch)
    frozen = _frozen(workspace, model, variants, loader)
    module = FinetuneModule(
        *(model, task, settings),
        total_steps=total_steps,
        saved_after=frozenset(saver.due),
        digest=config.digest(),
        variants=variants,
        frozen=frozen,
        teacher=teacher,
        group=group,
    )
    training_log = TrainingLog(log_file, last, "fine-tuning", ["loss", "lr"])
    writing: list[pl.Callback] = [training_log, clock, saver]
    with quiet_lightning(), resume_file.guard():
        trainer(
            folder,
            [*(writing if group.rank.first else [clock]), resume_file],
            group,
            max_epochs=1,
            logger=False,
            precision="bf16-mixed" if module.precision == "bf16" else "32-true",
        ).fit(module, loader, ckpt_path=resumed, weights_only=True)
    if group.rank.first:
        resume_file.finish()
    if frozen is not None:
        frozen.remove()
    return module.steps_taken


def _contents(windows: Windows) -> bytes:
    """A digest of the texts of windows and of what is right of them."""
    digest = hashlib.sha256()
    for of_text in (windows.n_tokens, windows.input_ids, windows.token_type_ids):
        digest.update(of_text.tobytes())
    for right in (*windows.labels.values(), *windows.token_labels.values()):
        digest.update(right.tobytes())
    return digest.digest()


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


def finetune_on(
    devices: int, root: Path | None, options: FinetuneOptions, *, resume: bool = False
) -> dict[str, Any]:
    """Make every snapshot of a workspace as `finetune.finetune` does, with several processes.

    They take each step together: its batches are shared out, and gradients are summed.

    Args:
        devices: Number of processes, at least 2; where there are GPUs, no more than these.
        root: see `finetune.finetune`.
        options: likewise.
        resume: likewise.

    Returns:
        What the workspace holds, with ``seconds`` and ``steps`` of this call.

    Raises:
        InputError: there are not so many devices, or a variant cannot be shared; else as of
            `finetune.finetune`.
        WorkspaceError: see `finetune.finetune`.
        StoppedError: likewise.
        RankLostError: a process failed; names it.
    """
    check_devices(devices)
    for variant in load_variants(options.variant or ()):  # before a workspace is made
        variant.check_shared(devices)
    workspace = open_student(root, options, resume=resume)
    for variant in load_variants(workspace.config.finetune.variant):
        variant.check_shared(devices)
    asked = ["finetune", "--resume", "--json", "--workspace", str(workspace.root)]
    outcome: dict[str, Any] = json.loads(launch(asked, devices))
    return outcome
