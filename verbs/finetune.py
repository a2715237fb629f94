"""Snapshots of BERT, and their scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertvision.errors import WorkspaceError
from bertvision.pipelines.encoders.checkpoint_path import check_path
from bertvision.pipelines.records import validated
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.registry import check_task
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.verbs.arguments.checks import find_workspace
from bertvision.verbs.arguments.data import check_source
from bertvision.verbs.arguments.options import chosen, takes
from bertvision.verbs.arguments.reading import StrPath, Tags, at_least, parse_tags, path_of
from bertvision.verbs.experiment import Status


@takes(FinetuneOptions)
def finetune(
    *,
    options: FinetuneOptions | None = None,
    save_at: Tags | None = None,
    resume: bool = False,
    devices: int = 1,
    workspace: StrPath | None = None,
    **changes: Any,
) -> Status:
    """Fine-tune BERT with snapshots at fractions of an epoch, and score each on dev.

    Makes a workspace, or continues the one that was made with the same options: an interrupted run
    goes on where it was, to the same snapshots bit for bit.

    Examples:
        >>> import bertvision
        >>> done = bertvision.finetune(resume=True)
        >>> done.steps  # of this call: everything was there
        0

    Args:
        **changes: options of the job, by keyword.
        options: these in one object; what is given by keyword goes before it.
        save_at: fractions of an epoch to snapshot at, such as ``0,0.1,0.3,1`` (default 1);
            ``2+3`` is the mean of two.
        resume: continue the workspace's run; needs no options.
        devices: processes that train together, a GPU for each where there are GPUs; they share
            every batch, so that its size is that of one process.
        workspace: folder of the experiment; by default the one you stand in, or else the current
            folder becomes one.

    Returns:
        What the workspace holds, with ``seconds`` and ``steps`` of this call.

    Raises:
        WorkspaceError: the workspace was made with other settings, or there is none to resume.
        InputError: an option, the model or the data is wrong.
        LockedError: another process is fine-tuning in this workspace.
        StoppedError: SIGINT or SIGTERM; all is saved.
        RankLostError: one of several processes ended; names it, and the same call goes on.
    """
    at_least(devices, 1, "--devices")
    options = checked(chosen(FinetuneOptions, options, changes), save_at)
    try:
        find_workspace(workspace)
    except WorkspaceError:
        if resume:
            raise
        check_new(options)
    if devices > 1:
        from bertvision.pipelines.finetuning.devices import finetune_on

        return Status.model_validate(
            finetune_on(devices, path_of(workspace), options, resume=resume)
        )
    from bertvision.pipelines.finetuning.finetune import finetune as run

    return Status.model_validate(run(path_of(workspace), options, resume=resume))


def checked(options: FinetuneOptions, save_at: Tags | None) -> FinetuneOptions:
    """Options whose values are allowed, with the snapshots that are asked for.

    Args:
        options: as they were given.
        save_at: fractions of an epoch; None leaves the options as they are.

    Raises:
        InputError: an option is wrong.
    """
    if save_at is not None:
        options = replace(options, save_at=parse_tags(save_at))
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
