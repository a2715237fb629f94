"""Sentences and pairs of sentences: their class, or a score, told from one window.

Classification and regression as Devlin et al. 2019 (arXiv:1810.04805, section 4.1) fine-tune BERT
for GLUE: the task's output layer on the encoder's first token, cross entropy over the classes or
the squared error of the score. The families of data sets differ in how they are read alone: see
`labelled`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from bertvision.errors import InputError
from bertvision.models.outputs import ClassOutput, class_loss
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.tasks.data import Sentence, TaskConfig
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.scores import Scores, class_answers
from bertvision.pipelines.tasks.sentences.metrics import classification_metrics, regression_metrics
from bertvision.pipelines.tasks.soundness import Example, linked
from bertvision.pipelines.tasks.tables import Column
from bertvision.pipelines.tasks.task import Task, as_table, class_labels
from bertvision.pipelines.tasks.windows import Batch, Encoded, Windows, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sentence_windows(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, *, max_length: int = 128
) -> Windows:
    """Tokenise sentences, or pairs of them, a window each.

    Args:
        sentences: Sentences in the order of the data.
        tokenizer: a fast (Rust) tokenizer, whose template places the special tokens.
        max_length: most tokens of a window, special tokens included. What is beyond is cut off, of
            a pair from the longer sentence first.

    Returns:
        The windows, with ``labels["label"]``: int32 classes, or float32 where a label is a float.

    Raises:
        InputError: ``max_length`` leaves no room for a text, a sentence makes no token at all, or
            the tokenizer is not a fast one.
    """
    encodings: list[Encoded] = []
    for pair, run in groupby(sentences, key=lambda sentence: sentence.pair is not None):
        group = list(run)
        pairs = [sentence.pair or "" for sentence in group] if pair else None
        texts = [sentence.text for sentence in group]
        names = [f"sentence {sentence.id!r}" for sentence in group]
        encodings += encode(texts, tokenizer, max_length=max_length, pairs=pairs, names=names)
    return Windows(
        input_ids=_joined([e.ids for e in encodings]),
        token_type_ids=_joined([e.types for e in encodings]).astype(np.uint8),
        offset_mapping=_joined([e.offsets for e in encodings], (0, 2)),
        n_tokens=np.array([len(e.ids) for e in encodings], np.int32),
        item_index=np.arange(len(sentences), dtype=np.int32),
        labels={"label": _label_array([sentence.label for sentence in sentences])},
    )


def pointed_tokens(
    windows: Windows, sentences: Sequence[Sentence], values: Sequence[Any], column: str
) -> npt.NDArray[np.int32]:
    """The token of each window to which a column of the data points.

    A number is the position of a character in the text, from 0. A text is a part of the sentence,
    such as its subject, and points to the last token of that part: whole words, where it stands as
    such; it must stand there once.

    Args:
        windows: Windows of the sentences, one of each.
        sentences: The sentences.
        values: Value of the column for each.
        column: Name of the column.

    Returns:
        (windows,) the token, counted inside its window.

    Raises:
        InputError: a value points to no place or to several, or to one that its window lacks.
    """
    tokens = np.empty(len(windows), np.int32)
    first = windows.first_token
    for i, (sentence, value) in enumerate(zip(sentences, values, strict=True)):
        where = f"sentence {sentence.id!r}, column {column!r}: {value!r:.60}"
        if sentence.pair is not None:
            raise InputError(f"{where}: of pairs no token is pointed to: leave --pair out")
        character = _character(sentence.text, value, where)
        starts, ends = windows.offset_mapping[first[i] : first[i] + windows.n_tokens[i]].T
        covering = np.flatnonzero((starts <= character) & (character < ends))
        if not len(covering):
            raise InputError(
                f"{where} points to character {character} of {len(sentence.text)}, of which the "
                f"window of {windows.n_tokens[i]} tokens has none: give a larger --max-length, or "
                "a character that is no white space"
            )
        tokens[i] = covering[-1]
    return tokens


def _character(text: str, value: Any, where: str) -> int:
    """The position of the character that a value points to; of a part of the text its last."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < len(text):
            raise InputError(f"{where}: the text has the characters 0 to {len(text) - 1}")
        return value
    if isinstance(value, str) and value.strip():
        part = re.escape(value.strip())
        matches = [*re.finditer(rf"(?<!\w){part}(?!\w)", text)] or [*re.finditer(part, text)]
        if len(matches) != 1:
            raise InputError(
                f"{where} stands {len(matches)} times in {text!r:.80}: give a part that stands "
                "there once, or the position of a character"
            )
        return matches[0].end() - 1
    raise InputError(f"{where}: give the position of a character, or a part of the text")


def _joined(parts: list[npt.NDArray[Any]], empty: tuple[int, ...] = (0,)) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(empty, np.int32)


def _label_array(labels: Sequence[int | float | None]) -> npt.NDArray[Any]:
    if any(isinstance(label, float) for label in labels):
        return np.array([np.nan if label is None else label for label in labels], np.float32)
    return np.array([-1 if label is None else label for label in labels], np.int32)


class SentenceTask(Task):
    """A task whose items are `Sentence`; a sub-class says which splits there are and reads them.

    Whether it is a classification is in the configuration: `TaskConfig.classes` names the classes,
    and is empty where the labels are scores.
    """

    tokens: ClassVar[TokenPooling] = "cls"
    max_length = 128
    model_class: ClassVar[Any] = AutoModelForSequenceClassification
    linked = True
    of_decoders = True
    item: ClassVar[Any] = Sentence
    schema: ClassVar[Mapping[str, Any]] = {
        "id": pa.string(),
        "text": pa.string(),
        "pair": pa.string(),
        "label": pa.int64(),
    }
    positive: int | None = None
    """The class that F1 is of; None where no class is what is looked for."""

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """A logit for each class by its name, or one for a score.

        The names are written into ``config.json``, so that transformers' own pipelines tell the
        classes of a snapshot; ``num_labels`` follows from them. ``problem_type`` keeps those
        pipelines from squashing a score; transformers' loss, which it also chooses, is never
        computed, since no labels are passed to the model.
        """
        return {
            **class_labels(config.classes or ("score",)),
            "problem_type": "single_label_classification" if config.classes else "regression",
        }

    def outputs(self, config: TaskConfig) -> int:
        """How many classes there are; 1 of a score."""
        return len(config.classes) or 1

    def check_data(self, items: Sequence[Sentence], source: str) -> None:
        """Refuse data of one class, or of one score, alone.

        Raises:
            InputError: the items differ in nothing that could be learned.
        """
        super().check_data(items, source)
        if not items:
            raise InputError(f"{source} holds no sentence: give a file that has some")
        if missing := sum(item.label is None for item in items):
            raise InputError(f"{source}: {missing} of {len(items)} sentences have no label")
        if len({item.label for item in items}) == 1:
            raise InputError(
                f"{source}: all {len(items)} sentences have the same label, so that nothing can be "
                "learned from it: give data with at least two classes or scores"
            )

    def texts(self, item: Sentence) -> tuple[str, ...]:
        """The sentence, or both of a pair."""
        return tuple(filter(None, (item.text, item.pair)))

    def grouping(self, items: Sequence[Sentence]) -> Callable[[Sentence], str]:
        """Groups of items linked by any text that they share: of pairs, either text."""
        names = linked((self.group(x), *filter(None, (x.text, x.pair))) for x in items)
        return lambda item: names[self.group(item)]

    def example(self, item: Sentence) -> Example:
        """The sentence, or both of a pair, and its class or score."""
        return (item.text, item.pair), item.label

    def windows(self, items: Sequence[Sentence], tokenizer: Any, config: TaskConfig) -> Windows:
        """One window for each sentence or pair, in their order."""
        return sentence_windows(items, tokenizer, max_length=config.max_length)

    def table(self, items: Sequence[Sentence]) -> pa.Table:
        """Sentences as the store's text side, a row each."""
        scores = any(isinstance(item.label, float) for item in items)
        return as_table(items, {**self.schema, "label": pa.float64()} if scores else self.schema)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Cross entropy, or the squared error of a score, summed over the windows."""
        return class_loss(ClassOutput(output.logits), batch.labels["label"], reduction="sum")

    def logits(self, output: Any) -> dict[str, Tensor]:
        """Logits (batch, classes), or scores (batch, 1)."""
        return {"logits": output.logits}

    def head_loss(self, output: Any, labels: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy, or the squared error of a score, averaged over the examples."""
        return class_loss(output, labels["label"])

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """The column ``text``; a task of pairs has a column ``pair`` too."""
        return {"text": Column(("text", "sentence"))}

    def unlabelled(self, texts: Mapping[str, str], name: str) -> Sentence:
        """A sentence, or a pair, whose label is not known."""
        pair = texts.get("pair")
        return Sentence(name, texts["text"].strip(), None if pair is None else pair.strip())

    def answers(
        self, logits: Logits, config: TaskConfig, threshold: float | None
    ) -> list[Mapping[str, Any]]:
        """For each item its class and the probabilities, or its score (see `class_answers`)."""
        return class_answers(logits.arrays["logits"], config.classes)

    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """The most likely class of each item, or its score; predictions are indices or scores.

        Raises:
            InputError: an item has no label, or the logits are not finite or not one row for each.
        """
        logits, windows = np.asarray(dev.arrays["logits"], np.float64), dev.windows
        if logits.ndim != 2 or len(logits) != len(windows.items):
            raise InputError(
                f"logits of shape {logits.shape} cannot be scored on {len(windows.items)} items: "
                "there must be one window for each"
            )
        if not np.isfinite(logits).all():
            raise InputError("the logits hold NaN or infinity: the model that made them diverged")
        items = [windows.items[i] for i in windows.item_index]
        if unlabelled := sum(item.label is None for item in items):
            raise InputError(
                f"{unlabelled} of {len(items)} items have no label, so that nothing can be scored "
                "on them: take a split that has labels"
            )
        gold = np.array([item.label for item in items])
        metrics: dict[str, Any]
        if logits.shape[1] == 1:
            predicted = logits[:, 0]
            metrics = regression_metrics(predicted, gold)
        else:
            predicted = logits.argmax(axis=1)
            metrics = classification_metrics(predicted, gold, self.positive)
        return Scores(
            {"argmax": {"threshold": None, "metrics": metrics}},
            dict(zip([item.id for item in items], predicted.tolist(), strict=True)),
            {},
        )
