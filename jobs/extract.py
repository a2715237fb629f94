"""Hidden states into the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from bertvision.jobs.show import Rows, Values
from bertvision.pipelines.declare import (
    DEFAULTS,
    DataSource,
    LabelColumn,
    MaxLength,
    NewModel,
    PairColumn,
    SkipBad,
    StorePath,
    TextColumn,
    WorkspacePath,
    job,
)
from bertvision.pipelines.encoders.sites.names import check_patterns
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import StoredName, StrPath, Tags, parse_tags, path_of, text_of
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.tasks.sentences.rows import Columns
from bertvision.pipelines.workspace.checks import check_cluster, check_snapshots
from bertvision.pipelines.workspace.data import adding_data, check_data
from bertvision.pipelines.workspace.heads import only_tag
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.selection import check_split

if TYPE_CHECKING:
    from bertvision.pipelines.extraction.job import Extracted
    from bertvision.pipelines.workspace.workspace import Workspace


@job
def extract(
    checkpoint: Annotated[Tags | None, Option(flag="--checkpoint")] = None,
    *,
    options: ExtractOptions = DEFAULTS,
    task: str | None = None,
    data: DataSource = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    label: LabelColumn = None,
    max_length: MaxLength = None,
    windows: str | None = None,
    date: str | None = None,
    skip_bad: SkipBad = None,
    model: NewModel = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> Rows[Extracted]:
    """Write the hidden states of snapshots into the store.

    The data are the workspace's own, or another data set: ``task`` names it, and ``data``, the
    first time, where it is. A killed extraction is finished by the same call. A store named with
    ``store`` is the workspace's from then on.

    Examples:
        >>> import bertvision
        >>> written = bertvision.extract("1e", split="tune,dev", pool="max", encoding="int4")
        >>> [(row.tag, row.split, row.examples) for row in written]
        [('1e', 'tune-max', 18), ('1e', 'dev-max', 24)]

    Args:
        checkpoint: Snapshots, such as 0.3e or 0.3e,1e; by default the only one there is.
        task: Another data set than the workspace's own: its task, such as cola.
        windows: Windows of documents (task text): cut (default) to one each; split into several;
            pack several documents in one, apart.
        date: Date for chat templates, such as 2024-07-26; by default the day on which the data are
            first named.

    Returns:
        What was done to each split of each snapshot.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: an option is wrong, or the encoder has no token for a pooling.
        ProvenanceError: a split was begun from something else.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk cannot hold what is missing.
        NonFiniteError: a hidden state is NaN or infinite.
    """
    settings: dict[str, Any] = {"text": text, "pair": pair, "label": label}
    settings |= {"max_length": max_length, "skip_bad": skip_bad, "windows": windows, "date": date}
    place: dict[str, Any] = {
        "task": task,
        "data": data,
        "model": model,
        "workspace": workspace,
        "store": store,
    }
    asked = asked_extraction(checkpoint=checkpoint, options=options, **place, **settings)
    options = asked.options
    with adding_data(*asked.place, store=options.store, **settings) as (space, named):
        done = _extract(space, asked.tags, replace(options, dataset=named or options.dataset))
    return Rows(done, extracted_table)


class AskedExtraction(NamedTuple):
    """Arguments of `extract`, read, with all that needs nothing heavy checked."""

    place: tuple[Path | None, str | None, str | None, str | None]
    """Workspace, model, task and data, as `planned_data` takes them."""
    tags: Sequence[str] | None
    """Snapshots; None is the only one there is."""
    options: ExtractOptions
    settings: Mapping[str, Any]
    """Fields of `TaskConfig`."""


def asked_extraction(
    *,
    checkpoint: Tags | None,
    options: ExtractOptions,
    task: str | None,
    data: StrPath | None,
    model: StrPath | None,
    workspace: StrPath | None,
    store: StrPath | None,
    **settings: Any,
) -> AskedExtraction:
    """Read the arguments of `extract`.

    Args:
        checkpoint: As in `extract`, likewise all that follow.
        options: Options of the extraction.
        task: Task of the data.
        data: Their place.
        model: Encoder of a new workspace.
        workspace: Folder of the workspace.
        store: Place of the activations.
        **settings: fields of `TaskConfig`.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: an option is wrong, the data are not what the task is read from, or the store
            can only be read.
    """
    tags = None if checkpoint is None else parse_tags(checkpoint)
    place = path_of(workspace), text_of(model), task, text_of(data)
    columns = Columns(settings["text"] or "text", settings["pair"], settings["label"] or "label")
    from bertvision.featurestore.storage.opening import open_storage

    there = check_data(*place, columns)
    check_names(options, tags, there, text_of(data) or task)
    options = replace(options, store=text_of(store) or options.store)
    if activations := options.store or (there and there.activations):
        open_storage(activations).require_writable()
    return AskedExtraction(place, tags, options, settings)


def tags_or_only(space: Workspace, tags: Sequence[str] | None) -> Sequence[str]:
    """The snapshots that were asked for, or the only one there is.

    Raises:
        InputError: none was asked for, and there are several.
    """
    return tags or (only_tag(space.snapshots() or ["0e"], "snapshots"),)


def _extract(
    space: Workspace, tags: Sequence[str] | None, options: ExtractOptions
) -> list[Extracted]:
    from bertvision.pipelines.extraction.extract import extract as run
    from bertvision.pipelines.progress import parts
    from bertvision.pipelines.workspace.pretrained import ensure_snapshot

    tags = tags_or_only(space, tags)
    _check_layers(options, space)
    for tag in tags:
        ensure_snapshot(space, tag)  # of all, before hours are spent on the first
    done: list[Extracted] = []
    for tag, part in zip(tags, parts([1.0] * len(tags), "snapshot"), strict=True):
        with part:
            done += run(space, tag, options)
    return done


def check_names(
    options: ExtractOptions, tags: Sequence[str] | None, there: Workspace | None, data: str | None
) -> None:
    """Check what nothing heavy is needed for, beside the data: snapshots, layers, sites, splits.

    Args:
        options: Options of the extraction.
        tags: snapshots; None is not said.
        there: the workspace, where there is one.
        data: Data that are named, by their place or task; None is the workspace's own.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: an option is wrong.
    """
    check_cluster(options.scheduler)
    if there is None:
        return
    check_snapshots(there, tags or ())
    _check_layers(options, there)
    if data in (None, there.config.task.name):
        names = map(StoredName.parse, options.splits or ())
        for named in (name for name in names if name.dataset is None):
            check_split(named.split, there.config.data, None)


def _check_layers(options: ExtractOptions, space: Workspace) -> None:
    """Check layers and sites by the number of layers; a snapshot may have less, as no pooler."""
    model = space.config.model
    pooler = model.pooling == "cls"
    tokens: Literal["cls", "all"] = "cls" if pooler else "all"
    kept_layers(options.layers, model.num_hidden_layers, pooler=pooler, tokens=tokens)
    check_patterns(options.sites or (), model.num_hidden_layers)


def extracted_table(splits: Sequence[Values]) -> str:
    """Table of the splits that an extraction wrote or pooled from stored tokens."""
    remarks = [
        f"{s['tag']}/{s['split']}: pooled from {s['pooled_from']}, without the encoder"
        for s in splits
        if s["pooled_from"]
    ]
    shown = [
        Column("name", "split", "text"),
        *columns("count", examples="examples", shards_written="shards written"),
        Column("bytes", "size", "size"),
        Column("largest", "largest error", "text"),
        Column("speed", "examples/s"),
        Column("share", "encoder's share", "share"),
    ]
    rows = [
        {
            **s,
            "name": f"{s['tag']}/{s['split']}",
            "largest": _largest_error(s["encoding_error"]),
            "speed": s["examples_written"] / s["seconds"] if s["shards_written"] else "-",
            "share": s["encoder_seconds"] / s["seconds"]
            if s["shards_written"] and not s["pooled_from"]
            else "-",
        }
        for s in splits
    ]
    table = table_of(shown, rows)
    return "\n\n".join([table, *(["\n".join(remarks)] if remarks else [])])


def _largest_error(errors: Values) -> str:
    """The largest of all kinds of token and layers, as the calibration sample has it."""
    if not errors:
        return "-"
    kind = max(errors, key=lambda kind: errors[kind]["largest"])
    return f"{errors[kind]['largest']:.1%} ({kind}, layer {errors[kind]['in_layer']})"
