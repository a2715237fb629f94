"""SentEval: ten probing tasks, and five downstream sets.

Conneau & Kiela 2018 (arXiv:1803.05449) and Conneau et al. 2018 (arXiv:1805.01070). A probing file
holds all of its task, ``split TAB label TAB sentence`` with the splits tr, va and te; a downstream
file one ``label sentence`` a line. The source is the file, or a folder that holds it under its
name; both may end with ``.gz``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.rows import (
    RawSentence,
    SentenceRows,
    require_fields,
    sorted_classes,
)
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.source import Line, find_file, read_text, splits_in, text_lines

PARTS = {"train": "tr", "dev": "va", "test": "te"}
"""Splits of a probing task, as its file writes them."""

_FIELDS = ("split", "label", "sentence")

PROBING = (
    "sentence_length",
    "word_content",
    "tree_depth",
    "top_constituents",
    "bigram_shift",
    "past_present",
    "subj_number",
    "obj_number",
    "odd_man_out",
    "coordination_inversion",
)
"""The probing tasks, from surface over syntax to semantics, in the order of their paper."""


class ProbingTask(SentenceTask):
    """A probing task: what a sentence is like, told from its embedding.

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
        path = find_file(source, [f"{self.name}.txt"], self.name)
        text, digest = read_text(path)
        labels = set()

        def parse(line: Line) -> RawSentence | None:
            part, label, sentence = require_fields(line.text.split("\t"), _FIELDS)
            if part not in PARTS.values():
                raise InputError(f"the split {part!r} is none of {', '.join(PARTS.values())}")
            if label := label.strip():
                labels.add(label)
            of_split = part == PARTS[split]
            return RawSentence(str(line.number), sentence, None, label) if of_split else None

        rows = SentenceRows(str(path), skip_bad=config.skip_bad)
        rows.add_lines(text_lines(text), parse)
        return rows.classified(sorted_classes(labels), digest)


class DownstreamSpec(NamedTuple):
    """How a downstream set is written."""

    files: dict[str, str]
    """By split."""
    classes: tuple[str, ...]
    """Labels, as the files write them."""


_BINARY = ("0", "1")
DOWNSTREAM: dict[str, DownstreamSpec] = {
    "mr": DownstreamSpec({"all": "rt-polarity.all"}, _BINARY),
    "cr": DownstreamSpec({"all": "custrev.all"}, _BINARY),
    "subj": DownstreamSpec({"all": "subj.all"}, _BINARY),
    "mpqa": DownstreamSpec({"all": "mpqa.all"}, _BINARY),
    "trec": DownstreamSpec(
        {"train": "TREC.train.all", "test": "TREC.test.all"}, tuple(map(str, range(6)))
    ),
}
"""The downstream sets by name. The split ``all`` has no parts: it is cross-validated."""


class DownstreamTask(SentenceTask):
    """A downstream set of `DOWNSTREAM`.

    Some of the files are not UTF-8 but Latin-1. A few sentences of CR and MPQA are empty; they are
    kept, as the published counts keep them, and are windows of special tokens alone.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.spec = DOWNSTREAM[name]

    def splits(self, source: str) -> tuple[str, ...]:
        """``all``; of TREC those of train and test that a folder holds, or the one a file is.

        Raises:
            InputError: there is no such file or folder, or it holds none.
        """
        path = Path(source)
        if path.is_file():
            names = {split: {name, f"{name}.gz"} for split, name in self.spec.files.items()}
            return next(((split,) for split in names if path.name in names[split]), ("all",))
        return splits_in(source, {split: [x] for split, x in self.spec.files.items()}, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a split of the set; a single file as any.

        Raises:
            InputError: its file is missing or malformed, or there is no such split.
        """
        if split not in self.spec.files and not Path(source).is_file():
            splits = ", ".join(self.spec.files)
            how = (
                f"`bertvision probe {self.name}` cross-validates it, and fine-tuning takes two "
                "files of your own parting, --train FILE --dev FILE"
                if "all" in self.spec.files
                else f"use `bertvision probe {self.name}`, or give the files with --train and --dev"
            )
            raise InputError(f"{self.name} has no split {split!r}, but {splits}: {how}")
        path = find_file(source, [self.spec.files.get(split, split)], self.name)
        text, digest = read_text(path, fallback="latin-1")

        def parse(line: Line) -> RawSentence:
            label, _, sentence = line.text.partition(" ")
            return RawSentence(str(line.number), sentence, None, label)

        rows = SentenceRows(str(path), skip_bad=config.skip_bad, empty=True)
        rows.add_lines(text_lines(text), parse)
        return rows.classified(self.spec.classes, digest)
