"""The data sets of a workspace: its own, which the encoder is fine-tuned on, and added ones.

An added data set is what hidden states are looked at on: probing sentences, pairs to rank. Where it
comes from is kept in ``datasets/<name>.json``, with digests, so that it need be named once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.poolings import TokenPooling, column_of
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.records import validated, write_record
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import find_task, name_task
from bertvision.pipelines.tasks.sentences.labelled import LabelledTask, with_columns
from bertvision.pipelines.tasks.sentences.task import pointed_tokens
from bertvision.pipelines.tasks.soundness import report_doubts, report_shared, report_skipped
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.workspace.config import DataConfig, FinetuneConfig, WorkspaceConfig
from bertvision.pipelines.workspace.records import (
    DatasetRecord,
    dataset_name,
    read_dataset_record,
    record_path,
)
from bertvision.pipelines.workspace.selection import (
    check_split,
    fitting,
    select_items,
    source_split,
)

if TYPE_CHECKING:
    from bertvision.pipelines.tasks.data import TaskData
    from bertvision.pipelines.tasks.windows import Windows


@dataclass(frozen=True)
class Dataset:
    """Items of a task, by split.

    Attributes:
        name: None of the workspace's own.
        task: Task that reads, cuts into windows and scores.
        config: columns, lengths, classes.
        data: Source of each split.
        finetune: settings that choose among the workspace's own training items; None of an added
            data set, which is taken whole.
        root: Folder of the workspace.
    """

    name: str | None
    task: Task
    config: TaskConfig
    data: Mapping[str, DataConfig]
    finetune: FinetuneConfig | None
    root: Path
    _items: dict[str, list[Any]] = field(default_factory=dict, compare=False, repr=False)
    # by split, as long as the data set lives: 67 MB for the 130k questions of SQuAD's train

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.data)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty of spans and scores."""
        return self.config.classes

    def check(self, splits: Iterable[str]) -> None:
        """Refuse splits that there are not.

        Raises:
            UnknownNameError: there is no such split.
        """
        for split in splits:
            check_split(split, self.data, self.name)

    def items(self, split: str) -> list[Any]:
        """The items of a split, read from their source the first time.

        Raises:
            UnknownNameError: there is no such split.
            WorkspaceError: the source is gone or not what it was.
        """
        self.check([split])
        if split not in self._items:
            self._items[split] = self._read(split)
        return self._items[split]

    def _read(self, split: str) -> list[Any]:
        recorded = self.data[split]
        origin = split if self.finetune is None else source_split(split, self.config)
        try:
            data = self.task.read(self.source(split), origin, self.config)
        except InputError as error:
            raise WorkspaceError(f"split {split!r} cannot be read again: {error}") from error
        self.check_unchanged(split, data.sha256)
        out = {*recorded.misfits, *recorded.shared}
        items = [item for item in data.items if item.id not in out] if out else data.items
        if self.finetune is None:
            return items
        return select_items(items, split, self.config, self.finetune, self.task)

    def check_unchanged(self, split: str, sha256: str) -> None:
        """Refuse data that are no longer those that were first read.

        Args:
            split: Name of the split.
            sha256: Digest of its files as they are now.

        Raises:
            WorkspaceError: the files changed.
        """
        recorded = self.data[split]
        if sha256 != recorded.sha256:
            raise WorkspaceError(
                f"{recorded.source} changed since it was first read for this workspace (sha256 "
                f"{sha256[:12]}…, recorded {recorded.sha256[:12]}…): put the old file back, "
                "or start another --workspace"
            )

    def source(self, split: str) -> str:
        """Where a split comes from: a path, or a name on the hub.

        A file that lay in the workspace was moved or copied with it: it is known by its digest.
        """
        recorded = self.data[split]
        path = Path(recorded.source)
        if path.is_absolute() and not path.is_relative_to(self.root):
            inside = (self.root.joinpath(*path.parts[i:]) for i in range(1, len(path.parts)))
            for place in filter(Path.is_file, inside):
                if sha256_of_files([place]) == recorded.sha256:
                    return str(place)
        return recorded.source

    def windows(self, split: str, tokenizer: Any, poolings: Iterable[TokenPooling] = ()) -> Windows:
        """The windows of a split's items, made anew at each call.

        They are not kept as the items are: they are the tokenizer's as well, and those of SQuAD's
        train would be 280 MB more, beside a model that is trained on them once.

        Args:
            split: Name of the split.
            tokenizer: Tokenizer of the encoder.
            poolings: Poolings, of which ``at:FIELD`` need to know their tokens.

        Raises:
            InputError: a column is missing, or does not point to a token.
            WorkspaceError: the source is gone or not what it was.
        """
        items = self.items(split)
        windows = self.task.windows(items, tokenizer, self.config)
        columns = {pooling: column_of(pooling) for pooling in poolings}
        places = {
            pooling: pointed_tokens(
                windows, items, self.column(split, column, positions=True), column
            )
            for pooling, column in columns.items()
            if column is not None
        }
        return replace(windows, places=places) if places else windows

    def column(self, split: str, name: str, *, positions: bool = False) -> list[Any]:
        """Values of another column of a split's file, in the order of its items.

        Args:
            split: Name of the split.
            name: Name of the column.
            positions: As in `LabelledTask.column`.

        Raises:
            InputError: the task's data have no columns but their own, or the file has no such one.
            WorkspaceError: the source is not what it was.
        """
        if not isinstance(self.task, LabelledTask):
            raise InputError(
                f"column {name!r}: data of {self.task.name} have no columns of your own: give a "
                "file with one, and --task csv (`bertvision probe csv`)"
            )
        origin = split if self.finetune is None else source_split(split, self.config)
        values, digest = self.task.column(
            self.source(split), origin, self.config, name, positions=positions
        )
        self.check_unchanged(split, digest)
        if lacking := next((x.id for x in self.items(split) if x.id not in values), None):
            raise InputError(f"column {name!r}: {lacking} of {split} has no value that can be read")
        return [values[item.id] for item in self.items(split)]

    def keep(self) -> bool:
        """Write down where an added data set comes from, if that is not known yet.

        Returns:
            Whether it was not.
        """
        if self.name is None or (path := record_path(self.root, self.name)).is_file():
            return False
        examples = {split: list(map(self.task.example, self.items(split))) for split in self.data}
        report_doubts(self.name, examples)
        if {"train", "dev"} <= set(self.data):
            report_shared(self.task.texts, self.items("train"), self.items("dev"))
        write_record(path, DatasetRecord(task=self.config, data=dict(self.data)))
        return True


def other_task(root: Path, own: TaskConfig, split: str) -> TaskConfig | None:
    """Settings of the added data set that a split is of, if it is of the workspace's kind of task.

    Args:
        root: Folder of the workspace.
        own: Settings of the workspace's own data.
        split: ``SPLIT`` of the workspace's own data, or ``NAME-SPLIT`` of an added data set.

    Raises:
        UnknownNameError: there is no such data set.
    """
    name = StoredName.parse(split).dataset
    if name is None:
        return None
    other = read_dataset_record(root, name).task
    return other if find_task(other.name).kind == find_task(own.name).kind else None


def class_order(own: TaskConfig, other: TaskConfig | None, split: str) -> list[int] | None:
    """The index that each class of another data set has in a workspace; None where they are one.

    Classes are the same where their names are, or where these differ in case alone and no other
    class is called so.

    Args:
        own: Settings of the workspace's own data.
        other: Settings of the other data set; None of the workspace's own.
        split: Name of the split, for messages.

    Raises:
        InputError: the data set has classes that the workspace does not have, or scores in the
            place of classes.
    """
    if other is None or other.classes == own.classes:
        return None
    if find_task(other.name).kind != "classification":
        return None
    folded = [name.casefold() for name in own.classes]
    order = [
        own.classes.index(name)
        if name in own.classes
        else folded.index(name.casefold())
        if folded.count(name.casefold()) == 1
        else -1
        for name in other.classes
    ]
    if not own.classes or not other.classes or -1 in order or len(set(order)) < len(order):
        here, there = (
            f"the classes {', '.join(classes)}" if classes else "scores"
            for classes in (own.classes, other.classes)
        )
        raise InputError(
            f"{split} has {there}, and heads of this workspace tell {here}: score them on data "
            "with labels among these"
        )
    return order


def items_to_score(data: Dataset, own: Dataset, split: str) -> list[Any]:
    """The items of a split of a data set, labelled by the indices of the workspace's classes.

    Args:
        data: Data set of the split.
        own: The workspace's own data.
        split: As in `other_task`.

    Raises:
        UnknownNameError: There is no such split.
        InputError: The data set is of another kind of task, or has other classes.
        WorkspaceError: The source is gone or not what it was.
    """
    items = data.items(StoredName.parse(split).split)
    if data.name is None:
        return items
    if (other := other_task(own.root, own.config, split)) is None:
        raise InputError(
            f"{split} is of the task {data.task.name}, and systems of this workspace do "
            f"{own.task.name}: name a split of {own.task.name}"
        )
    order = class_order(own.config, other, split)
    if order is None:
        return items
    return [x._replace(label=None if x.label is None else order[x.label]) for x in items]


def own_dataset(root: Path, config: WorkspaceConfig) -> Dataset:
    """The data that the encoder of the workspace at ``root`` is fine-tuned on."""
    task = load_task(config.task.name)
    return Dataset(None, task, config.task, config.data, config.finetune, root)


def read_dataset(root: Path, name: str) -> Dataset:
    """An added data set of the workspace at ``root``.

    Raises:
        UnknownNameError: it was not added.
        WorkspaceError: its record is damaged.
    """
    record = read_dataset_record(root, name)
    return Dataset(name, load_task(record.task.name), record.task, record.data, None, root)


def add_dataset(root: Path, task: str, source: str, **settings: Any) -> Dataset:
    """Add a data set to the workspace at ``root``, or find it as it was added before.

    Args:
        root: As in `planned_dataset`, likewise ``task``, ``source`` and ``settings``.
        task: name of its task.
        source: Its place.
        **settings: fields of `TaskConfig`.

    Raises:
        InputError: as of `planned_dataset`, likewise WorkspaceError.
    """
    added = planned_dataset(root, task, source, **settings)
    added.keep()
    return added


def planned_dataset(
    root: Path,
    task: str,
    source: str,
    own: str | None = None,
    *,
    tokenizer: Callable[[], Any] | None = None,
    **settings: Any,
) -> Dataset:
    """A data set as it would be added, or as it was added before; nothing is written.

    Args:
        root: Root of the workspace.
        task: name of its task, which also names the data set, or the file does (`dataset_name`).
        source: path of a file or folder, or a name on the hub.
        own: As in `dataset_name`.
        tokenizer: loads that of the encoder, by which items that no window holds are found in a
            data set that is new; None does not look for them.
        **settings: fields of `TaskConfig`: columns, ``max_length``, ``windows``, ``date``; without
            the latter three they are as the data set was added, or else the task's own.

    Raises:
        InputError: the data cannot be read, there is no such task, or items fit no window and are
            not to be skipped.
        WorkspaceError: a data set of this name was added from something else; names the field.
    """
    entry, kind = find_task(name_task(task)), load_task(task)
    local = Path(source).expanduser()
    source = str(local.resolve()) if local.exists() else source
    name = dataset_name(task, source, own)
    there = record_path(root, name).is_file()
    given: dict[str, Any] = {"max_length": entry.max_length, "name": task}
    if there:
        known = read_dataset(root, name).config
        given |= {"max_length": known.max_length, "windows": known.windows, "date": known.date}
    given |= {field: value for field, value in settings.items() if value is not None}
    config = validated(TaskConfig, given)
    config = with_columns(kind, config)
    if tokenizer is not None and not there and type(kind).settled is not Task.settled:
        config = kind.settled(config, tokenizer())
    splits = kind.splits(source)
    read: dict[str, TaskData] = {}
    for split in splits:
        read[split] = read_data = kind.read(source, split, config)
        report_skipped(split, read_data.skipped)
        if not config.classes and read_data.classes:
            config = config.model_copy(update={"classes": read_data.classes})
    if tokenizer is not None and not there and type(kind).misfits is not Task.misfits:
        read = fitting(read, kind, tokenizer(), config)
    items = {split: read_data.items for split, read_data in read.items()}
    data = {
        split: DataConfig(source=source, sha256=x.sha256, questions=len(x.items), misfits=x.misfits)
        for split, x in read.items()
    }
    added = Dataset(name, kind, config, data, None, root, items)
    if not there:
        return added
    record = read_dataset(root, name)
    if difference := first_difference(_told(record), _told(added)):
        setting, before, here = difference
        raise WorkspaceError(
            f"data set {name} of {root} was added with {setting} = {before!r}, now it is "
            f"{here!r}: leave the option out, use another --workspace, or delete "
            f"{record_path(root, name)} and what was made from it"
        )
    return record


def is_own(own: Dataset, source: str) -> bool:
    """Whether the workspace's own data were read from a source, or from a copy of it.

    Raises:
        InputError: it cannot be read.
    """
    local = Path(source).expanduser()
    source = str(local.resolve()) if local.exists() else source
    offered = own.task.splits(source)
    digests = {source_split(split, own.config): x.sha256 for split, x in own.data.items()}
    shared = [split for split in digests if split in offered]
    return bool(shared) and all(
        own.task.read(source, split, own.config).sha256 == digests[split] for split in shared
    )


def _told(dataset: Dataset) -> dict[str, object]:
    """Fields that decide a data set, causes first."""
    by_split = {f"sha256 of {split}": x.sha256 for split, x in dataset.data.items()}
    source = next((x.source for x in dataset.data.values()), None)
    config = dataset.config.model_dump(exclude={"classes"})
    classes = f"{len(dataset.classes)}: {', '.join(dataset.classes[:5])}"
    return {"data": source, **config, **by_split, "classes": classes}
