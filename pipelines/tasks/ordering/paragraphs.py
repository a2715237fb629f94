"""Paragraphs as lists of sentences: a text of one's own, or the contexts of SQuAD's questions.

A text, ``train.txt``, has a sentence in each line and a blank line between paragraphs. Contexts,
``train.json`` as SQuAD ships it, are parted behind ``.``, ``!`` and ``?`` where a capital follows.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.source import read_text
from bertvision.pipelines.tasks.squad.sources import read_squad

log = logging.getLogger(__name__)
MOST_SENTENCES = 30
"""Sentences of the longest paragraph that is taken."""
_END = re.compile(r"(?<=[.!?])\s+(?=[\"“‘'(\[]?[A-Z])")


class Paragraph(NamedTuple):
    """A paragraph whose order is to be found."""

    id: str
    sentences: tuple[str, ...]
    """In their right order."""

    @property
    def text(self) -> str:
        """The whole, in the right order."""
        return " ".join(self.sentences)

    @property
    def label(self) -> str:
        """The right answer, as predictions are written: ``0 1 2``."""
        return " ".join(map(str, range(len(self.sentences))))

    @property
    def shown(self) -> tuple[int, ...]:
        """The right position of each sentence, in the order in which an encoder sees them.

        It follows from the text alone, so that every system is given the same.
        """
        seed = hashlib.sha256(self.text.encode()).digest()[:8]
        random = np.random.default_rng(int.from_bytes(seed, "big"))
        return tuple(random.permutation(len(self.sentences)).tolist())


def read_paragraphs(path: Path, *, skip_bad: bool = False) -> TaskData:
    """Read a file.

    Paragraphs of one sentence, of more than `MOST_SENTENCES`, or with a sentence twice have no one
    order that could be found: they are left out, and how many there are is said.

    Args:
        path: ``….txt`` or ``….json``, perhaps with ``.gz``.
        skip_bad: leave malformed questions of SQuAD out.

    Raises:
        InputError: the file is malformed, or no paragraph is left.
    """
    if Path(path.name.removesuffix(".gz")).suffix == ".json":
        data = read_squad(path, skip_bad=skip_bad)
        contexts = dict.fromkeys(question.context for question in data.questions)
        found, digest = [_END.split(" ".join(x.split())) for x in contexts], data.sha256
    else:
        text, digest = read_text(path)
        found = [*_blocks(text)]
    items = [
        Paragraph(f"paragraph {i}", tuple(sentences))
        for i, sentences in enumerate(found, 1)
        if 2 <= len(sentences) <= MOST_SENTENCES and len(set(sentences)) == len(sentences)
    ]
    why = (
        f"{len(found) - len(items)} of {counted(len(found), 'paragraph')} in {path} have one "
        f"sentence, more than {MOST_SENTENCES}, or the same one twice, and no order to be found"
    )
    if not items:
        raise InputError(
            f"{why}: none is left; a text has a sentence in each line, and a blank "
            "line between paragraphs"
        )
    if len(items) < len(found):
        log.warning("%s: they are left out", why)
    return TaskData(items, digest, [])


def _blocks(text: str) -> Iterator[list[str]]:
    """The paragraphs of a text, a sentence in each line."""
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        if sentences := [line.strip() for line in block.split("\n") if line.strip()]:
            yield sentences
