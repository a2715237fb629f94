"""A label for each word: parts of speech, named entities.

A source is a file, or a folder with ``train``, ``dev`` and perhaps ``test``, each perhaps with
``.gz``, or a data set of the hub:

- CoNLL columns (``.conll``, ``.bio``, ``.iob``, ``.tsv``, ``.txt``): a word in each line, first its
  form and last its tag, between tabs or spaces; a line of white space ends a sentence. Comments
  begin with ``#`` and stand in front of a sentence, ``-DOCSTART-`` lines are left out. A first line
  such as ``# O``, with a tag of entities and the columns of the next line, is a word.
  ``--label 3`` takes the third column.
- ``.conllu``: the column UPOS, or that of ``--label`` XPOS, FEATS or DEPREL.
- ``.jsonl``, ``.parquet`` and the hub: lists ``tokens`` and ``ner_tags`` (``tags``, ``labels``), or
  the column of ``--label``. Numbers of classes of the hub are taken by their names.

The encoder reads the words with a space between them, a window for each sentence, and the first
token of a word speaks for it, as Devlin et al. (2019, arXiv:1810.04805, section 5.3) have it. Words
without a token in their window are counted, and are wrong unless their tag is ``O``.

Entities are those of conlleval (Tjong Kim Sang & De Meulder 2003), which seqeval follows: IOB1, BIO
and BIOES are read by one rule. The F1 of surface forms is that of WNUT 2017 (Derczynski et al.
2017, W17-4418): distinct entities, however often they occur.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForTokenClassification

from bertvision.errors import InputError, counted
from bertvision.models.outputs import TokenOutput
from bertvision.pipelines.tasks.data import Sentence, Target, TaskConfig, TaskData
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.scores import Scores
from bertvision.pipelines.tasks.sentences.task import sentence_windows
from bertvision.pipelines.tasks.source import Line, load_hub, read_text
from bertvision.pipelines.tasks.tables import (
    ID,
    Collector,
    Column,
    Layout,
    check_text,
    find_rows,
    offered_splits,
    read_table,
)
from bertvision.pipelines.tasks.task import Labels, Task, class_labels
from bertvision.pipelines.tasks.treebank import FIELDS, NO_WORD, words_of_tokens
from bertvision.pipelines.tasks.windows import Batch, Windows

log = logging.getLogger(__name__)

COLUMNS = (".conll", ".conllu", ".bio", ".iob")
"""Forms of files that have nothing but columns of words and tags."""
FORMS = (*COLUMNS, ".tsv", ".txt", ".jsonl", ".parquet")
OUTSIDE = "O"
"""Tag of a word that is in no entity."""
_ROWS = (".jsonl", ".parquet")
_ENTITY_TAG = re.compile(r"O|[BIESLU]-\S+")
_TAGS = ("ner_tags", "tags", "labels", "pos_tags", "upos")


class TaggedSentence(NamedTuple):
    """Words, each with its tag."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...]
    """One for each word."""
    classes: tuple[str, ...]
    """Names of the tags, in the order of their logits."""

    @property
    def text(self) -> str:
        """The words with a space between them, as the encoder reads them."""
        return " ".join(self.words)

    @property
    def label(self) -> str:
        """The gold tags, written as predictions are."""
        return " ".join(self.tags)


class TaggingTask(Task):
    """Sentences whose words learn their tags."""

    kind = "token"
    headline = "entity_f1"
    max_length = 128
    model_class = AutoModelForTokenClassification
    columns: ClassVar[tuple[str, ...]] = ("label",)
    ratios = ("entity_f1", "accuracy")
    words = ("sentences", "sentences")
    linked = True
    forms = COLUMNS
    schema: ClassVar[Mapping[str, Any]] = {
        "id": pa.string(),
        "text": pa.string(),
        "words": pa.list_(pa.string()),
        "tags": pa.list_(pa.string()),
        "classes": pa.list_(pa.string()),
    }

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """A logit for each tag, by its name."""
        return class_labels(config.classes)

    def outputs(self, config: TaskConfig) -> int:
        """How many tags there are."""
        return len(config.classes)

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits of train, dev and test that there are; ``all`` of a file."""
        return offered_splits(source, self.name, FORMS)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the sentences of a split. The tags are those of training, ``O`` first.

        Raises:
            InputError: it is missing or malformed; names file, line and value.
        """
        label = None if config.label == "label" else config.label  # which stands for no name
        path = find_rows(source, split, self.name, FORMS)
        collected = Collector(str(path or source), skip_bad=config.skip_bad, noun="sentence")
        digest = ""
        if path is None:
            rows = _of_hub(source, "validation" if split == "dev" else split, label)
        else:
            rows, digest = _rows(path, label)
        for name, place, parse in rows:
            with collected.part(place):
                collected.take(_sentence(parse(), name), name)
        data = collected.data(digest or _digest(collected.items))
        known = config.classes or _sorted({tag for item in data.items for tag in item.tags})
        unknown = Counter(tag for item in data.items for tag in item.tags if tag not in known)
        if unknown:
            log.warning(
                "%s of %s in %s are not in the training data (%s): they count as wrong",
                *(counted(len(unknown), "tag"), counted(unknown.total(), "word"), split),
                ", ".join(sorted(unknown)),
            )
        items = [item._replace(classes=known) for item in data.items]
        return TaskData(items, data.sha256, data.skipped, known)

    def check_data(self, items: Sequence[TaggedSentence], source: str) -> None:
        """Refuse data in which all words have one tag.

        Raises:
            InputError: they have.
        """
        if len({tag for item in items for tag in item.tags}) < 2:
            raise InputError(
                f"{source}: all words have one tag, so that nothing can be learned from it: give "
                "data with at least two, and with --label the column that has them"
            )

    def windows(
        self, items: Sequence[TaggedSentence], tokenizer: Any, config: TaskConfig
    ) -> Windows:
        """One window for each sentence; the first token of each word has its tag."""
        sentences = [Sentence(item.id, item.text) for item in items]
        windows = sentence_windows(sentences, tokenizer, max_length=config.max_length)
        tags = np.full(len(windows.input_ids), -1, np.int32)
        longest = int(windows.n_tokens.max()) if len(windows) else 0
        stored = np.full((len(windows), longest), -1, np.int16)
        unseen = 0
        for row, (item, begin, n) in enumerate(
            zip(items, windows.first_token, windows.n_tokens, strict=True)
        ):
            number = {name: i for i, name in enumerate(item.classes)}
            first, seen = _first_tokens(item, windows.offset_mapping[begin : begin + n])
            labels = np.array([number.get(item.tags[word], -1) for word in seen], np.int32)
            tags[begin + first] = labels
            stored[row, first] = labels
            unseen += len(item.words) - len(seen)
        if unseen:
            log.warning(
                "%d of %s have no token in their window (%d tokens, --max-length): they are not "
                "learned, and count as wrong unless they are outside of entities",
                *(unseen, counted(sum(len(item.words) for item in items), "word")),
                config.max_length,
            )
        return replace(windows, labels={"tags": stored}, token_labels={"tags": tags})

    def targets(self, item: TaggedSentence) -> list[Target]:
        """Every word with its tag."""
        return [Target(((i, i + 1),), tag) for i, tag in enumerate(item.tags)]

    def labels(self, windows: Windows) -> Labels:
        """The tags of tokens, (tokens,)."""
        return dict(windows.token_labels)

    def items_of(self, table: pa.Table) -> list[TaggedSentence]:
        """The inverse of `table`."""
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        items = []
        for row in table.to_pylist():
            classes = tuple(row["classes"])
            items.append(
                TaggedSentence(
                    row["id"],
                    tuple(row["words"]),
                    tuple(row["tags"]),
                    known.setdefault(classes, classes),
                )
            )
        return items

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Cross entropy, the mean over a window's words, summed over the windows."""
        return _token_loss(output.logits, batch.labels["tags"]).sum()

    def head_loss(self, output: TokenOutput, labels: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy, the mean over a window's words and over the windows."""
        return _token_loss(output.logits, labels["tags"][:, : output.logits.shape[1]]).mean()

    def logits(self, output: Any) -> dict[str, Tensor]:
        """Logits of tokens, (batch, seq, tags)."""
        return {"token_logits": output.logits}

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """A text, whose words are what stands between spaces."""
        return {"text": Column(("text", "sentence"))}

    def unlabelled(self, texts: Mapping[str, str], name: str) -> TaggedSentence:
        """A sentence whose tags are not known."""
        words = tuple(texts["text"].split())
        return TaggedSentence(name, words, ("",) * len(words), ())

    def read_unlabelled(self, path: Path, config: TaskConfig) -> list[TaggedSentence]:
        """The words of a file in columns, whose tags need not be there.

        Raises:
            InputError: it is missing or malformed; names file, line and value.
        """
        collected = Collector(str(path), skip_bad=config.skip_bad, noun="sentence")
        fields = _word_of if path.name.removesuffix(".gz").endswith(".conllu") else _first_field
        text, digest = read_text(path)
        for name, place, parse in _blocks(text, fields):
            with collected.part(place):
                collected.take(_sentence(parse(), name), name)
        return list(collected.data(digest).items)

    def answers(
        self, logits: Logits, config: TaskConfig, threshold: float | None
    ) -> list[Mapping[str, Any]]:
        """Words of each sentence with ``tags``, their probabilities ``scores``, and entities."""
        rows: list[Mapping[str, Any]] = []
        for item, tags, scores in _told(logits, config.classes):
            rows.append(
                {
                    "words": list(item.words),
                    "tags": tags,
                    "scores": scores,
                    "entities": [
                        {
                            "entity": kind,
                            "word": " ".join(item.words[first : last + 1]),
                            "first": first,
                            "last": last,
                        }
                        for kind, first, last in entities(tags)
                        if is_of_entities(config.classes)
                    ],
                }
            )
        return rows

    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """Accuracy of words in per cent, and where tags are those of entities, F1 of these."""
        items = dev.windows.items
        classes = next((item.classes for item in items if item.classes), ())
        said = {item.id: tags for item, tags, _ in _told(dev, classes)}
        metrics = self.metrics(items, said)
        predictions = {name: " ".join(tags) for name, tags in said.items()}
        return Scores({"argmax": {"threshold": None, "metrics": metrics}}, predictions, {})

    def metrics(
        self, items: Sequence[TaggedSentence], said: Mapping[str, Sequence[str]]
    ) -> dict[str, int | float]:
        """Metrics of tags, in per cent.

        Args:
            items: Sentences with their gold tags.
            said: Tags that a system gives the words, by id.
        """
        counts = [self.parts(item, " ".join(said[item.id])) for item in items]
        sums = {
            name: np.array([part[name] for part in counts], np.float64).sum(axis=0)
            for name in counts[0]
        }
        metrics: dict[str, int | float] = {}
        if "entity_f1" in sums:
            twice, both = sums["entity_f1"]
            true = sum(len(entities(item.tags)) for item in items)
            metrics["entity_f1"] = _percent(twice, both)
            metrics["entity_precision"] = _percent(twice / 2, both - true)
            metrics["entity_recall"] = _percent(twice / 2, true)
            metrics["surface_f1"] = surface_f1(items, said)
        right, words = sums["accuracy"]
        commonest = Counter(tag for item in items for tag in item.tags).most_common(1)[0][1]
        return metrics | {
            "accuracy": _percent(right, words),
            "majority": _percent(commonest, words),
            "total": len(items),
            "words": int(words),
        }

    def parts(self, item: TaggedSentence, answer: Any) -> dict[str, tuple[float, float]]:
        """Count the words of a sentence that are right, and its entities, by metric."""
        tags = str(answer).split(" ")
        right = sum(one == other for one, other in zip(tags, item.tags, strict=True))
        counts: dict[str, tuple[float, float]] = {}
        if is_of_entities(item.classes):
            told, true = set(entities(tags)), set(entities(item.tags))
            counts["entity_f1"] = (2.0 * len(told & true), float(len(told) + len(true)))
        return counts | {"accuracy": (float(right), float(len(tags)))}


def score_files(predictions: Path, data: Path, *, skip_bad: bool = False) -> dict[str, int | float]:
    """Score the tags in a file against those of another, sentence by sentence.

    Args:
        predictions: File of the predicted tags, in any form that the task reads; of columns the
            last has them.
        data: File of the gold tags.
        skip_bad: Leave malformed sentences of the data out.

    Returns:
        As of `TaggingTask.metrics`.

    Raises:
        InputError: a file is malformed, or the predictions are not of the words of the data.
    """
    task, config = TaggingTask("tagging"), TaskConfig(name="tagging", skip_bad=skip_bad)
    gold = task.read(str(data), "all", config).items
    given = task.read(str(predictions), "all", config.model_copy(update={"skip_bad": False})).items
    if len(gold) != len(given):
        raise InputError(
            f"{predictions} has {counted(len(given), 'sentence')} and {data} "
            f"{counted(len(gold), 'sentence')}: give the predictions of all, in their order"
        )
    for item, other in zip(gold, given, strict=True):
        if item.words != other.words:
            pairs = zip_longest(other.words, item.words, fillvalue="")
            place, (word, wanted) = next((i, p) for i, p in enumerate(pairs, 1) if p[0] != p[1])
            raise InputError(
                f"{predictions}: word {place} of sentence {other.id} is {word!r}, and that of "
                f"{data} {wanted!r}: give tags of the same words"
            )
    return task.metrics(gold, {g.id: other.tags for g, other in zip(gold, given, strict=True)})


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The entities of a sentence, as conlleval and seqeval read tags.

    An entity begins at B, S, or where the kind changes or O is left; it ends at E, S, or where the
    next one begins. So IOB1, BIO, IOE and BIOES are read by one rule.

    Args:
        tags: (words,) such as ``B-person``; ``O`` of words outside.

    Returns:
        (kind, first word, last word) of each, in order.
    """
    found: list[tuple[str, int, int]] = []
    begin, before, kind_before = 0, OUTSIDE, ""
    for i, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, kind = tag.partition("-")
        kind = kind or "_"
        inside = before not in (OUTSIDE, "")
        ends = inside and (
            before in ("E", "S") or prefix in ("B", "S", OUTSIDE, "") or kind != kind_before
        )
        if ends:
            found.append((kind_before, begin, i - 1))
        if prefix not in (OUTSIDE, "") and (ends or not inside):
            begin = i
        before, kind_before = prefix, kind
    return found


def tag_groups(
    text: str, places: Sequence[tuple[int, int]], tags: Sequence[str], scores: Sequence[float]
) -> list[dict[str, Any]]:
    """Neighbouring words of one kind as one, as transformers' token-classification pipeline has it.

    Args:
        text: The text.
        places: Characters [start, end) of each word in it.
        tags: Tag of each word.
        scores: Probability of each.

    Returns:
        ``entity_group``, ``score``, the mean of its words, ``word``, ``start`` and ``end`` in
        characters of each group; words outside are left out.
    """
    groups: list[dict[str, Any]] = []
    members: list[float] = []
    last = ""
    for (begin, end), tag, score in zip(places, tags, scores, strict=True):
        prefix, kind = (tag[0], tag[2:]) if tag[:2] in ("B-", "I-") else ("I", tag)
        if kind != last or prefix == "B":
            members = []
            groups.append({"entity_group": kind, "score": 0.0, "word": "", "start": begin})
        members.append(score)
        groups[-1]["score"] = float(np.mean(members))
        groups[-1] |= {"word": text[groups[-1]["start"] : end], "end": end}
        last = kind
    return [group for group in groups if group["entity_group"] != OUTSIDE]


def is_of_entities(classes: Sequence[str]) -> bool:
    """Whether tags are those of entities: a prefix, a hyphen and a kind, and ``O``."""
    return OUTSIDE in classes and all(
        tag == OUTSIDE or tag[:2] in ("B-", "I-", "E-", "S-") for tag in classes
    )


def surface_f1(items: Sequence[TaggedSentence], tags: Mapping[str, Sequence[str]]) -> float:
    """F1 of distinct entities in per cent, however often they occur (WNUT 2017).

    Args:
        items: Sentences with the right tags.
        tags: Tags that a system tells, by id.
    """

    def forms(item: TaggedSentence, of_words: Sequence[str]) -> set[tuple[str, str]]:
        return {
            (kind, " ".join(item.words[first : last + 1]))
            for kind, first, last in entities(of_words)
        }

    told = {form for item in items for form in forms(item, tags[item.id])}
    true = {form for item in items for form in forms(item, item.tags)}
    return _percent(2 * len(told & true), len(told) + len(true))


def _percent(part: float, whole: float) -> float:
    return 100.0 * float(part) / float(whole) if whole else 0.0


def _token_loss(logits: Tensor, tags: Tensor) -> Tensor:
    """(batch,) mean cross entropy of the words of each window."""
    losses = functional.cross_entropy(
        logits.float().transpose(1, 2), tags.long(), ignore_index=-1, reduction="none"
    )
    return losses.sum(1) / (tags >= 0).sum(1).clamp_min(1)


def _first_tokens(item: TaggedSentence, offsets: Any) -> tuple[Any, Any]:
    """The first token of each word that has one, and which words these are."""
    seen, first = np.unique(words_of_tokens(item.words, offsets), return_index=True)
    return first[seen != NO_WORD], seen[seen != NO_WORD]


def _told(
    logits: Logits, classes: Sequence[str]
) -> Iterator[tuple[TaggedSentence, list[str], list[float]]]:
    """Each sentence with the tags that logits tell, and their probabilities."""
    windows, values = logits.windows, logits.arrays["token_logits"]
    assert windows.offset_mapping is not None
    if not np.isfinite(values).all():
        raise InputError("the logits hold NaN or infinity: the model that made them diverged")
    ends = np.cumsum(windows.n_tokens, dtype=np.int64)
    for row, begin, end in zip(windows.item_index, ends - windows.n_tokens, ends, strict=True):
        item = windows.items[row]
        first, seen = _first_tokens(item, windows.offset_mapping[begin:end])
        of_words = values[begin:end][first].astype(np.float64)
        shares = np.exp(of_words - of_words.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        tags, scores = [OUTSIDE] * len(item.words), [0.0] * len(item.words)
        for word, share in zip(seen, shares, strict=True):
            tags[word], scores[word] = classes[int(share.argmax())], float(share.max())
        yield item, tags, scores


def _sorted(tags: set[str]) -> tuple[str, ...]:
    """Names of tags in order, ``O`` first."""
    return tuple(sorted(tags, key=lambda tag: (tag != OUTSIDE, tag)))


def _digest(items: Sequence[TaggedSentence]) -> str:
    return hashlib.sha256(repr([item[:3] for item in items]).encode()).hexdigest()


def _sentence(row: Mapping[str, Any], place: str) -> TaggedSentence:
    """A sentence of lists of words and tags, checked.

    Raises:
        InputError: they are none, or differ in length.
    """
    words, tags = row["words"], row["tags"]
    if not isinstance(words, list) or not isinstance(tags, list) or not words:
        raise InputError("has no list of words and list of tags: give both, with a tag for each")
    if len(words) != len(tags):
        raise InputError(f"has {len(words)} words and {len(tags)} tags: give one for each word")
    for word in words:
        if not isinstance(word, str) or not word or set(word) & set(" \t\r\n"):
            raise InputError(f"the word {word!r} must have characters, and no white space")
        check_text(word, "the word")
    for tag in tags:
        if not isinstance(tag, str) or not tag or " " in tag:
            raise InputError(
                f"the tag {tag!r} must be a name without spaces, such as B-person or NOUN"
            )
    return TaggedSentence(str(row.get("id") or place), tuple(words), tuple(tags), ())


Rows = Iterator[tuple[str, str, Callable[[], Mapping[str, Any]]]]
"""Name of each sentence, the place that errors begin with, and the reader of its words and tags."""


def _rows(path: Path, label: str | None) -> tuple[Rows, str]:
    """The sentences of a file, and the SHA-256 of its bytes."""
    form = Path(path.name.removesuffix(".gz")).suffix
    if form in _ROWS:
        columns = {
            "words": Column(("tokens", "words"), "json"),
            "tags": Column((label,) if label else _TAGS, "json"),
            "id": ID,
        }
        hint = "give lists tokens and tags, or name the column of the tags with --label"
        table = read_table(path, Layout(columns, hint=hint), forms=_ROWS)
        return ((row.place, row.place, row.parse) for row in table.rows), str(table.sha256)
    text, digest = read_text(path)
    return _blocks(text, partial(_fields, label=label, conllu=form == ".conllu")), digest


_ReadLine = Callable[[Line], tuple[str, str] | None]
"""Gives the word and the tag of a line; None of one that repeats the words below it."""


def _blocks(text: str, fields: _ReadLine) -> Rows:
    """The sentences of CoNLL columns."""
    read = partial(_read_block, fields=fields)
    lines: list[Line] = []
    for number, (line, following) in enumerate(pairwise([*text.split("\n"), "", ""]), 1):
        if line.strip() and not line.startswith("-DOCSTART-"):
            if lines or not _is_comment(line, following):
                lines.append(Line(number, line.removesuffix("\r")))
        elif lines:
            yield f"line {lines[0].number}", "", partial(read, lines)
            lines = []


def _is_comment(line: str, following: str) -> bool:
    """Whether a line in front of a sentence says something of it, and is no word with its tag.

    The word ``#`` in columns between spaces has a tag of entities in its last column, and as many
    columns as the line that follows, if that is of the same sentence.
    """
    fields, others = line.split(), following.split()
    if not line.startswith("#") or "\t" in line:
        return False
    if len(fields) == 1:
        return True
    is_word = _ENTITY_TAG.fullmatch(fields[-1]) and "\t" not in following
    return line.startswith("# ") and not (is_word and len(others) in (0, len(fields)))


def _read_block(lines: Sequence[Line], *, fields: _ReadLine) -> Mapping[str, Any]:
    """The words and tags of a sentence in columns."""
    rows = [fields(line) for line in lines]
    words = [row for row in rows if row is not None]
    return {"words": [word for word, _ in words], "tags": [tag for _, tag in words]}


def _first_field(line: Line) -> tuple[str, str]:
    """The word of a line, with no tag of its own."""
    return (line.text.split("\t") if "\t" in line.text else line.text.split())[0].strip(), OUTSIDE


def _word_of(line: Line) -> tuple[str, str] | None:
    """The word of a line of CoNLL-U, with no tag of its own."""
    row = _fields(line, None, conllu=True)
    return row and (row[0], OUTSIDE)


def _fields(line: Line, label: str | None, *, conllu: bool) -> tuple[str, str] | None:
    """The word and the tag of a line; None of one that repeats the words below it."""
    fields = line.text.split("\t") if "\t" in line.text else line.text.split()
    fields = [field.strip() for field in fields]
    if conllu:
        name = (label or "upos").upper()
        if name not in FIELDS[3:8]:
            raise InputError(f"--label {label}: give one of {', '.join(FIELDS[3:8]).lower()}")
        if len(fields) != len(FIELDS):
            raise InputError(
                f"line {line.number}: has {counted(len(fields), 'field')}, a word has {len(FIELDS)}"
            )
        if not fields[0].isdigit():
            return None
        return fields[1].replace(" ", "\xa0"), fields[FIELDS.index(name)]
    column = len(fields) if label is None else _number(label)
    if len(fields) < 2 or column > len(fields):
        raise InputError(
            f"line {line.number}: has {counted(len(fields), 'field')}: give a word and its tag "
            "with a tab between them" + (f", in column {column}" if label else "")
        )
    return fields[0], fields[column - 1]


def _number(label: str) -> int:
    if not label.isdigit() or int(label) < 2:
        raise InputError(
            f"--label {label}: columns without names are counted: give a number such as 2"
        )
    return int(label)


def _of_hub(source: str, split: str, label: str | None) -> Rows:
    """The sentences of a data set of the hub, with tags by their names."""
    data = load_hub(source, split)
    names = data.column_names
    words = next((name for name in ("tokens", "words") if name in names), None)
    tags = next((name for name in ((label,) if label else _TAGS) if name in names), None)
    if words is None or tags is None:
        raise InputError(
            f"{source}: has the columns {names}, but no tokens and {label or ' or '.join(_TAGS)}: "
            "name the column of the tags with --label"
        )
    feature = data.features[tags]
    of_classes = getattr(getattr(feature, "feature", feature), "names", None)
    for i, row in enumerate(data):
        told = {"words": row[words], "tags": row[tags], "id": row.get("id")}
        yield f"row {i}", f"row {i}", partial(_with_names, told, of_classes)


def _with_names(row: Mapping[str, Any], classes: Sequence[str] | None) -> Mapping[str, Any]:
    """A row of the hub with its tags by their names.

    Raises:
        InputError: a number is that of no class, as where a split is not labelled.
    """
    tags = list(row["tags"] or [])
    if classes is not None:
        if wrong := [tag for tag in tags if tag not in range(len(classes))]:
            raise InputError(f"the tag {wrong[0]!r} is none of the {len(classes)} classes")
        tags = [classes[tag] for tag in tags]
    return {**row, "words": list(row["words"] or []), "tags": tags}
