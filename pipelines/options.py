"""What the user asks of fine-tuning, and the workspace that follows from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    TaskConfig,
    WorkspaceConfig,
    validated,
)
from bertvision.pipelines.loading import find_checkpoint, weights_digest
from bertvision.pipelines.selection import select_questions, source_split
from bertvision.pipelines.snapshots import library_versions
from bertvision.pipelines.tasks.registry import TASKS, load_task
from bertvision.pipelines.tasks.squad import SquadData, load_squad
from bertvision.pipelines.workspace import FILE, Workspace

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Options of ``bertvision finetune``; None follows the workspace, or else the default.

    Those named like a field of `TaskConfig` or `FinetuneConfig` mean that field.
    """

    model: str | None = None
    """Hub name or local folder of a BERT checkpoint."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    task: str | None = None
    """Data set on the hub (``squad_v2``), for ``train`` and ``dev`` where these are not given; or
    ``answerable``, a task of its own on the data of ``squad_v2`` or of these."""
    train: str | None = None
    """SQuAD file, or data set on the hub."""
    dev: str | None = None
    """SQuAD file, or data set on the hub."""
    max_length: int | None = None
    max_question_length: int | None = None
    overlap: int | None = None
    answerable_only: bool | None = None
    skip_bad: bool | None = None
    tune_fraction: float | None = None
    epochs: float | None = None
    save_at: tuple[str, ...] | None = None
    batch_size: int | None = None
    lr: float | None = None
    weight_decay: float | None = None
    warmup: float | None = None
    decay: str | None = None
    accumulate: int | None = None
    gradient_clip: float | None = None
    precision: str | None = None
    train_questions: int | None = None
    seed: int | None = None

    def source(self, split: str) -> str | None:
        """Where a split of the source comes from: an absolute path, or a hub name."""
        source: str | None = getattr(self, split) or self._hub
        if source is None:
            return None
        path = Path(source).expanduser()
        return str(path.resolve()) if path.exists() else source

    @property
    def own_task(self) -> str | None:
        """The task that ``task`` names, where it does not name a data set."""
        entry = TASKS.get(self.task or "")
        return self.task if entry is not None and entry.hub is not None else None

    @property
    def _hub(self) -> str | None:
        return TASKS[self.own_task].hub if self.own_task else self.task

    def given(self, section: type[BaseModel]) -> dict[str, Any]:
        """The options that were given, of those that ``section`` has under the same name."""
        names = {f.name for f in fields(self)} & set(section.model_fields)
        return {n: getattr(self, n) for n in sorted(names) if getattr(self, n) is not None}


def open_workspace(root: Path | None, options: FinetuneOptions, *, resume: bool) -> Workspace:
    """Open the workspace that ``options`` agree with, or make it.

    Args:
        root: its folder; None means the one the current folder stands in, or else makes the
            current folder one.
        options: what was asked.
        resume: there must be a workspace.

    Raises:
        WorkspaceError: the workspace was made with other settings, or there is none to resume.
        InputError: an option, the model or the data is wrong.
    """
    try:
        workspace = Workspace.find(root)
    except WorkspaceError:
        place = Path.cwd() if root is None else root.expanduser().resolve()
        if resume or (place / FILE).exists():
            raise
        return Workspace.create(place, new_config(options))
    _check_agreement(workspace, options)
    return workspace


def new_config(options: FinetuneOptions) -> WorkspaceConfig:
    """The settings of a new workspace, after reading the model's and the data's digests.

    Raises:
        InputError: something needed was not given, or is wrong.
    """
    from bertvision.pipelines.precision import resolve_precision

    sources = {split: options.source(split) for split in ("train", "dev")}
    missing = [f"--{name}" for name, source in sources.items() if source is None]
    if options.model is None:
        missing.insert(0, "--model")
    if missing:
        raise InputError(
            f"a new workspace needs {' and '.join(missing)}: such as --model bert-large-uncased "
            "--train train-v2.0.json --dev dev-v2.0.json, or --task squad_v2 from the hub"
        )
    task = validated(TaskConfig, options.given(TaskConfig))
    if options.own_task and task.answerable_only:
        raise InputError(
            f"--task {options.own_task} learns from unanswerable questions: leave "
            "--answerable-only out"
        )
    finetune = validated(FinetuneConfig, options.given(FinetuneConfig))
    finetune = finetune.model_copy(update={"precision": resolve_precision(finetune.precision)})
    checkpoint = find_checkpoint(str(options.model), options.revision)
    longest = checkpoint.config.max_position_embeddings
    if task.max_length > longest:
        raise InputError(
            f"max_length {task.max_length} is more than the {longest} positions of "
            f"{checkpoint.name_or_path}: give --max-length {longest} or less"
        )
    sources_read = {
        split: load_squad(str(source), split, skip_bad=task.skip_bad)
        for split, source in sources.items()
    }
    for split, data in sources_read.items():
        if data.skipped:
            log.warning(
                "skipped %d malformed parts of %s, the first: %s",
                len(data.skipped),
                split,
                data.skipped[0],
            )
    train = sources_read["train"].questions
    if options.own_task:
        name = options.own_task
    else:
        impossible = any(question.is_impossible for question in train)
        name = "squad_v1" if task.answerable_only or not impossible else "squad_v2"
    load_task(name).check_data(train, str(sources["train"]))
    task = task.model_copy(update={"name": name})
    return WorkspaceConfig(
        model=ModelConfig(
            name_or_path=checkpoint.name_or_path,
            revision=checkpoint.revision,
            weights_sha256=weights_digest(checkpoint.folder),
            hidden_size=checkpoint.config.hidden_size,
            num_hidden_layers=checkpoint.config.num_hidden_layers,
        ),
        task=task,
        data=_data(sources, sources_read, task, finetune),
        finetune=finetune,
        versions=library_versions(),
    )


def _data(
    sources: dict[str, str | None],
    read: dict[str, SquadData],
    task: TaskConfig,
    finetune: FinetuneConfig,
) -> dict[str, DataConfig]:
    data = {}
    for split in ("train", "tune", "dev"):
        origin = source_split(split)
        count = len(select_questions(read[origin].questions, split, task, finetune))
        if count:
            data[split] = DataConfig(
                source=str(sources[origin]), sha256=read[origin].sha256, questions=count
            )
        elif split != "tune":
            raise InputError(
                f"{sources[origin]} leaves no question for the split {split!r}: use more data, or "
                "a larger --train-questions"
            )
    return data


def _check_agreement(workspace: Workspace, options: FinetuneOptions) -> None:
    config = workspace.config
    asked: dict[str, tuple[Any, Any]] = {}
    if options.model is not None:
        local = Path(options.model).expanduser()
        name = str(local.resolve()) if local.is_dir() else options.model
        asked["model"] = (name, config.model.name_or_path)
    held_task = config.task.name
    if options.task is not None and (options.own_task or TASKS[held_task].hub):
        asked["task"] = (options.task, held_task)
    for split in ("train", "dev"):
        # a task of its own says nothing about the data of a workspace that is there
        named = getattr(options, split) is not None or not options.own_task
        if named and (source := options.source(split)) is not None:
            asked[split] = (source, config.data[split].source)
    for section in (config.task, config.finetune):
        wanted = validated(type(section), options.given(type(section)))
        for name in options.given(type(section)):
            asked[name] = (getattr(wanted, name), getattr(section, name))
    if asked.get("precision", ("",))[0] == "auto":
        del asked["precision"]
    for name, (wanted, held) in asked.items():
        if wanted != held:
            raise WorkspaceError(
                f"workspace {workspace.root} was made with {name} = {_show(held)}, not "
                f"{_show(wanted)}: leave --{name.replace('_', '-')} out to continue it, or start "
                "another --workspace"
            )


def _show(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
