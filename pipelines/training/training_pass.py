"""Plan of a training, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import first_difference
from bertvision.featurestore.split import ActivationSplit
from bertvision.models import Kind
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import device, head_precision
from bertvision.pipelines.records import digest_of
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.datamodule import ActivationDataModule, HiddenStates, decoded
from bertvision.pipelines.training.module import HeadsModule, build_heads
from bertvision.pipelines.training.teacher import Teacher, TeacherFile
from bertvision.pipelines.training.trained_head import changed_file, is_whole, task_of_kind
from bertvision.pipelines.workspace.heads import head_activations
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.records import RunConfig, RunTraining, read_run_config
from bertvision.pipelines.workspace.runs import HEAD_TOKENS, Run, ranks
from bertvision.pipelines.workspace.workspace import Workspace

SplitOpener: TypeAlias = Callable[[Workspace, str, TokenPooling, str], ActivationSplit]
"""Opens what heads read, of the arguments of `head_activations`."""


class TrainingPass(NamedTuple):
    """Heads that are trained from one stream: of one kind and one seed."""

    workspace: Workspace
    tag: SnapshotTag
    split: ActivationSplit
    held_out: ActivationSplit | None
    configs: dict[Run, RunConfig]
    todo: list[Run]
    options: TrainOptions
    task: Task
    classes: int
    taught_by: TeacherFile | None

    @classmethod
    def plan(
        cls,
        workspace: Workspace,
        kind: Kind,
        runs: list[Run],
        tag: SnapshotTag,
        options: TrainOptions,
        overwrite: bool,
        splits: SplitOpener = head_activations,
    ) -> TrainingPass:
        """Plan the runs to be trained; nothing is written yet but what ``splits`` makes."""
        precision = head_precision(options.precision, kind)
        options = replace(options, precision=precision)
        tokens = options.pool or HEAD_TOKENS[kind]
        split = splits(workspace, tag, tokens, "train")
        held_out = splits(workspace, tag, tokens, "tune") if options.best_epoch else None
        for run in runs:
            if run.fraction > 0 and run.examples(len(split)) == 0:
                raise InputError(
                    f"{run.name}: a fraction of {run.fraction:g} is none of {split.name}'s "
                    f"{len(split)} examples: give a larger one, or 0 for the head untrained"
                )
        task = task_of_kind(kind, workspace.config.task.name)
        classes = 2 if kind == "span" else task.outputs(workspace.config.task)
        taught_by, lacking = None, None
        if options.distil is not None:
            try:
                taught_by = _teacher(workspace, options.distil, runs, kind)
            except (WorkspaceError, UnknownNameError) as error:
                lacking = error  # heads that are already trained do not need the teacher
        configs = {
            run: _head_config(run, kind, classes, split, options, digest)
            for run, digest in _teachers(workspace, tag, runs, taught_by, lacking).items()
        }
        todo = [
            run for run in runs if overwrite or not _is_trained(workspace, tag, run, configs[run])
        ]
        if lacking is not None and todo:
            raise lacking
        planned = cls(
            *(workspace, tag, split, held_out, configs, todo, options, task, classes, taught_by)
        )
        planned.build("meta")
        return planned

    @property
    def folder(self) -> Path:
        """Where the training keeps what it needs to go on."""
        digest = digest_of([self.configs[run].to_json() for run in self.todo])[:16]
        return self.workspace.root / "heads" / self.tag / f".run-{digest}"

    @property
    def kind(self) -> Kind:
        """Kind of the heads."""
        return next(iter(self.configs.values())).kind

    @property
    def layers(self) -> list[int]:
        """Indices of the hidden states that the heads take."""
        return list(next(iter(self.configs.values())).layers)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the decoded hidden states."""
        return torch.bfloat16 if self.options.precision == "bf16" else torch.float32

    def build(self, device: str) -> dict[Run, nn.Module]:
        """The heads that are to be trained; on ``meta`` only to see whether they can be made."""
        hidden = self.split.record.hidden_size
        return build_heads(
            self.todo,
            layers=len(self.layers),
            hidden=hidden,
            classes=self.classes,
            kind=self.kind,
            device=device,
        )

    def teacher(self) -> Teacher | None:
        """Teacher whose logits on the split the heads learn from too.

        Raises:
            WorkspaceError: they are damaged, or of other windows.
        """
        if self.taught_by is None:
            return None
        return Teacher(
            self.taught_by.for_split(self.split),
            self.split.plan.example_id,
            temperature=self.options.temperature,
            labels_weight=self.options.labels_weight,
        )

    def data(self, **options: Any) -> ActivationDataModule:
        """The stream that the heads are trained from.

        Args:
            **options: Order and threads, as `ActivationDataModule` takes them.
        """
        return ActivationDataModule(
            self.workspace.activations,
            self.tag,
            train=self.split,
            batch_size=self.options.batch_size,
            layers=self.options.layers,
            dtype=self.dtype,
            **options,
        )

    def module(self, heads: dict[Run, nn.Module]) -> HeadsModule:
        """Heads of the pass as one module to train.

        Args:
            heads: Those of `build`.

        Raises:
            WorkspaceError: As of `teacher`.
        """
        return HeadsModule(
            heads,
            self.task,
            ranks=torch.from_numpy(ranks(self.split.plan.example_id, self.todo[0].seed)),
            batch_size=self.options.batch_size,
            lr=self.options.lr,
            digest=self.folder.name,
            read=self.read,
            teacher=self.teacher(),
        )

    def read(self, positions: Sequence[int]) -> list[HiddenStates]:
        """Examples of the split on the device, each by itself."""
        return [
            decoded(self.split.read([i], self.layers).to(device()), self.dtype) for i in positions
        ]


def _teacher(workspace: Workspace, tag: str, runs: Sequence[Run], kind: Kind) -> TeacherFile:
    """The kept logits that runs are to learn from.

    Raises:
        InputError: they are spans', and the heads tell classes.
        WorkspaceError: as of `TeacherFile.find`, likewise ProvenanceError and UnknownNameError.
    """
    if kind != find_task(workspace.config.task.name).kind:
        names = ", ".join(run.name for run in runs)
        raise InputError(
            f"{names} cannot learn from the logits of {tag}: the encoder looks for spans, and "
            "these heads say whether there is an answer; leave --distil out, or train a span head"
        )
    return TeacherFile.find(workspace, tag)


def _teachers(
    workspace: Workspace,
    tag: SnapshotTag,
    runs: Sequence[Run],
    taught_by: TeacherFile | None,
    lacking: Exception | None,
) -> dict[Run, str | None]:
    """The digest of each run's teacher: where its logits are gone, what the head says of it."""
    if lacking is None:
        return dict.fromkeys(runs, None if taught_by is None else taught_by.weights_sha256)
    folders = {run: workspace.head_dir(tag, run.name) for run in runs}
    return {
        run: read_run_config(folder).teacher_sha256 if is_whole(folder) else None
        for run, folder in folders.items()
    }


def _head_config(
    run: Run,
    kind: Kind,
    classes: int,
    split: ActivationSplit,
    options: TrainOptions,
    teacher_sha256: str | None,
) -> RunConfig:
    """Everything that a head's weights depend on."""
    record = split.record
    training = asdict(options)
    del training["layers"], training["pool"]  # the record and the name say them
    return RunConfig(
        head=run.head,
        variant=run.variant,
        kind=kind,
        trained_on=record.tag,
        layers=tuple(record.layers[i] for i in split.layer_positions(options.layers)),
        hidden_size=record.hidden_size,
        encoding=record.encoding,
        classes=classes,
        training=RunTraining(**training, seed=run.seed, fraction=run.fraction),
        activations={
            "examples": record.examples,
            "plan_sha256": record.plan_sha256,
            **record.provenance,
        },
        teacher_sha256=teacher_sha256,
    )


def _is_trained(workspace: Workspace, tag: SnapshotTag, run: Run, config: RunConfig) -> bool:
    folder = workspace.head_dir(tag, run.name)
    if not is_whole(folder):
        return False
    if (changed := changed_file(folder)) is not None:
        raise WorkspaceError(
            f"{run.name} was trained on {tag} before, and {changed} is not as it was written: give "
            "--overwrite to train it again"
        )
    before = read_run_config(folder).model_copy(update={"buffer": None})
    if difference := first_difference(before.to_json(), config.to_json()):
        field, there, here = difference
        raise WorkspaceError(
            f"{run.name} was trained on {tag} before with {field} = {there}, now it is "
            f"{field.rpartition('.')[2]} = {here}: give --overwrite to replace it"
            f"{_aside(run, field, here)}"
        )
    return True


def _aside(run: Run, field: str, here: object) -> str:
    """How a head that is trained otherwise can stand beside the one that is there."""
    name = field.removeprefix("training.")
    if name not in ("layers", "lr", "epochs"):
        return ""
    return f", or a name of its own to train it beside that one: {run.having(**{name: here}).text}"
