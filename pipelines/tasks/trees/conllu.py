"""CoNLL-U, version 2: sentences of words with a part of speech, a head and a relation each.

The format is that of Universal Dependencies (Nivre et al. 2020, LREC;
https://universaldependencies.org/format.html): ten fields between tabs in a line, comments in front
of a sentence, a blank line behind it. What is read are the *syntactic words* and the basic tree
over them. The lines of multiword tokens (``3-4``), which repeat the spelling of words that follow,
and of empty nodes (``8.1``), which the enhanced graph alone has, are checked and left out, and so
is the column DEPS of enhanced dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from bertvision.errors import InputError
from bertvision.pipelines.tasks.source import Line

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


def parse(block: Block) -> ParsedSentence:
    """Read a sentence.

    Args:
        block: its lines.

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
    words = _words(rows)
    _check_tree(words)
    named = [found[1] for line in comments if (found := _SENT_ID.fullmatch(line.text))]
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


def _words(rows: Sequence[Line]) -> list[_Word]:
    """The words of a sentence; lines of multiword tokens and empty nodes are checked alone."""
    words: list[_Word] = []
    covered, empty = 0, 0
    last: Line | None = None
    for line in rows:
        fields = line.text.split("\t")
        if len(fields) != len(FIELDS):
            have = f"has {len(fields)} field{'s' * (len(fields) != 1)} between tabs"
            _refuse(line, f"{have}, a word has {len(FIELDS)}: {', '.join(FIELDS)}")
        if found := _RANGE.fullmatch(fields[0]):
            begin, covers = int(found[1]), int(found[2])
            if begin != len(words) + 1 or begin <= covered or covers < begin:
                what = f"begin at the next word, {len(words) + 1}, and end where it begins or later"
                _refuse(line, f"the multiword token {fields[0]!r} must {what}, outside of others")
            covered, last = covers, line
        elif found := _EMPTY.fullmatch(fields[0]):
            if (int(found[1]), int(found[2])) != (len(words), empty + 1):
                _refuse(
                    line,
                    f"the empty node {fields[0]!r} must be {len(words)}.{empty + 1} at its place",
                )
            empty += 1
        else:
            words.append(_word(line, fields, len(words) + 1))
            empty = 0
    if not words:
        _refuse(rows[0], "begins a sentence without words")
    if last is not None and covered > len(words):
        _refuse(last, f"the multiword token ends at word {covered}, the last word is {len(words)}")
    return words


def _word(line: Line, fields: list[str], number: int) -> _Word:
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
