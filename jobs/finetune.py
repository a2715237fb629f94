"""Fine-tuning: snapshots of BERT, their scores and logits; many seeds, and methods compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.jobs.experiment import Status
from bertvision.jobs.show import Rows, RowsField, ShownRecord, Values
from bertvision.pipelines.declare import DEFAULTS, FigurePath, WorkspacePath, job
from bertvision.pipelines.encoders.checkpoint_path import check_path
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, Plotted, check_suffix
from bertvision.pipelines.reading import (
    Names,
    StrPath,
    Tag,
    Tags,
    parse_names,
    parse_tag,
    parse_tags,
    path_of,
)
from bertvision.pipelines.records import validated
from bertvision.pipelines.repeats.folder import find_seeds
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import check_task
from bertvision.pipelines.text import fill
from bertvision.pipelines.workspace.checks import check_learns, find_workspace
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.data import check_source
from bertvision.pipelines.workspace.heads import only_tag
from bertvision.pipelines.workspace.job_options import DataOptions, FinetuneOptions
from bertvision.pipelines.workspace.selection import check_split

if TYPE_CHECKING:
    from bertvision.pipelines.finetuning.kept_logits import KeptLogits
    from bertvision.pipelines.plotting import Figure


@job
def finetune(
    *,
    options: FinetuneOptions = DEFAULTS,
    save_at: Tags | None = None,
    resume: bool = False,
    devices: Annotated[int, Option(ge=1)] = 1,
    workspace: WorkspacePath = None,
    **changes: Any,
) -> Status:
    """Fine-tune BERT, with snapshots at fractions of an epoch.

    Each snapshot is scored on dev. Makes a workspace, or continues the one that was made with the
    same options: an interrupted run goes on where it was, to the same snapshots bit for bit.

    Examples:
        >>> import bertvision
        >>> done = bertvision.finetune(resume=True)
        >>> done.steps  # of this call: everything was there
        0

    Args:
        save_at: Fractions of an epoch to snapshot at, such as 0,0.1,0.3,1 (default 1); 2+3 is the
            mean of two.
        resume: Continue the workspace's run; needs no options.
        devices: Processes that share every batch, each on a GPU if there are GPUs
            (docs/scaling.md).

    Returns:
        What the workspace holds, with ``seconds`` and ``steps`` of this call.

    Raises:
        WorkspaceError: the workspace was made with other settings, or there is none to resume.
        InputError: an option, the model or the data is wrong.
        LockedError: another process is fine-tuning in this workspace.
        StoppedError: SIGINT or SIGTERM; all is saved.
        RankLostError: one of several processes ended; names it, and the same call goes on.
    """
    options = checked(options, save_at)
    try:
        find_workspace(workspace)
    except WorkspaceError:
        if resume:
            raise
        check_new(options)
    if devices > 1:
        from bertvision.pipelines.finetuning.finetune import finetune_on

        done = finetune_on(devices, path_of(workspace), options, resume=resume)
        return Status.of(done, workspace)
    from bertvision.pipelines.finetuning.finetune import finetune as run

    return Status.of(run(path_of(workspace), options, resume=resume), workspace)


@job
def adopt(
    folders: Names,
    *,
    options: DataOptions = DEFAULTS,
    classes: Names | None = None,
    workspace: WorkspacePath = None,
    **changes: Any,
) -> Status:
    """Take checkpoints that others trained as snapshots.

    Fine-tuned ones are scored as they are: their output layers are kept, with classes in the order
    of the data's. Others, such as those of pretraining, have words as tags; without a task, the
    workspace is for hidden states alone. Heads, probes and analyses then read their hidden states
    as those of any snapshot. Copies, whose weights are those of another, are warned of.

    Examples:
        >>> import bertvision
        >>> space = bertvision.Workspace.find()
        >>> adopted = bertvision.adopt(
        ...     f"{space.snapshot_dir('1e')}:3e",
        ...     train=space.dataset().source("train"),
        ...     dev=space.dataset().source("dev"),
        ...     max_length=space.config.task.max_length,
        ...     workspace="adopted",
        ... )
        >>> [snapshot.tag for snapshot in adopted.snapshots]
        ['3e']

    Args:
        folders: Checkpoints: folders, names on the hub, perhaps with a revision (NAME@step1000), or
            the output folder of transformers' Trainer with all its checkpoints. Epochs are those of
            trainer_state.json, or stand behind a colon, such as FOLDER:3e; one that was not
            fine-tuned has a word there, such as FOLDER:step1000.
        classes: Classes in the order of the outputs, such as negative,positive, where config.json
            lacks their names (id2label).

    Returns:
        The contents of the workspace.

    Raises:
        InputError: a fine-tuned checkpoint has no output layer of the task, or one of other
            classes; another has one; a checkpoint has another encoder or tokenizer than the first;
            or an option or the data are wrong.
        WorkspaceError: the workspace was made otherwise, or has another snapshot of a tag.
        LockedError: another process is adopting into this workspace.
    """
    for section in (TaskConfig, FinetuneConfig):
        validated(section, options.given(section))
    for option in ("train", "dev", "data"):
        check_source(f"--{option}", getattr(options, option))
    from bertvision.pipelines.finetuning.adopt import adopt as run
    from bertvision.pipelines.finetuning.adopt import find_checkpoints, without_task

    sources = find_checkpoints(parse_names(folders))
    named = () if classes is None else parse_names(classes)
    if twice := [name for i, name in enumerate(named) if name in named[:i]]:
        raise InputError(
            f"--classes {','.join(named)}: {twice[0]} comes twice; each is of one output"
        )
    if named and all(tag.is_named for tag in sources):
        raise InputError(
            f"--classes {','.join(named)}: {', '.join(sources)} were not fine-tuned and have no "
            "outputs; leave it out"
        )
    try:
        find_workspace(workspace)
    except WorkspaceError:
        data_given = options.source("train") and options.source("dev")
        if not (data_given or without_task(sources, options)):
            raise InputError(
                "a new workspace needs the task and data that the checkpoints were fine-tuned on: "
                "such as --task sst2 --data glue/SST-2, or --task csv --train train.csv --dev "
                "dev.csv"
            ) from None
    return Status.of(run(path_of(workspace), sources, options, named), workspace)


def checked(options: FinetuneOptions, save_at: Tags | None) -> FinetuneOptions:
    """Options whose values are allowed, with the snapshots that are asked for.

    Args:
        options: Options as they were given.
        save_at: fractions of an epoch; None leaves the options as they are.

    Raises:
        InputError: an option is wrong.
    """
    if save_at is not None:
        tags = parse_tags(save_at)
        if named := [tag for tag in tags if SnapshotTag(tag).is_named]:
            raise InputError(
                f"--save-at {named[0]}: fine-tuning is saved at fractions of an epoch, such as "
                f"0.3,1; `bertvision adopt FOLDER:{named[0]}` takes a checkpoint that is there"
            )
        options = replace(options, save_at=tags)
    for section in (TaskConfig, FinetuneConfig):
        validated(section, options.given(section))
    if options.task is not None and (options.data or (options.train and options.dev)):
        check_task(options.task)  # it names no data set, where the data are named
    return options


def check_new(options: FinetuneOptions) -> None:
    """Check what a new workspace is made from; one that is there compares it with its own.

    Raises:
        InputError: something is missing, or there is no such model or file.
    """
    options.sources()
    if options.model is not None:
        check_path(options.model)
    for option in ("train", "dev", "data"):
        check_source(f"--{option}", getattr(options, option))


@job
def logits(
    checkpoint: Annotated[Tag | None, Option(flag="--checkpoint")] = None,
    *,
    split: Names = "train",
    workspace: WorkspacePath = None,
) -> Rows[KeptLogits]:
    """Keep a snapshot's logits, for students to learn from.

    The windows are those that the snapshot was trained on; `bertvision train HEAD --distil TAG`
    reads the logits. What is kept is not computed again; a killed run is finished by the same call.

    Examples:
        >>> import bertvision
        >>> (kept,) = bertvision.logits("1e")
        >>> kept.file, kept.windows
        ('bert/1e/train.safetensors', 72)

    Args:
        checkpoint: The snapshot; by default the only one there is.
        split: Splits, such as train,tune.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: the workspace has no task, so that its encoder has no output layer.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    splits = parse_names(split)
    tag = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace)
    check_learns(space)
    tag = tag or only_tag(space.snapshots(), "snapshots")
    space.require_snapshot(tag)
    for name in splits:
        check_split(name, space.config.data, None)
    from bertvision.pipelines.finetuning.kept_logits import keep_logits

    return Rows(keep_logits(space, tag, splits), logits_table)


def logits_table(rows: Sequence[Values]) -> str:
    """Table of the kept logits by split."""
    shown = [
        *columns("text", tag="snapshot", split="split"),
        Column("windows", "windows", "count"),
        Column("bytes", "size", "size"),
        Column("seconds", "seconds"),
        Column("file", "file", "text"),
    ]
    return table_of(shown, rows)


class Spread(ShownRecord, Plotted):
    """Methods compared over the seeds of their fine-tunings."""

    task: str
    metric: str
    """Key of the metric that ``score`` is; scores are in per cent."""
    baseline: float | None
    """Score of always giving the commonest answer; None where the metric has none to tell: 0 then
    counts as failed."""
    baseline_name: str
    """Name of that answer: ``majority class``, ``never answering``, …."""
    rows: RowsField
    """For each method ``method``, ``variant``, ``system``, ``runs``, ``unfinished``, ``score``,
    ``score_sd``, ``lowest``, ``highest``, ``failed`` (a share), ``trained_parameters``,
    ``kept_bytes``, ``fine_tuning_seconds``, ``extraction_seconds``, ``training_seconds``, and
    ``difference`` from the first with ``difference_low``, ``difference_high`` and ``no_interval``,
    which says why there is none."""
    runs: RowsField
    """For each run ``method``, ``seed``, ``score``, ``failed``, costs and ``folder``."""
    unfinished: list[dict[str, Any]]
    """For each seed without a score ``method``, ``seed`` and ``command``."""

    def table(self, values: Values) -> str:
        """A line for each method, best read from the left; then what is unfinished."""
        from bertvision.pipelines.repeats import spread as methods

        table = table_of(methods.columns(values), methods.shown(values))
        below = "\n".join(map(fill, methods.remarks(values)))
        return "\n\n".join(
            filter(None, [methods.basis(values), table, fill(methods.LEGEND), below])
        )

    def charts(self) -> dict[str, Chart]:
        """Runs and means of methods; differences from the first with intervals.

        Methods that are one variant with ever other numbers, such as freeze:1, freeze:2, …, have a
        curve too, ``by number``.
        """
        from bertvision.pipelines.repeats.charts import spread_charts

        return spread_charts(self.to_json())

    def figure(self) -> Figure:
        """A row of points for each method, which a notebook shows."""
        from bertvision.pipelines.repeats.charts import spread_figure

        return spread_figure(self.to_json())


@job
def repeat(
    *,
    options: FinetuneOptions = DEFAULTS,
    save_at: Tags | None = None,
    seeds: Annotated[int, Option(ge=1)] = 5,
    workspace: Annotated[StrPath | None, Option(flag="--workspace -w")] = None,
    **changes: Any,
) -> Spread:
    """Fine-tune BERT with several seeds, and compare the runs.

    Each seed has a workspace of its own. An interrupted call is continued by the same call; what is
    there is not done again. Seeds can be added later: new ones get the settings of those that are
    there.

    Args:
        save_at: Fractions of an epoch to snapshot at, such as 0,0.1,0.3,1 (default 1); 2+3 is the
            mean of two.
        seeds: Number of seeds; --seed is the first of them.
        workspace: Folder of the workspaces seed-0, seed-1, …; by default the current one.

    Returns:
        What `spread` says of the folder.

    Raises:
        WorkspaceError: the folder is a workspace itself, or one in it was made with other settings.
        InputError: an option, the model or the data is wrong.
        LockedError: another process is fine-tuning in one of the workspaces.
        StoppedError: SIGINT or SIGTERM; all is saved.
    """
    options = checked(options, save_at)
    root = Path(workspace if workspace is not None else ".").expanduser().resolve()
    if not find_seeds(root):
        check_new(options)
    from bertvision.pipelines.repeats.run import repeat as run

    run(root, options, seeds=seeds)
    return spread(str(root))


@job
def spread(
    folders: Names,
    *,
    plot: FigurePath = None,
) -> Spread:
    """Compare methods over the seeds of their runs.

    Mean, spread, failed runs, costs, and the difference from the first method.

    Args:
        folders: Folders of repeat, one for each method; FOLDER@NAME:SNAPSHOT is another system than
            BERT's last snapshot.
        plot: SVG file to write: a row of points for each method.

    Raises:
        WorkspaceError: a folder holds no runs, they differ in more than the seed, none of them is
            scored, or they are of another task, data or metric than those of the first.
        UnknownNameError: no run of a folder has such a system, or several are meant.
        InputError: no folder is named, one is a file or comes twice, or ``plot`` does not end in
            ``.svg``.
    """
    figure = path_of(plot)
    if figure is not None:
        check_suffix(figure)
    if not (names := [name for name in parse_names(folders) if name]):
        raise InputError("name a folder of runs, such as mrpc, which `bertvision repeat` makes")
    from bertvision.pipelines.repeats.spread import spread as run

    table = Spread.model_validate(run(names))
    if figure is not None:
        table.figure().save(figure)
    return table
