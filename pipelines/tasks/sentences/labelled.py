"""A user's own labelled sentences: ``--task csv [--text COLUMN --label COLUMN --pair COLUMN]``.

A source is a file, or a folder with ``train``, ``dev`` and perhaps ``test`` in one of the forms:

- ``.csv``: RFC 4180, with a header line; a field may be quoted, and then hold line breaks;
- ``.tsv``: a header line, fields between tabs as they stand; a quotation mark is text;
- ``.jsonl``: an object a line.

Each may also end with ``.gz``. A column ``id`` names the rows; those without one are named by
their lines, ``line 2``. The columns are ``text`` and ``label``, unless named otherwise.

**Classes or scores.** The labels of training are scores, to be told by regression, where every one
of them is a number and at least one of these is not whole (2.5). All others are names of classes,
whole numbers such as 0 and 1.0 too. Classes are those of the training data, in order: as numbers
where all are integers, else by their characters. A label that training has not is refused; where
training has scores, so is one that is no number.
"""

from __future__ import annotations

from pathlib import Path

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.rows import (
    FORMS,
    Columns,
    SentenceRows,
    read_columns,
    sorted_classes,
)
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.source import find_file, splits_in
from bertvision.pipelines.tasks.task import Task

SPLITS = ("train", "dev", "test")


class LabelledTask(SentenceTask):
    """Sentences of a file with named columns."""

    columns = ("text", "pair", "label")

    def splits(self, source: str) -> tuple[str, ...]:
        """The members of `SPLITS` that a folder holds; ``all`` of a file.

        Raises:
            InputError: it is neither, or the folder holds none.
        """
        if Path(source).is_file():
            return ("all",)
        return splits_in(source, {split: _names(split) for split in SPLITS}, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a file, or the file of a split in a folder.

        The classes are those of ``config``. Where it names none, what is learned from (``train``,
        ``all``) says itself whether it has classes; of another split the folder's ``train`` does,
        and a file alone has scores: had its training data classes, ``config`` would name them.

        Raises:
            InputError: the file is missing or malformed, lacks a column, or has labels that
                training has not.
        """
        rows, digest = self._rows(source, split, config)
        classes = config.classes
        if not classes and split in ("train", "all"):
            classes = classes_of(rows)
        elif not classes and Path(source).is_dir():
            classes = classes_of(self._rows(source, "train", config)[0])
        return rows.classified(classes, digest) if classes else rows.scored(digest)

    def inputs(self, config: TaskConfig) -> tuple[str, ...]:
        """Columns of the text and, of pairs, of the second text."""
        return tuple(_columns(config).named[:-1])

    def _rows(self, source: str, split: str, config: TaskConfig) -> tuple[SentenceRows, str]:
        path = find_file(source, _names(split), self.name)
        return read_columns(path, _columns(config), skip_bad=config.skip_bad)


def with_columns(task: Task, config: TaskConfig) -> TaskConfig:
    """The settings of a task with the columns that are read, ``text`` and ``label`` by default.

    Raises:
        InputError: a column is named, or how windows are made, of a task that does not ask for it.
    """
    named = [name for name in ("text", "pair", "label") if getattr(config, name) is not None]
    if others := [name for name in named if name not in task.columns]:
        raise InputError(
            f"--{others[0]} {getattr(config, others[0])}: names a column of a file of your own, "
            f"--task csv; the columns of {task.name} are known: leave it out"
        )
    if config.windows != "cut" and "windows" not in task.settings:
        raise InputError(
            f"--windows {config.windows}: is for documents, --task text; the windows of "
            f"{task.name} are made in one way: leave it out"
        )
    if config.date is not None and task.name != "chat":
        raise InputError(
            f"--date {config.date}: is told to a chat template, --task chat; {task.name} has none: "
            "leave it out"
        )
    columns = {name: name for name in ("text", "label") if name in task.columns}
    return config.model_copy(update=columns | {name: getattr(config, name) for name in named})


def classes_of(rows: SentenceRows) -> tuple[str, ...]:
    """The classes that training data has, in order; () where its labels are scores.

    Raises:
        InputError: there is one class alone, or no label at all.
    """
    labels = rows.labels
    if all(_is_number(x) for x in labels) and any(float(x) % 1 > 0 for x in labels):
        return ()
    if len(labels) < 2:
        only = f"all rows have the label {min(labels)!r}" if labels else "no row has a label"
        raise InputError(
            f"{rows.source}: {only}, so that nothing can be learned from it: give data with at "
            "least two classes, and with --label the column that tells them apart"
        )
    return sorted_classes(labels)


def _columns(config: TaskConfig) -> Columns:
    return Columns(config.text or "text", config.pair, config.label or "label")


def _names(split: str) -> list[str]:
    return [f"{split}{form}" for form in FORMS]


def _is_number(label: str) -> bool:
    """Whether a label is a number, NaN and infinity included, which no score may be."""
    try:
        float(label)
    except ValueError:
        return False
    return True
