"""Treebanks in CoNLL-U as data for extraction: ``--task treebank --data FOLDER``.

A folder has ``train``, ``dev`` and ``test`` as CoNLL-U, each perhaps with ``.gz``: named
``train.conllu``, or as Universal Dependencies names them, ``en_ewt-ud-train.conllu``. The encoder
reads the words of a sentence with a space between them, one window for each sentence; what of a
longer one does not fit is cut off, and counted. A token is a piece of the word whose characters it
has.

The format is that of Universal Dependencies (Nivre et al. 2020, LREC;
https://universaldependencies.org/format.html): ten fields between tabs in a line, comments in front
of a sentence, a blank line behind it. The *syntactic words* and the basic tree over them are read.
The lines of multiword tokens (``3-4``), which repeat the spelling of words that follow, and of
empty nodes (``8.1``), which the enhanced graph alone has, are checked and left out, and so is the
column DEPS of enhanced dependencies.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.features import FeaturesTask
from bertvision.pipelines.tasks.sentences.task import sentence_windows
from bertvision.pipelines.tasks.source import Line, only_file, read_text
from bertvision.pipelines.tasks.tables import Collector
from bertvision.pipelines.tasks.windows import Windows

FIELDS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
UPOS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN"),
    *("PUNCT", "SCONJ", "SYM", "VERB", "X"),
)
"""The universal parts of speech, in the order of their names."""
PUNCTUATION = "PUNCT"

_NUMBER = re.compile(r"[1-9][0-9]*")
_RANGE = re.compile(r"([1-9][0-9]*)-([1-9][0-9]*)")
_EMPTY = re.compile(r"(0|[1-9][0-9]*)\.([1-9][0-9]*)")
_SENT_ID = re.compile(r"#\s*sent_id\s*=\s*(\S.*?)\s*")


class ParsedSentence(NamedTuple):
    """A sentence with its basic tree."""

    id: str
    """``sent_id``; of a sentence without one the line of its first word, ``line 7``."""
    words: tuple[str, ...]
    upos: tuple[str, ...]
    """One of `UPOS` for each word."""
    heads: tuple[int, ...]
    """The number of each word's head, from 1; 0 of the root."""
    relations: tuple[str, ...]
    """The relation of each word to its head, such as ``nsubj`` or ``nmod:poss``."""

    @property
    def text(self) -> str:
        """The words with a space between them, as the encoder reads them."""
        return " ".join(self.words)


class Block(NamedTuple):
    """The lines of a sentence."""

    lines: list[Line]
    """Comments and all; at least one."""


def blocks(text: str) -> Iterator[Block]:
    r"""The sentences of a file, parted by blank lines; lines end with ``\n`` or ``\r\n``."""
    lines: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line := line.removesuffix("\r"):
            lines.append(Line(number, line))
        elif lines:
            yield Block(lines)
            lines = []
    if lines:
        yield Block(lines)


def parse(block: Block, *, labelled: bool = True) -> ParsedSentence:
    """Read a sentence.

    Args:
        block: its lines.
        labelled: Whether words must have their UPOS, HEAD and DEPREL; otherwise those there are
            are not read, and the sentence has ``X``, 0 and ``_`` in their place.

    Raises:
        InputError: a line is malformed, or the words are no tree. Begins with the number of the
            line, and names the value and what is allowed.
    """
    comments = [line for line in block.lines if line.text.startswith("#")]
    rows = block.lines[len(comments) :]
    if comments != block.lines[: len(comments)]:
        late = next(line for line in comments if line.number > rows[0].number)
        _refuse(late, "is a comment behind a word; comments stand in front of their sentence")
    if not rows:
        _refuse(comments[-1], "is a comment without a sentence: take the blank line behind it out")
    words = _words(rows, labelled=labelled)
    if labelled:
        _check_tree(words)
    named = [match[1] for line in comments if (match := _SENT_ID.fullmatch(line.text))]
    return ParsedSentence(
        named[0] if named else f"line {rows[0].number}",
        tuple(word.form for word in words),
        tuple(word.upos for word in words),
        tuple(word.head for word in words),
        tuple(word.relation for word in words),
    )


class _Word(NamedTuple):
    line: Line
    form: str
    upos: str
    head: int
    relation: str


def _words(rows: Sequence[Line], *, labelled: bool) -> list[_Word]:
    """The words of a sentence; lines of multiword tokens and empty nodes are checked alone."""
    words: list[_Word] = []
    covered, empty = 0, 0
    last: Line | None = None
    for line in rows:
        fields = line.text.split("\t")
        if len(fields) != len(FIELDS):
            have = f"has {len(fields)} field{'s' * (len(fields) != 1)} between tabs"
            _refuse(line, f"{have}, a word has {len(FIELDS)}: {', '.join(FIELDS)}")
        if match := _RANGE.fullmatch(fields[0]):
            begin, covers = int(match[1]), int(match[2])
            if begin != len(words) + 1 or begin <= covered or covers < begin:
                what = f"begin at the next word, {len(words) + 1}, and end where it begins or later"
                _refuse(line, f"the multiword token {fields[0]!r} must {what}, outside of others")
            covered, last = covers, line
        elif match := _EMPTY.fullmatch(fields[0]):
            if (int(match[1]), int(match[2])) != (len(words), empty + 1):
                _refuse(
                    line,
                    f"the empty node {fields[0]!r} must be {len(words)}.{empty + 1} at its place",
                )
            empty += 1
        else:
            words.append(_word(line, fields, len(words) + 1, labelled=labelled))
            empty = 0
    if not words:
        _refuse(rows[0], "begins a sentence without words")
    if last is not None and covered > len(words):
        _refuse(last, f"the multiword token ends at word {covered}, the last word is {len(words)}")
    return words


def _word(line: Line, fields: list[str], number: int, *, labelled: bool) -> _Word:
    form, upos, head, relation = (
        fields[FIELDS.index(x)] for x in ("FORM", "UPOS", "HEAD", "DEPREL")
    )
    if fields[0] != str(number):
        _refuse(
            line,
            f"the ID {fields[0]!r} must be {number}, the number of the word in its sentence, a "
            f"multiword token such as {number}-{number + 1}, or an empty node such as "
            f"{number - 1}.1",
        )
    if not form or form != form.strip():
        _refuse(line, f"the FORM {form!r} must have characters, and no space around them")
    if not labelled:
        return _Word(line, form, "X", 0, "_")
    upos = "X" if upos == "_" else upos  # which parsers leave open
    if upos not in UPOS:
        _refuse(line, f"the UPOS {upos!r} must be one of {', '.join(UPOS)}")
    if head != "0" and not _NUMBER.fullmatch(head):
        _refuse(line, f"the HEAD {head!r} must be the number of a word, or 0 of the root")
    if not relation.strip("_") or " " in relation:
        _refuse(
            line,
            f"the DEPREL {relation!r} must name the relation to the head, such as nsubj, without "
            "spaces",
        )
    return _Word(line, form, upos, int(head), relation)


def _check_tree(words: Sequence[_Word]) -> None:
    """Refuse heads that are not those of a tree with one root."""
    for word in words:
        if word.head > len(words):
            _refuse(
                word.line, f"the HEAD {word.head} must be from 0 to {len(words)}, the last word"
            )
    roots = [word for word in words if word.head == 0]
    if len(roots) > 1:
        _refuse(roots[1].line, "the HEAD 0 is that of an earlier word too: a tree has one root")
    below = {0}  # numbers of words from which the root is reached
    for number in range(1, len(words) + 1):
        path: list[int] = []
        at = number
        while at not in below:
            if at in path:
                circle = ", ".join(map(str, path[path.index(at) :]))
                _refuse(
                    words[at - 1].line,
                    f"the HEAD {words[at - 1].head} closes a circle (words {circle}): heads must "
                    "lead to the root, whose HEAD is 0",
                )
            path.append(at)
            at = words[at - 1].head
        below.update(path)


def _refuse(line: Line, what: str) -> NoReturn:
    raise InputError(f"line {line.number}: {what}")


Offsets = npt.NDArray[np.int32]
NO_WORD = -1


def words_of_tokens(words: Sequence[str], offsets: Offsets) -> npt.NDArray[np.int64]:
    """The word that each token is a piece of.

    A token that begins with a space, as those of SentencePiece do, belongs to the word behind it.

    Args:
        words: Words of a sentence, which the encoder read with a space between them.
        offsets: (tokens, 2) characters [start, end) of each token; −1 −1 of special ones.

    Returns:
        (tokens,) index of the word; `NO_WORD` of special tokens and of what stands for a space
        alone.
    """
    text = " ".join(words)
    # of every character its word; of a space between two words the next character that is none
    lengths = np.array([len(word) + 1 for word in words])
    word_of = np.append(np.repeat(np.arange(len(words)), lengths)[: len(text)], NO_WORD)
    solid = np.array([not letter.isspace() for letter in text] + [True])
    position = np.where(solid, np.arange(len(solid)), len(text))
    following = np.minimum.accumulate(position[::-1])[::-1]
    start, end = offsets[:, 0].clip(0), offsets[:, 1]
    first = following[start]
    word_of_token: npt.NDArray[np.int64] = np.where(first < end, word_of[first], NO_WORD)
    return word_of_token


def is_cut(text: str, offsets: Offsets, max_length: int) -> bool:
    """Whether a window is full before its text ends.

    Args:
        text: Text of the sentence.
        offsets: (tokens, 2) characters of each token; −1 −1 of special ones.
        max_length: most tokens of a window.
    """
    return len(offsets) >= max_length and int(offsets[:, 1].max()) < len(text)


log = logging.getLogger(__name__)

TREEBANK = "treebank"
"""Name of the task, and of its data set in a workspace."""
SPLITS = ("train", "dev", "test")


class TreebankTask(FeaturesTask):
    """Sentences with their trees, which are no labels of windows: an encoder is looked at alone."""

    words = ("sentences", "sentences")
    refusal = (
        "no encoder and no head can be trained on {name}, whose labels are those of words: use "
        "`bertvision structure`"
    )
    item: ClassVar[Any] = ParsedSentence
    schema: ClassVar[Mapping[str, Any]] = {
        "id": pa.string(),
        "text": pa.string(),
        "words": pa.list_(pa.string()),
        "upos": pa.list_(pa.string()),
        "heads": pa.list_(pa.int32()),
        "relations": pa.list_(pa.string()),
    }

    def splits(self, source: str) -> tuple[str, ...]:
        """The members of `SPLITS` that a folder holds; that of a file by its name, else ``all``.

        Raises:
            InputError: it is neither, or the folder holds none.
        """
        path = Path(source)
        if path.is_file():
            last = re.split("[-_.]", path.name.removesuffix(".gz").removesuffix(".conllu"))[-1]
            return (last if last in SPLITS else "all",)
        splits = tuple(split for split in SPLITS if only_file(path, _patterns(split), split))
        if not splits:
            self._find(source, SPLITS[0])  # says what lacks
        return splits

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the file of a split, or a file as any.

        Raises:
            InputError: it is missing or malformed; names file, line and value.
        """
        return self._sentences(self._find(source, split), config)

    def read_unlabelled(self, path: Path, config: TaskConfig) -> list[ParsedSentence]:
        """Read the words of a file's sentences alone (see `parse`).

        Raises:
            InputError: it is missing or malformed; names file, line and value.
        """
        return list(self._sentences(path, config, labelled=False).items)

    def _sentences(self, path: Path, config: TaskConfig, *, labelled: bool = True) -> TaskData:
        text, digest = read_text(path)
        collected = Collector(str(path), skip_bad=config.skip_bad, noun="sentence")
        for block in blocks(text):
            sentence = None
            with collected.part(""):
                sentence = parse(block, labelled=labelled)
            if sentence is not None:
                with collected.part(place := f"line {block.lines[0].number}"):
                    collected.take(sentence, place)
        return collected.data(digest)

    def windows(
        self, items: Sequence[ParsedSentence], tokenizer: Any, config: TaskConfig
    ) -> Windows:
        """One window for each sentence, in their order; says how many are cut off."""
        sentences = [Sentence(item.id, item.text) for item in items]
        windows = sentence_windows(sentences, tokenizer, max_length=config.max_length)
        ends = windows.first_token + windows.n_tokens
        cut = sum(
            is_cut(item.text, windows.offset_mapping[begin:end], config.max_length)
            for item, begin, end in zip(items, windows.first_token, ends, strict=True)
        )
        if cut:
            log.warning(
                "%d of %s have more than %d tokens and are cut off: they are left out where whole "
                "trees are needed; --max-length, where the data are first named, makes room",
                *(cut, counted(len(items), "sentence"), config.max_length),
            )
        return replace(windows, labels={})

    def _find(self, source: str, split: str) -> Path:
        path = Path(source)
        if path.is_file():
            return path
        if not path.is_dir():
            raise InputError(
                f"{source}: there is no such file or folder, which {self.name} is to be read of"
            )
        if (file := only_file(path, _patterns(split), split)) is None:
            raise InputError(
                f"{source}: holds no {split}.conllu, nor a file like en_ewt-ud-{split}.conllu (or "
                f"the same with .gz), to read {self.name} from"
            )
        return file


def _patterns(split: str) -> list[str]:
    """Names of the file of a split: ``train.conllu`` or ``…-train.conllu``."""
    return [f"{split}.conllu", f"*[-_]{split}.conllu"]
