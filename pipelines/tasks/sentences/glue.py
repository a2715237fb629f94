"""GLUE: nine tasks on sentences and pairs, from the folders it ships or from the hub.

Wang et al. 2019 (arXiv:1804.07461). A folder holds ``train.tsv`` and ``dev.tsv`` (also with
``.gz``) under its own name or under the task's, ``RTE/train.tsv``. The tables have no quoting: a
quotation mark is text, of which MRPC has many that never close. The test files of GLUE have no
labels and are not read. A single file is the one split that its name says, whatever else it is
asked for as: one given for train alone, or for dev.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.rows import RawSentence, SentenceRows, require_fields
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.soundness import containing
from bertvision.pipelines.tasks.source import (
    Line,
    find_file,
    load_hub,
    on_hub,
    read_text,
    splits_in,
    text_lines,
)

SPLITS = ("train", "dev")
_ENTAILMENT = ("entailment", "not_entailment")


class GlueSpec(NamedTuple):
    """How one task of GLUE is written."""

    folder: str
    """Its folder in GLUE's archive."""
    texts: tuple[str, ...]
    """Column of the sentence, or columns of the pair."""
    label: str
    """Column of the label."""
    hub_texts: tuple[str, ...]
    """The same columns on the hub, where the label's is ``label``."""
    classes: tuple[str, ...]
    """As the hub names them, in its order; a file may also write their numbers. Empty: scores."""
    positive: int | None = None
    """The class that F1 is of."""
    phrases: bool = False
    """Whether train holds sentences together with their phrases."""
    header: tuple[str, ...] = ()
    """Columns of a file without a header line."""
    dev: str = "dev"
    """Name of the file of dev."""
    hub_dev: str = "validation"
    """Name of dev on the hub."""


_PAIR = ("sentence1", "sentence2")
GLUE: dict[str, GlueSpec] = {
    "cola": GlueSpec(
        *("CoLA", ("sentence",), "label", ("sentence",), ("unacceptable", "acceptable")),
        header=("source", "label", "judgement", "sentence"),
    ),
    "sst2": GlueSpec(
        *("SST-2", ("sentence",), "label", ("sentence",), ("negative", "positive")), phrases=True
    ),
    "mrpc": GlueSpec(
        *("MRPC", ("#1 String", "#2 String"), "Quality", _PAIR, ("not_equivalent", "equivalent")),
        positive=1,
    ),
    "qqp": GlueSpec(
        *("QQP", ("question1", "question2"), "is_duplicate", ("question1", "question2")),
        ("not_duplicate", "duplicate"),
        positive=1,
    ),
    "stsb": GlueSpec("STS-B", _PAIR, "score", _PAIR, ()),
    "mnli": GlueSpec(
        *("MNLI", _PAIR, "gold_label", ("premise", "hypothesis")),
        ("entailment", "neutral", "contradiction"),
        dev="dev_matched",
        hub_dev="validation_matched",
    ),
    "qnli": GlueSpec(
        "QNLI", ("question", "sentence"), "label", ("question", "sentence"), _ENTAILMENT
    ),
    "rte": GlueSpec("RTE", _PAIR, "label", _PAIR, _ENTAILMENT),
    "wnli": GlueSpec("WNLI", _PAIR, "label", _PAIR, ("not_entailment", "entailment")),
}
"""The tasks by name; of MNLI, dev is the matched one."""


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
        if on_hub(source):
            return SPLITS
        return splits_in(source, {split: self._names(split) for split in SPLITS}, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a table of GLUE, as any split; or of a folder or a data set of the hub the split's.

        Raises:
            InputError: it is missing or malformed, or the split is none that has labels.
        """
        if split not in SPLITS and not Path(source).is_file():
            raise InputError(
                f"{self.name} has no labelled split {split!r}: GLUE publishes the labels of "
                f"{' and '.join(SPLITS)}"
            )
        if on_hub(source):
            hub_split = self.spec.hub_dev if split == "dev" else split
            rows, digest = self._hub(source, hub_split, config.skip_bad), None
        else:
            path = find_file(source, self._names(split), self.name)
            rows, digest = self._table(path, config.skip_bad)
        if not self.spec.classes:
            return rows.scored(digest)
        numbers = {str(i): i for i in range(len(self.spec.classes))}
        return rows.classified(self.spec.classes, digest, numbers)

    def inputs(self, config: TaskConfig) -> tuple[str, ...]:
        """Columns of the sentence or the pair, as GLUE's own files name them."""
        return self.spec.texts

    def grouping(self, items: Sequence[Sentence]) -> Callable[[Sentence], str]:
        """As of every task of sentences; of phrases the sentence that they are a part of."""
        if not self.spec.phrases:
            return super().grouping(items)
        names = containing(item.text for item in items)
        return lambda item: names[item.text]

    def _names(self, split: str) -> list[str]:
        names = [f"{self.spec.dev if split == 'dev' else split}.tsv"]
        if split == "dev" and self.spec.dev != "dev":
            names.append("dev.tsv")
        return [*names, *(f"{self.spec.folder}/{name}" for name in names)]

    def _table(self, path: Path, skip_bad: bool) -> tuple[SentenceRows, str]:
        text, digest = read_text(path)
        rows = text_lines(text)
        header = list(self.spec.header) or next(rows).text.split("\t")
        if missing := [c for c in (*self.spec.texts, self.spec.label) if c not in header]:
            raise InputError(
                f"{path}, line 1: has the columns {header}, but not {missing}, which {self.name} "
                "needs: give the tsv files as GLUE ships them"
            )
        at = [header.index(column) for column in (*self.spec.texts, self.spec.label)]

        def parse(line: Line) -> RawSentence:
            fields = require_fields(line.text.split("\t"), header)
            *texts, label = (fields[i] for i in at)
            return RawSentence(str(line.number), texts[0], texts[1] if texts[1:] else None, label)

        reader = SentenceRows(str(path), skip_bad=skip_bad)
        return reader.add_lines(rows, parse), digest

    def _hub(self, source: str, split: str, skip_bad: bool) -> SentenceRows:
        columns = (*self.spec.hub_texts, "label")
        data = load_hub(source, split, columns)
        names = getattr(data.features["label"], "names", None)
        if names and sorted(names) != sorted(self.spec.classes):
            raise InputError(
                f"{source} ({split}): has the classes {names}, but {self.name} has "
                f"{list(self.spec.classes)}: give the data set of this task"
            )

        def rows() -> Iterator[tuple[str, tuple[int, dict[str, object]]]]:
            for i, row in enumerate(data.select_columns(list(columns))):
                yield f"row {i}", (i, row)

        def parse(numbered: tuple[int, dict[str, object]]) -> RawSentence:
            i, row = numbered
            label = row["label"]
            if names and isinstance(label, int) and label >= 0:
                label = names[label]
            texts = [row[column] for column in self.spec.hub_texts]
            if not all(isinstance(text, str) for text in texts):
                raise InputError(f"{' and '.join(self.spec.hub_texts)} must be strings: {texts}")
            pair = str(texts[1]) if texts[1:] else None
            # The hub writes −1 for labels that are not published
            text_label = None if label is None or label == -1 else str(label)
            return RawSentence(str(i), str(texts[0]), pair, text_label)

        return SentenceRows(f"{source} ({split})", skip_bad=skip_bad).add(rows(), parse)
