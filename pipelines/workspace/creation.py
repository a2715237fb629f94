"""Opening the workspace that options agree with, or making it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.encoders.loading import (
    PretrainedEncoder,
    dimensions,
    find_pretrained,
    find_unloaded,
    load_tokenizer,
)
from bertvision.pipelines.encoders.output_layer import OutputOrigin, choose_output
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.records import validated
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import SQUAD, check_task, find_task, is_task, name_task
from bertvision.pipelines.tasks.sentences.labelled import with_columns
from bertvision.pipelines.tasks.soundness import report_doubts, report_shared, report_skipped
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.tasks.windows import special_ends
from bertvision.pipelines.variants.registry import fitting_depth
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.pretrained import check_starts, checkpoint_for
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.selection import (
    fitting,
    selected_data,
    source_split,
    without_shared,
)
from bertvision.pipelines.workspace.snapshots import (
    library_versions,
    of_teacher,
    with_start,
    with_teacher,
)
from bertvision.pipelines.workspace.workspace import FILE, Workspace

log = logging.getLogger(__name__)


def open_workspace(root: Path | None, options: FinetuneOptions, *, resume: bool) -> Workspace:
    """Open the workspace that ``options`` agree with, or make it.

    Args:
        root: its folder; None means the one the current folder stands in, or else makes the
            current folder one.
        options: Options that were asked for.
        resume: there must be a workspace.

    Raises:
        WorkspaceError: the workspace was made with other settings, or there is none to resume.
        InputError: an option, the model or the data is wrong.
    """
    return planned_run(root, options, resume=resume).ensure_written()


def planned_run(root: Path | None, options: FinetuneOptions, *, resume: bool) -> Workspace:
    """As `open_workspace`, and nothing is written: a new workspace can still be refused.

    Args:
        root: Folder of the workspace.
        options: likewise.
        resume: likewise.

    Raises:
        WorkspaceError: as there, likewise InputError.
    """
    options = with_start(with_teacher(options))
    if options.task is not None and is_task(options.task):
        name_task(options.task)
    try:
        workspace = Workspace.find(root)
    except WorkspaceError:
        place = Path.cwd() if root is None else root.expanduser().resolve()
        if resume or (place / FILE).exists():
            raise
        workspace = Workspace(place, new_config(options))
        check_starts(workspace.config)
        return workspace
    return agreed(workspace, options)


def new_config(options: FinetuneOptions, *, adopted: bool = False) -> WorkspaceConfig:
    """The settings of a new workspace, after reading the model's and the data's digests.

    Args:
        options: Options that were asked for.
        adopted: Whether snapshots come with their own output layers, and that of the model is none.

    Raises:
        InputError: something needed was not given, or is wrong.
    """
    from bertvision.pipelines.precision import resolve_precision

    sources = options.sources()
    if options.task is not None and (options.data or (options.train and options.dev)):
        check_task(options.task)  # it names no data set, where the data are named
    name = name_task(options.own_task or "squad_v2")
    if not find_task(name).learns:
        raise InputError(
            f"--task {name} cannot be fine-tuned on: it is for `bertvision probe`, `bertvision "
            "rank`, `bertvision similarity` or `bertvision extract`; choose another task (of "
            "wikiqa it is wikiqa_pairs)"
        )
    given = {"max_length": find_task(name).max_length, **options.given(TaskConfig), "name": name}
    given["linked"] = load_task(name).linked
    task = with_columns(load_task(name), validated(TaskConfig, given))
    if options.own_task and task.answerable_only:
        raise InputError(
            f"--answerable-only is of SQuAD's questions: leave it out of --task {options.own_task}"
        )
    given = {**options.given(FinetuneConfig), **of_teacher(options), "spare_vectors": True}
    given["nested"] = options.train_questions is not None
    finetune = validated(FinetuneConfig, given)
    finetune = finetune.model_copy(update={"precision": resolve_precision(finetune.precision)})
    checkpoint = checkpoint_for(str(options.model), options.revision, task)
    kind, read = load_task(name), {}
    _check_sources(kind, options)
    for split, source in sources.items():
        if source_split(split, task) != split:
            continue
        read[split] = read_data = kind.read(str(source), split, task)
        if split == "train":  # dev is read by its classes
            task = task.model_copy(update={"classes": read_data.classes})
        report_skipped(split, read_data.skipped)
    if not options.own_task and not any(q.is_impossible for q in read["train"].items):
        task = task.model_copy(update={"name": "squad_v1"})
    kind.check_data(read["train"].items, str(sources["train"]))
    tokenizer = load_tokenizer(checkpoint.folder)
    read = fitting(read, kind, tokenizer, task)
    read = without_shared(read, kind, task)
    examples = {k: list(map(kind.example, read_data.items)) for k, read_data in read.items()}
    report_doubts(name, examples, together=False)
    if {"train", "dev"} <= set(read):
        advice = "; --skip-shared leaves such rows out of train"
        report_shared(kind.texts, read["train"].items, read["dev"].items, advice)
    data = selected_data(sources, read, task, finetune)
    output = None if adopted else _output(checkpoint, task, options)
    return _config(checkpoint, task, finetune, data, output=output)


def _output(
    checkpoint: PretrainedEncoder, task: TaskConfig, options: FinetuneOptions
) -> OutputOrigin | None:
    """Choice of the first output layer, which is logged."""
    if options.init_from is not None:  # of which the encoder alone is taken
        return None
    kind = load_task(task.name)
    choice = choose_output(checkpoint, kind.model_class, kind.model_options(task))
    if choice.reason:
        log.log(logging.WARNING if choice.origin == "new" else logging.INFO, "%s", choice.reason)
    return choice.origin


def _check_sources(kind: Task, options: FinetuneOptions) -> None:
    """Refuse one file of one split as both splits: systems would be scored on what they learned."""
    needed = {split for split in ("train", "dev") if getattr(options, split) is None}
    if options.dev_fraction:
        needed.discard("dev")
        if options.dev is not None:
            raise InputError(
                "--dev names the data to score on, and --dev-fraction takes them from the training "
                "data: give one of the two"
            )
    source = options.source("train" if "train" in needed else "dev")
    is_file = options.data is not None and Path(str(source)).is_file()
    if is_file and options.dev_fraction and "all" in kind.splits(str(source)):
        return
    if is_file and source and needed - set(splits := kind.splits(source)):
        named = ["examples" if split == "all" else f"{split} data" for split in splits]
        raise InputError(
            f"--data {options.data} is one file of {' and '.join(named)}, and fine-tuning needs "
            "data to train on and other data (dev) to be scored on: give --train FILE and --dev "
            "FILE, with --data a folder that holds both, or --dev-fraction 0.1 to hold out a part"
        )
    if options.train is not None and options.train == options.dev:
        log.warning("--train and --dev are the same: scores will be those of the training data")


def feature_workspace(
    root: Path | None, model: str | None, revision: str | None = None
) -> Workspace:
    """Open a workspace, or make one for the hidden states of an encoder alone.

    Args:
        root: As in `planned_workspace`.
        model: likewise.
        revision: likewise.

    Raises:
        WorkspaceError: as of `planned_workspace`, likewise InputError.
    """
    return planned_workspace(root, model, revision).ensure_written()


def planned_workspace(
    root: Path | None, model: str | None, revision: str | None = None, *, weights: bool = True
) -> Workspace:
    """Open a workspace, or say what a new one for the hidden states of an encoder will be.

    Nothing is written: a command that fails on its data leaves no new workspace behind.

    Args:
        root: its folder; None means the one the current folder stands in, or else plans the
            current folder to be one.
        model: hub name or local folder of any encoder; None must find a workspace.
        revision: branch, tag or commit on the hub.
        weights: read those of a new one; else it is for plans alone, without their digest.

    Raises:
        WorkspaceError: there is none and no model was named, or it was made with another model.
        InputError: there is no such model.
    """
    if model is None:
        return Workspace.find(root)
    try:
        workspace = Workspace.find(root)
    except WorkspaceError:
        place = Path.cwd() if root is None else root.expanduser().resolve()
        if (place / FILE).exists():
            raise
        task = TaskConfig(name="features")
        finetune = FinetuneConfig(save_at=(SnapshotTag("0e"),))
        checkpoint = (find_pretrained if weights else find_unloaded)(model, revision)
        return Workspace(place, _config(checkpoint, task, finetune, {}, weights=weights))
    return agreed(workspace, FinetuneOptions(model=model))


def _config(
    checkpoint: PretrainedEncoder,
    task: TaskConfig,
    finetune: FinetuneConfig,
    data: dict[str, DataConfig],
    weights: bool = True,
    output: OutputOrigin | None = None,
) -> WorkspaceConfig:
    size = dimensions(checkpoint.config)
    return WorkspaceConfig(
        model=ModelConfig(
            name_or_path=checkpoint.name_or_path,
            revision=checkpoint.revision,
            weights_sha256=weights_digest(checkpoint.folder) if weights else "",
            hidden_size=size.hidden_size,
            num_hidden_layers=fitting_depth(
                finetune.variant, size.layers, load_task(task.name).kind, checkpoint
            ),
            output_layer=output,
            special_ends=special_ends(load_tokenizer(checkpoint.folder)) == (True, True),
        ),
        task=task,
        data=data,
        finetune=finetune,
        versions=library_versions(),
    )


def agreed(workspace: Workspace, options: FinetuneOptions) -> Workspace:
    """A workspace that options agree with; what they name elsewhere is there (see `_moved`).

    Raises:
        WorkspaceError: it was made with other settings.
    """
    config = _moved(workspace.config, options)
    workspace = workspace if config == workspace.config else replace(workspace, config=config)
    settings: dict[str, object] = {}
    asked: dict[str, object] = {}
    if options.model is not None:
        local = Path(options.model).expanduser()
        name = str(local.resolve()) if local.is_dir() else options.model
        settings["model"], asked["model"] = config.model.name_or_path, name
    if options.task is not None and (options.own_task or config.task.name not in SQUAD):
        settings["task"], asked["task"] = config.task.name, options.task
    for split in ("train", "dev"):
        # a task of its own says nothing about the data of a workspace that is there
        named = (getattr(options, split) or options.data) is not None or not options.own_task
        if named and (source := options.source(split)) is not None:
            dataset = workspace.dataset()
            settings[split] = dataset.source(split) if split in dataset.data else None
            asked[split] = source
    for section in (config.task, config.finetune):
        given = options.given(type(section))
        wanted = validated(type(section), {**section.model_dump(), **given})
        for name in given:
            settings[name], asked[name] = getattr(section, name), getattr(wanted, name)
    if asked.get("precision") == "auto":
        del asked["precision"]
    if difference := first_difference(settings, asked, asked):
        name, there, here = difference
        raise WorkspaceError(
            f"workspace {workspace.root} was made with {name} = {_show(there)}, not "
            f"{_show(here)}: leave --{name.replace('_', '-')} out to continue it, or start "
            "another --workspace"
        )
    return workspace


def _moved(config: WorkspaceConfig, options: FinetuneOptions) -> WorkspaceConfig:
    """Settings with the teacher and the start where options name them, if they have their weights.

    Raises:
        InputError: there is none where they say, likewise WorkspaceError.
    """
    model, finetune = config.model, config.finetune
    taught = finetune.distil is not None and options.distil not in (None, finetune.distil)
    if taught and of_teacher(options)["teacher_sha256"] == finetune.teacher_sha256:
        finetune = finetune.model_copy(update={"distil": options.distil})
    begun = finetune.init_from is not None and options.init_from not in (None, finetune.init_from)
    place = Path(options.model or "").resolve()  # of the start, see `with_start`
    if begun and read_snapshot_info(place).weights_sha256 == model.weights_sha256:
        finetune = finetune.model_copy(update={"init_from": options.init_from})
        model = model.model_copy(update={"name_or_path": str(place)})
    return config.model_copy(update={"model": model, "finetune": finetune})


def _show(value: Any) -> str:
    return (",".join(value) or "none") if isinstance(value, tuple) else str(value)
