"""Labelled sentences: a user's own files, GLUE, and the sets of SentEval.

How a data set is written is a row of `GLUE` or `DOWNSTREAM`; the rest is `SentenceTask`. A source
is a file, or a folder that holds the files under their names, each perhaps with ``.gz``; GLUE is
read from the hub too.

**GLUE** (Wang et al. 2019, arXiv:1804.07461). A folder holds ``train.tsv`` and ``dev.tsv`` under
its own name or under the task's, ``RTE/train.tsv``. The tables have no quoting: a quotation mark is
text, of which MRPC has many that never close. The test files of GLUE have no labels and are not
read. A single file is the one split that its name says, whatever else it is asked for as: one given
for train alone, or for dev.

**SentEval** (Conneau & Kiela 2018, arXiv:1803.05449, and Conneau et al. 2018, arXiv:1805.01070).
A probing file holds all of its task, ``split TAB label TAB sentence`` with the splits tr, va and
te; a downstream file one ``label sentence`` a line.

**A user's own**, ``--task csv [--text COLUMN --label COLUMN --pair COLUMN]``, in one of the forms:

- ``.csv``: RFC 4180, with a header line; a field may be quoted, and then hold line breaks;
- ``.tsv``: a header line, fields between tabs as they stand; a quotation mark is text;
- ``.jsonl``: an object a line.

A column ``id`` names the rows; those without one are named by their lines, ``line 2``. The columns
are ``text`` and ``label``, unless named otherwise. The labels of training are scores, to be told by
regression, where every one of them is a number and at least one of these is not whole (2.5). All
others are names of classes, whole numbers such as 0 and 1.0 too. Classes are those of the training
data, in order: as numbers where all are integers, else by their characters. A label that training
has not is refused; where training has scores, so is one that is no number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.rows import (
    FORMS,
    Columns,
    RawSentence,
    SentenceRows,
    sentence_rows,
    sorted_classes,
)
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.soundness import containing
from bertvision.pipelines.tasks.source import find_file, on_hub, split_files, splits_in
from bertvision.pipelines.tasks.tables import Column, Layout, hub_table, read_table
from bertvision.pipelines.tasks.task import Task


class GlueSet(NamedTuple):
    """How a task of GLUE is written."""

    folder: str
    """Its folder in GLUE's archive."""
    text: tuple[str, ...]
    """Names of the column of the sentence, in the files and on the hub."""
    label: str
    """Column of the label in the files; on the hub it is ``label``."""
    classes: tuple[str, ...]
    """As the hub names them, in its order; a file may also write their numbers. Empty: scores."""
    pair: tuple[str, ...] = ()
    """Names of the column of the second sentence, of a pair."""
    header: tuple[str, ...] = ()
    """Columns of a file without a header line."""
    dev: str = "dev"
    """Name of the file of dev; on the hub it begins with ``validation``."""
    positive: int | None = None
    """The class that F1 is of."""
    phrases: bool = False
    """Whether train holds sentences together with their phrases."""

    @property
    def layout(self) -> Layout:
        """Its columns."""
        columns = {"text": Column(self.text), "label": Column((self.label, "label"), "label")}
        if self.pair:
            columns["pair"] = Column(self.pair)
        hint = "give the tsv files as GLUE ships them, or the data set of this task"
        return Layout(columns, self.header, separator="\t", hint=hint)

    @property
    def files(self) -> dict[str, list[str]]:
        """Names of the files by split, in order of preference."""
        names = {"train": ["train.tsv"], "dev": [*dict.fromkeys((f"{self.dev}.tsv", "dev.tsv"))]}
        return {
            split: [*of_split, *(f"{self.folder}/{name}" for name in of_split)]
            for split, of_split in names.items()
        }


_ENTAILED = ("entailment", "not_entailment")
GLUE: dict[str, GlueSet] = {
    "cola": GlueSet(
        "CoLA",
        ("sentence",),
        "label",
        ("unacceptable", "acceptable"),
        header=("source", "label", "judgement", "sentence"),
    ),
    "sst2": GlueSet("SST-2", ("sentence",), "label", ("negative", "positive"), phrases=True),
    "mrpc": GlueSet(
        "MRPC",
        ("#1 String", "sentence1"),
        "Quality",
        ("not_equivalent", "equivalent"),
        pair=("#2 String", "sentence2"),
        positive=1,
    ),
    "qqp": GlueSet(
        "QQP",
        ("question1",),
        "is_duplicate",
        ("not_duplicate", "duplicate"),
        pair=("question2",),
        positive=1,
    ),
    "stsb": GlueSet("STS-B", ("sentence1",), "score", (), pair=("sentence2",)),
    "mnli": GlueSet(
        "MNLI",
        ("sentence1", "premise"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        pair=("sentence2", "hypothesis"),
        dev="dev_matched",
    ),
    "qnli": GlueSet("QNLI", ("question",), "label", _ENTAILED, pair=("sentence",)),
    "rte": GlueSet("RTE", ("sentence1",), "label", _ENTAILED, pair=("sentence2",)),
    "wnli": GlueSet("WNLI", ("sentence1",), "label", _ENTAILED[::-1], pair=("sentence2",)),
}
"""The tasks of GLUE by name; of MNLI, dev is the matched one."""

PARTS = {"train": "tr", "dev": "va", "test": "te"}
"""Splits of a probing task, as its file writes them."""
_PROBING = Layout(
    {
        "part": Column(("split",), among=tuple(PARTS.values())),
        "label": Column(("label",), "label"),
        "text": Column(("sentence",)),
    },
    header=("split", "label", "sentence"),
    separator="\t",
)
_DOWNSTREAM = Layout(
    {"label": Column(("label",), "label"), "text": Column(("sentence",))},
    header=("label", "sentence"),
    separator=" ",
)


class DownstreamSet(NamedTuple):
    """How a downstream set is written."""

    files: dict[str, str]
    """By split; the split ``all`` has no parts: it is cross-validated."""
    classes: tuple[str, ...] = ("0", "1")
    """Labels, as the files write them."""


DOWNSTREAM: dict[str, DownstreamSet] = {
    "mr": DownstreamSet({"all": "rt-polarity.all"}),
    "cr": DownstreamSet({"all": "custrev.all"}),
    "subj": DownstreamSet({"all": "subj.all"}),
    "mpqa": DownstreamSet({"all": "mpqa.all"}),
    "trec": DownstreamSet(
        {"train": "TREC.train.all", "test": "TREC.test.all"}, ("0", "1", "2", "3", "4", "5")
    ),
}
"""The downstream sets by name."""


class GlueTask(SentenceTask):
    """A task of the table `GLUE`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.spec = GLUE[name]
        self.positive = self.spec.positive

    def splits(self, source: str) -> tuple[str, ...]:
        """Train and dev; those of them that a folder holds, or the one that a file is named for.

        Raises:
            InputError: the folder holds neither.
        """
        files = self.spec.files
        return tuple(files) if on_hub(source) else splits_in(source, files, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a table of GLUE, as any split; or of a folder or a data set of the hub the split's.

        Raises:
            InputError: it is missing or malformed, or the split is none that has labels.
        """
        spec = self.spec
        if split not in spec.files and not Path(source).is_file():
            raise InputError(
                f"{self.name} has no labelled split {split!r}: GLUE publishes the labels of "
                f"{' and '.join(spec.files)}"
            )
        if on_hub(source):
            named = spec.dev.replace("dev", "validation") if split == "dev" else split
            table = hub_table(source, named, spec.layout, classes=spec.classes)
        else:
            path = find_file(source, spec.files.get(split, ()), self.name)
            table = read_table(path, spec.layout)
        rows = sentence_rows(table, numbered=True, skip_bad=config.skip_bad)
        if not spec.classes:
            return rows.scored(table.sha256)
        numbers = {str(i): i for i in range(len(spec.classes))}
        return rows.classified(spec.classes, table.sha256, numbers)

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """Columns of the sentence or the pair, as the files of GLUE and the hub name them."""
        columns = self.spec.layout.columns
        return {name: columns[name] for name in ("text", "pair") if name in columns}

    def grouping(self, items: Sequence[Sentence]) -> Callable[[Sentence], str]:
        """As of every task of sentences; of phrases the sentence that they are a part of."""
        if not self.spec.phrases:
            return super().grouping(items)
        names = containing(item.text for item in items)
        return lambda item: names[item.text]


class ProbingTask(SentenceTask):
    """A probing task of SentEval: what a sentence is like, told from its embedding.

    The classes are the labels of the whole file. A label that only dev or test have can never be
    told and counts as wrong; SentEval's own reader stops there.
    """

    def splits(self, source: str) -> tuple[str, ...]:
        """Train, dev and test."""
        return tuple(PARTS)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a split of the task's file.

        Raises:
            InputError: the file is missing or malformed, or has no such split.
        """
        if split not in PARTS:
            raise InputError(f"{self.name} has no split {split!r}: {', '.join(PARTS)}")
        table = read_table(find_file(source, [f"{self.name}.txt"], self.name), _PROBING)
        labels = set()

        def of_split(raw: RawSentence) -> RawSentence | None:
            labels.add((raw.label or "").strip())
            return raw if raw.extra["part"] == PARTS[split] else None

        rows = sentence_rows(table, numbered=True, skip_bad=config.skip_bad, check=of_split)
        return rows.classified(sorted_classes(labels - {""}), table.sha256)


class DownstreamTask(SentenceTask):
    """A downstream set of SentEval, of `DOWNSTREAM`.

    Some of the files are not UTF-8 but Latin-1. A few sentences of CR and MPQA are empty; they are
    kept, as the published counts keep them, and are windows of special tokens alone.
    """

    def splits(self, source: str) -> tuple[str, ...]:
        """``all``; of TREC those of train and test that a folder holds, or the one a file is.

        Raises:
            InputError: there is no such file or folder, or it holds none.
        """
        files = DOWNSTREAM[self.name].files
        if (path := Path(source)).is_file():
            name = path.name.removesuffix(".gz")
            return next(((split,) for split, file in files.items() if name == file), ("all",))
        return splits_in(source, {split: [file] for split, file in files.items()}, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a split of the set; a single file as any.

        Raises:
            InputError: its file is missing or malformed, or there is no such split.
        """
        spec = DOWNSTREAM[self.name]
        if split not in spec.files and not Path(source).is_file():
            how = (
                f"`bertvision probe {self.name}` cross-validates it, and fine-tuning takes two "
                "files of your own parting, --train FILE --dev FILE"
                if "all" in spec.files
                else f"use `bertvision probe {self.name}`, or give the files with --train and --dev"
            )
            splits = ", ".join(spec.files)
            raise InputError(f"{self.name} has no split {split!r}, but {splits}: {how}")
        path = find_file(source, [spec.files.get(split, split)], self.name)
        table = read_table(path, _DOWNSTREAM, fallback="latin-1")
        rows = sentence_rows(table, numbered=True, skip_bad=config.skip_bad, empty=True)
        return rows.classified(spec.classes, table.sha256)


_OWN = split_files(FORMS)
"""Names of the files of a user's own, by split."""


class LabelledTask(SentenceTask):
    """Sentences of a user's own file with named columns."""

    columns = ("text", "pair", "label")

    def splits(self, source: str) -> tuple[str, ...]:
        """The members of train, dev and test that a folder holds; ``all`` of a file.

        Raises:
            InputError: it is neither, or the folder holds none.
        """
        return ("all",) if Path(source).is_file() else splits_in(source, _OWN, self.name)

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

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """Columns of the text and, of pairs, of the second text."""
        columns = Columns(config.text or "text", config.pair).layout.columns
        return {name: columns[name] for name in ("text", "pair") if name in columns}

    def column(
        self, source: str, split: str, config: TaskConfig, name: str, *, positions: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Values of another column of a file.

        Args:
            source: Source of the data.
            split: Split of the source.
            config: Settings of the task.
            name: Name of the column.
            positions: Whether values point to characters: numbers are positions in the text as the
                file has it, and become positions in the sentence, which has no white space before
                it; of a file without types a text of digits is one, unless it stands in the text.

        Returns:
            The value of each row by its id, and the digest of the file.

        Raises:
            InputError: the file is missing or malformed, or has no such column.
        """
        typed = ".jsonl" in find_file(source, _OWN.get(split, ()), self.name).suffixes

        def shifted(raw: RawSentence) -> RawSentence:
            raw.extra["other"] = _position(raw.extra["other"], raw.text, typed=typed)
            return raw

        rows, digest = self._rows(source, split, config, name, shifted if positions else None)
        return {ident: extra["other"] for ident, extra in rows.extras.items()}, str(digest)

    def _rows(
        self,
        source: str,
        split: str,
        config: TaskConfig,
        other: str | None = None,
        check: Callable[[RawSentence], RawSentence] | None = None,
    ) -> tuple[SentenceRows, str | None]:
        columns = Columns(config.text or "text", config.pair, config.label or "label", other)
        path = find_file(source, _OWN.get(split, ()), self.name)
        table = read_table(path, columns.layout, forms=FORMS)
        return sentence_rows(table, skip_bad=config.skip_bad, check=check), table.sha256


def _position(value: Any, text: str, *, typed: bool) -> Any:
    """A value that points into a text: a position in it, counted without white space before it.

    Args:
        value: Value of the column.
        text: Text as the file has it.
        typed: Whether the file tells numbers from texts.

    Raises:
        InputError: a number is outside of the text, or may be a part of it.
    """
    is_digits = isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value) and not typed
    if is_digits and value in text:
        raise InputError(
            f"{value!r} may be a position, or a part of {text!r:.60}: write JSON lines, where "
            f'{value} is a position and "{value}" a part'
        )
    position = int(value) if is_digits else value
    if not isinstance(position, int) or isinstance(position, bool):
        return position
    if not 0 <= position < len(text):
        raise InputError(f"{value!r}: the text has the characters 0 to {len(text) - 1}")
    return position - (len(text) - len(text.lstrip()))


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


def _is_number(label: str) -> bool:
    """Whether a label is a number, NaN and infinity included, which no score may be."""
    try:
        float(label)
    except ValueError:
        return False
    return True
