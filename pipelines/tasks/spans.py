"""Labelled spans of words, for edge probing: one span, or two and how they are related.

The form is that of Tenney et al. (2019, arXiv:1905.06316, section 3 and their release in jiant):
JSON lines with a ``text`` of words between spaces, or a list ``tokens``, and ``targets``, each with
``span1``, perhaps ``span2``, and a ``label``. A span is ``[first, end]`` in words, from 0, without
the word at ``end``. Parts of speech, constituents, entities and semantic roles come so, and pairs
such as arcs, coreference and relations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import Sentence, Target, TaskConfig, TaskData
from bertvision.pipelines.tasks.features import FeaturesTask
from bertvision.pipelines.tasks.sentences.task import sentence_windows
from bertvision.pipelines.tasks.tables import (
    FORMS,
    ID,
    Column,
    Layout,
    check_text,
    offered_splits,
    read_items,
)
from bertvision.pipelines.tasks.windows import Windows

log = logging.getLogger(__name__)
_HINT = "give a text (or a list tokens), and a list targets of objects with span1 and label"
_LAYOUTS = tuple(
    Layout(
        {words: Column((words,), "json"), "targets": Column(("targets",), "json"), "id": ID},
        hint=_HINT,
    )
    for words in ("tokens", "text")
)


class SpanSentence(NamedTuple):
    """Words, and what is labelled of them."""

    id: str
    words: tuple[str, ...]
    targets: tuple[Target, ...]

    @property
    def text(self) -> str:
        """The words with a space between them, as the encoder reads them."""
        return " ".join(self.words)

    @property
    def spans(self) -> list[list[int]]:
        """First and end of each target's spans, one after another."""
        return [[place for span in target.spans for place in span] for target in self.targets]

    @property
    def labels(self) -> list[str]:
        """Label of each target."""
        return [target.label for target in self.targets]


class SpansTask(FeaturesTask):
    """Sentences with labelled spans, which `bertvision probe` reads of each layer."""

    words = ("sentences", "sentences")
    refusal = (
        "no encoder and no head can be trained on {name}, whose labels are those of spans: use "
        "`bertvision probe {name}`"
    )
    schema: ClassVar[Mapping[str, Any]] = {
        "id": pa.string(),
        "text": pa.string(),
        "words": pa.list_(pa.string()),
        "spans": pa.list_(pa.list_(pa.int32())),
        "labels": pa.list_(pa.string()),
    }

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits of train, dev and test that there are; ``all`` of a file."""
        return offered_splits(source, self.name, FORMS)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the sentences of a split. The classes are the labels of training.

        Raises:
            InputError: it is missing or malformed, or its targets have one span and two; names
                file, line and value.
        """
        data = read_items(source, split, self.name, _sentence, *_LAYOUTS, skip_bad=config.skip_bad)
        targets = [target for item in data.items for target in item.targets]
        if len({len(target.spans) for target in targets}) > 1:
            raise InputError(
                f"{source}: some targets have a span2 and others none: give them in two files, "
                "which are two data sets"
            )
        known = config.classes or tuple(sorted({target.label for target in targets}))
        if unknown := sum(target.label not in known for target in targets):
            log.warning(
                "%s of %s in %s have labels that the training data lack: they count as wrong",
                *(f"{unknown:,}", counted(len(targets), "target"), split),
            )
        return replace(data, classes=known)

    def windows(self, items: Sequence[SpanSentence], tokenizer: Any, config: TaskConfig) -> Windows:
        """One window for each sentence, in their order."""
        sentences = [Sentence(item.id, item.text) for item in items]
        windows = sentence_windows(sentences, tokenizer, max_length=config.max_length)
        return replace(windows, labels={})

    def targets(self, item: SpanSentence) -> Sequence[Target]:
        """The labelled spans of a sentence."""
        return item.targets

    def items_of(self, table: pa.Table) -> list[SpanSentence]:
        """The inverse of `table`."""
        return [
            SpanSentence(
                row["id"],
                tuple(row["words"]),
                tuple(
                    Target(tuple(zip(spans[::2], spans[1::2], strict=True)), label)
                    for spans, label in zip(row["spans"], row["labels"], strict=True)
                ),
            )
            for row in table.to_pylist()
        ]


def _sentence(fields: dict[str, Any], name: str) -> SpanSentence:
    """The sentence of a row, checked.

    Raises:
        InputError: the words are none, or a target is malformed.
    """
    words = fields["tokens"] if "tokens" in fields else fields["text"]
    words = words.split() if isinstance(words, str) else words
    if not isinstance(words, list) or not words:
        raise InputError("has no words: give a text, or a list tokens")
    for word in words:
        if not isinstance(word, str) or not word or any(letter.isspace() for letter in word):
            raise InputError(f"the word {word!r} must have characters, and no white space")
        check_text(word, "the word")
    targets = fields["targets"]
    if not isinstance(targets, list):
        raise InputError(f"targets is {targets!r:.60}; it must be a list of objects")
    return SpanSentence(name, tuple(words), tuple(_target(t, len(words)) for t in targets))


def _target(value: Any, words: int) -> Target:
    if not isinstance(value, dict):
        raise InputError(f"the target {value!r:.60} must be an object with span1 and label")
    label = value.get("label")
    if not isinstance(label, str | int) or isinstance(label, bool) or label == "":
        raise InputError(
            f"the target {value!r:.60} has the label {label!r}; it must be one name: a target of "
            "several labels is several targets"
        )
    spans = [value.get("span1"), *([value["span2"]] if value.get("span2") is not None else [])]
    for span in spans:
        if not (
            isinstance(span, list | tuple)
            and len(span) == 2
            and all(isinstance(n, int) and not isinstance(n, bool) for n in span)
            and 0 <= span[0] < span[1] <= words
        ):
            raise InputError(
                f"the target {value!r:.60} has the span {span!r}; it must be [first, end] with "
                f"0 ≤ first < end ≤ {words}, the number of words"
            )
    return Target(tuple((first, end) for first, end in spans), check_text(str(label), "the label"))
