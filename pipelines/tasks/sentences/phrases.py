"""Pairs of phrases: ``--task phrases``, from JSON lines with a pair of spans and a class in each.

``{"text": "he passed away", "pair": "he died", "first": [3, 14], "second": [3, 7], "label":
"paraphrase"}``: two sentences, the characters [begin, end) of a phrase of each, and the class of
the two phrases. Several pairs of phrases of one pair of sentences are several lines. It is meant
for what comes before another task (``finetune --init-from``), as in `phrase_model`.

The output layer for pairs of phrases: the class of two spans, one of each sentence of a pair.

Arase & Tsujii (2019, arXiv:1909.00931), *Transfer Fine-Tuning: A BERT Case Study*, fine-tune an
encoder on phrases that paraphrase each other before the task that is meant. Here a phrase is the
largest value of each channel over its tokens, and a pair is compared as Conneau et al. (2017,
arXiv:1705.02364, section 3.2) compare sentences: (u, v, |u − v|, u ∗ v).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.own_output import OutputLayer, OwnOutput
from bertvision.pipelines.tasks.sentences.rows import RawSentence, sentence_rows, sorted_classes
from bertvision.pipelines.tasks.sentences.task import SentenceTask, sentence_windows
from bertvision.pipelines.tasks.soundness import Example
from bertvision.pipelines.tasks.source import find_file, split_files, splits_in
from bertvision.pipelines.tasks.tables import ID, Column, Layout, read_table
from bertvision.pipelines.tasks.windows import Int32Array, Windows

FIRST, SECOND = 0, 1
"""Marks of the tokens of the phrase in the first sentence, and of that in the second."""


class PhraseOutput(NamedTuple):
    """Output of the layer for a batch."""

    logits: Tensor
    """(batch, classes)"""
    hidden_states: tuple[Tensor, ...] | None = None
    """The hidden states of the encoder, where they were asked for."""
    attentions: tuple[Tensor, ...] | None = None
    """Likewise."""


class PhrasePairLayer(OutputLayer):
    """A linear layer on what two phrases have in common and apart.

    Args:
        config: Configuration of the encoder; ``num_labels`` is the number of classes.
    """

    reads = ("phrases",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)  # that of Devlin et al. (2019) on what classes are told from
        self.classes = nn.Linear(4 * config.hidden_size, config.num_labels or 0)

    def forward(self, states: Tensor, phrases: Tensor) -> PhraseOutput:
        """Tell the class of each window's pair.

        Args:
            states: (batch, seq, hidden) the last hidden state.
            phrases: (batch, seq) `FIRST`, `SECOND`, or −1 of other tokens.
        """
        states = states.float()
        lowest = torch.finfo(states.dtype).min
        u, v = (
            states.masked_fill((phrases != which)[..., None], lowest).amax(1)  # (batch, hidden)
            for which in (FIRST, SECOND)
        )
        pair = torch.cat([u, v, (u - v).abs(), u * v], dim=-1)
        return PhraseOutput(self.classes(self.dropout(pair)))


FORMS = (".jsonl",)
FILES = split_files(FORMS)
LAYOUT = Layout(
    {
        "text": Column(("text",)),
        "pair": Column(("pair",)),
        "first": Column(("first",), "json"),
        "second": Column(("second",), "json"),
        "label": Column(("label",)),
        "id": ID,
    }
)

Span = tuple[int, int]
"""Characters [begin, end)."""


class PhrasePair(NamedTuple):
    """A pair of phrases in a pair of sentences."""

    id: str
    text: str
    pair: str
    first: Span
    """Its place in ``text``."""
    second: Span
    """Its place in ``pair``."""
    label: int
    """Index of the class."""

    @property
    def phrases(self) -> tuple[str, str]:
        """The two as texts."""
        return self.text[slice(*self.first)], self.pair[slice(*self.second)]


class PhraseTask(SentenceTask):
    """The class of two phrases, each in its sentence."""

    of_decoders = False
    kind = "phrases"
    tokens = "all"
    model_class = OwnOutput(PhrasePairLayer)
    item: ClassVar[Any] = PhrasePair
    schema: ClassVar[Mapping[str, Any]] = {
        **SentenceTask.schema,
        "first": pa.list_(pa.int32()),
        "second": pa.list_(pa.int32()),
    }

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """Both sentences and the places of their phrases, which brackets may mark instead."""
        place = Column((), "json", optional=True)
        return {
            "text": Column(("text",)),
            "pair": Column(("pair",)),
            "first": place._replace(names=("first",)),
            "second": place._replace(names=("second",)),
        }

    def unlabelled(self, texts: Mapping[str, Any], name: str) -> PhrasePair:  # type: ignore[override]
        """A pair of phrases whose class is not known.

        Args:
            texts: ``text`` and ``pair`` with ``first`` and ``second``; or with brackets around the
                phrase, ``he [passed away]``.
            name: Id of the item.

        Raises:
            InputError: A phrase is not marked, or not inside its sentence.
        """
        if "first" in texts or "second" in texts:
            text, pair = texts["text"], texts["pair"]
            first, second = _span(texts, "first", text), _span(texts, "second", pair)
        else:
            (text, first), (pair, second) = _bracketed(texts["text"]), _bracketed(texts["pair"])
        return PhrasePair(name, text, pair, first, second, -1)

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits of a folder, of train, dev and test; the split of a file by its name."""
        return splits_in(source, FILES, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a file, or that of a split in a folder; classes are those of the training data.

        Raises:
            InputError: it is missing or malformed; names file, line and value.
        """
        path = find_file(source, FILES.get(split, []), self.name)
        table = read_table(path, LAYOUT, forms=FORMS)
        rows = sentence_rows(table, skip_bad=config.skip_bad, check=_checked)
        classes = config.classes
        if not classes:
            train = Path(source).is_dir() and split != "train"
            classes = self.read(source, "train", config).classes if train else ()
        data = rows.classified(classes or sorted_classes(rows.labels), table.sha256)
        items = []
        for x in data.items:
            first, second = rows.extras[x.id]
            items.append(PhrasePair(x.id, x.text, x.pair, first, second, x.label))
        return replace(data, items=items)

    def example(self, item: PhrasePair) -> Example:  # type: ignore[override]
        """Both sentences with their phrases, and the class."""
        return (f"{item.text} {item.first}", f"{item.pair} {item.second}"), item.label

    def windows(
        self,
        items: Sequence[Any],
        tokenizer: Any,
        config: TaskConfig,
    ) -> Windows:
        """One window for each pair of phrases, with the tokens of both marked.

        Raises:
            InputError: a phrase has no token in its window, because it is cut off or the tokenizer
                drops all its characters; names the first, and says how many there are.
        """
        windows, lost = _marked(items, tokenizer, config)
        if lost:
            raise InputError(
                f"{len(lost):,} of {counted(len(items), 'pair')} do not fit, the first: "
                f"{next(iter(lost.values()))}: give a larger --max-length, or leave such rows out "
                "of the data"
            )
        return windows

    def misfits(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> dict[str, str]:
        """Pairs with a phrase that has no token in its window (see `windows`)."""
        return _marked(items, tokenizer, config)[1]


def _marked(
    items: Sequence[Any], tokenizer: Any, config: TaskConfig
) -> tuple[Windows, dict[str, str]]:
    """The windows with the tokens of both phrases marked; why a pair has none to mark, by id."""
    windows = sentence_windows(items, tokenizer, max_length=config.max_length)
    marks = np.full(len(windows.input_ids), -1, np.int32)
    lost = {}
    for item, begin, count in zip(items, windows.first_token, windows.n_tokens, strict=True):
        tokens = slice(begin, begin + count)
        offsets = windows.offset_mapping[tokens]
        sentence = _sentences(offsets)
        for which, (start, end) in ((FIRST, item.first), (SECOND, item.second)):
            inside = (offsets[:, 0] < end) & (offsets[:, 1] > start) & (sentence == which)
            marks[tokens][inside] = which
            if not inside.any():
                lost[item.id] = (
                    f"the phrase {item.phrases[which]!r} of {item.id!r} has no token in its window "
                    f"of {config.max_length}"
                )
    return replace(windows, marks={"phrases": marks}), lost


def _sentences(offsets: Int32Array) -> Int32Array:
    """Tell which sentence each token of a window is of: 0 or 1, −1 of special tokens; (tokens,)."""
    special = offsets[:, 0] < 0
    begins = ~special & np.append(True, special[:-1])
    sentence: Int32Array = np.where(special, -1, np.cumsum(begins) - 1).astype(np.int32)
    return sentence


def _checked(raw: RawSentence) -> RawSentence:
    """A pair of sentences with the spans of its phrases as ``extra``."""
    for key in ("text", "pair", "label"):
        if (value := str(getattr(raw, key))) != value.strip():
            raise InputError(f"the {key} {value!r} must be without spaces around it")
    spans = _span(raw.extra, "first", raw.text), _span(raw.extra, "second", str(raw.pair))
    return raw._replace(extra=spans)


def _bracketed(text: str) -> tuple[str, Span]:
    """A sentence without the brackets around its phrase, and the place of the phrase."""
    match = re.fullmatch(r"([^][]*)\[([^][]*[^][\s][^][]*)\]([^][]*)", text.strip())
    if match is None:
        raise InputError(
            f"{text!r:.80} marks no phrase: put one pair of brackets around it, as in 'he [passed "
            "away]', or give its characters [begin, end) as first and second in .jsonl"
        )
    before, phrase, behind = match.groups()
    return before + phrase + behind, (len(before), len(before) + len(phrase))


def _span(row: Mapping[str, Any], key: str, text: str) -> Span:
    value = row.get(key)
    if (
        not isinstance(value, list)
        or [type(x) for x in value] != [int, int]
        or not 0 <= value[0] < value[1] <= len(text)
        or not text[value[0] : value[1]].strip()
    ):
        raise InputError(
            f"{key} is {value!r}: give the characters [begin, end) of the phrase in {text!r}, of "
            f"{len(text)} characters"
        )
    return value[0], value[1]
