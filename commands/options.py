"""Options that several commands share, how their text is read, and how results are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from bertvision.errors import InputError
from bertvision.featurestore.format.names import EncodingName
from bertvision.pipelines.options import PrecisionName
from bertvision.pipelines.workspace.job_options import DATA, LABEL, PAIR, TEXT

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.workspace import Workspace as OpenWorkspace

Workspace = Annotated[
    Path | None,
    typer.Option(
        "--workspace", "-w", help="Folder of the experiment; by default the one you stand in."
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Activation store: a folder or an fsspec URL, such as s3://bucket/folder; by default "
        "the workspace's."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
Precision = Annotated[str, typer.Option(help="auto, 32 or bf16.")]
Scheduler = Annotated[str, typer.Option(help="threads, processes or tcp://HOST:PORT.")]
MaxTokens = Annotated[
    int, typer.Option(min=0, help="Seeded sample of at most so many tokens; 0 uses all.")
]
Data = Annotated[str | None, typer.Option(help=DATA.help)]
TextColumn = Annotated[str | None, typer.Option("--text", help=TEXT.help)]
PairColumn = Annotated[str | None, typer.Option("--pair", help=PAIR.help)]
LabelColumn = Annotated[str | None, typer.Option("--label", help=LABEL.help)]
NewModel = Annotated[
    str | None,
    typer.Option("--model", help="Make a workspace for the hidden states of this encoder alone."),
]
MissingEncoding = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        help="How to store what is extracted: int8 (default), int4, bfloat16, float16, float32.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option("--scheduler", help="tcp://HOST:PORT of a Dask cluster whose workers extract."),
]
MaxLength = Annotated[
    int | None, typer.Option(min=16, help="Tokens of a window of added data (default 128).")
]
SkipBad = Annotated[
    bool | None,
    typer.Option("--skip-bad", help="Skip malformed rows of added data, and count them."),
]
Plot = Annotated[Path | None, typer.Option(help="SVG file to write.")]


def find_workspace(workspace: Path | None, store: str | None = None) -> OpenWorkspace:
    """Open the workspace that ``--workspace`` names, or the one the current folder stands in.

    Args:
        workspace: its folder, or None.
        store: what ``--store`` names: where its activations are for this once.
    """
    from bertvision.pipelines.workspace.workspace import Workspace

    return Workspace.find(workspace).at(store)


def open_data(
    workspace: Path | None,
    model: str | None,
    task: str | None,
    data: str | None,
    **settings: Any,
) -> tuple[OpenWorkspace, str | None]:
    """The workspace and the data set that a command is to look at.

    Args:
        workspace: what ``--workspace`` names.
        model: what ``--model`` names: a workspace for hidden states alone is made where there is
            none.
        task: what ``--task`` names; None is the workspace's own data.
        data: what ``--data`` names; a data set that was added before needs none, nor does one
            that is on the hub.
        **settings: fields of `TaskConfig`, where they are not None: columns, ``max_length``,
            ``skip_bad``.

    Returns:
        The workspace, and the name of the data set (None: its own).
    """
    from bertvision.pipelines.tasks.registry import (
        TASKS,
        find_task,
        is_task,
        name_task,
        path_name,
    )
    from bertvision.pipelines.workspace.creation import planned_workspace
    from bertvision.pipelines.workspace.dataset import add_dataset, check_own
    from bertvision.pipelines.workspace.dataset_record import is_added

    space = planned_workspace(workspace, model)
    if task is not None and is_task(task):
        name_task(task)
    if data is None and task is not None and is_added(space.root, path_name(task)):
        return space, path_name(task)
    if data is None and task in (None, space.config.task.name):
        return space.ensure_written(), None
    if task is None:
        raise InputError(f"--data {data}: say what it is with --task, such as --task cola")
    source = data or find_task(name_task(task)).hub
    named = None if data is None else Path(data).name.split(".")[0]
    # a file of one's own may have any name; but `probe cola sst2 --data cola.tsv` would take the
    # sentences of one data set for another's
    if named in TASKS and named != task and task != "csv" and Path(str(data)).is_file():
        raise InputError(
            f"--data {data}: by its name this file holds {named}, but it would be read as {task}. "
            f"Give the file of {task}; for several data sets at once, the folder that holds a "
            "file of each; or give the file another name"
        )
    if source is None:
        return space, space.dataset(task).name  # which says that it was not added
    if task == space.config.task.name and task != "csv":
        check_own(space.dataset(), source)
        return space, None
    added = add_dataset(space.root, task, source, **settings)
    return space.ensure_written(), added.name


def check_storing(encoding: str | None, precision: str) -> None:
    """Refuse options of an extraction before a workspace is made for it.

    Raises:
        InputError: there is no such encoding or precision.
    """
    if encoding is not None:
        parse_choice(encoding, get_args(EncodingName), "--encoding")
    parse_choice(precision, get_args(PrecisionName), "--precision")


def parse_poolings(text: str) -> tuple[Any, ...]:
    """``cls,mean`` → poolings.

    Raises:
        InputError: one is not known.
    """
    from bertvision.pipelines.tasks.registry import POOLINGS

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        parse_choice(name, tuple(map(str, POOLINGS)), "--pool")
    return names


def parse_choice(text: str, allowed: tuple[str, ...], option: str) -> Any:
    """The value of an option that takes one of a few.

    Raises:
        InputError: it is none of them.
    """
    if text not in allowed:
        raise InputError(f"{option} {text!r}: choose one of {', '.join(allowed)}")
    return text


def parse_tags(text: str) -> tuple[str, ...]:
    """``0.1,0.3e,1`` → tags."""
    from bertvision.featurestore.format.names import SnapshotTag

    tags = []
    for part in text.split(","):
        part = part.strip()
        if not part.endswith("e") and part != "untrained":
            try:
                part = SnapshotTag.of(float(part))
            except ValueError:
                raise InputError(f"{part!r} is not a fraction of an epoch: such as 0.3") from None
        tags.append(SnapshotTag(part))
    return tuple(tags)


def parse_tag(text: str) -> str:
    """One tag."""
    if len(tags := parse_tags(text)) != 1:
        raise InputError(f"{text!r}: name one snapshot, such as 0.3e")
    return tags[0]


def parse_names(text: str | None) -> list[str] | None:
    """``train,dev`` → names; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",")]


def parse_layers(text: str) -> tuple[int, ...] | None:
    """``0,6,12`` → indices of hidden states; ``all`` → None."""
    if text == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--layers {text!r}: give indices such as 0,6,12, or all") from None


def parse_weight_decays(text: str) -> tuple[float, ...]:
    """``1e-5,1e-4`` → numbers, in increasing order."""
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise InputError(
            f"--weight-decays {text!r}: give numbers from 0, such as 1e-5,1e-4"
        ) from None


def parse_fractions(text: str) -> tuple[float, ...]:
    """``0,0.1,1`` → parts of the training examples."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--fractions {text!r}: give numbers from 0 to 1, such as 0.1,1") from None


def show(result: Any, as_json: bool, table: Callable[[Any], str]) -> None:
    """Print a result to stdout: as JSON, or as the table that ``table`` makes of it."""
    typer.echo(json.dumps(result, indent=2, allow_nan=False) if as_json else table(result))
