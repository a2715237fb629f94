"""Cloze items: texts with one masked word, what belongs there, and what else it is chosen from.

A file has one JSON object a line (``.jsonl``, or ``.jsonl.gz``). `Item` says what may be in it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError, model_validator

from bertvision.errors import InputError
from bertvision.pipelines.records import Settings, what_is_wrong
from bertvision.pipelines.tasks.source import read_text, text_lines

MASK = "[MASK]"
"""Stands for the masked word in every file; each tokenizer has its own."""

_Text = Annotated[str, Field(min_length=1)]


class Item(Settings):
    """A text in which one word is asked for."""

    text: _Text
    """With `MASK` once."""
    answer: _Text
    """The word that belongs there."""
    wrong: _Text | None = None
    """The one other word it is chosen from, such as the verb in the other number."""
    candidates: Annotated[tuple[_Text, ...], Field(min_length=2)] | None = None
    """All words it is chosen from, the answer among them. Where neither they nor ``wrong`` are
    given, these are the answers of all such items of the file."""
    negated: _Text | None = None
    """A text with `MASK` that denies what ``text`` says: there the answer does not belong."""
    group: _Text = "all"
    """What it is counted with: a relation, or a kind of sentence."""
    id: str = ""
    """What it is called in messages; by default by its line."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Item:
        for name, text in (("text", self.text), ("negated", self.negated or MASK)):
            if (times := text.count(MASK)) != 1:
                raise ValueError(f"{name}: holds {MASK} {times} times, once is due")
        if self.wrong is not None and self.candidates is not None:
            raise ValueError("wrong: stands beside candidates; give one of the two")
        if self.wrong == self.answer:
            raise ValueError(f"wrong: is the answer itself, {self.answer!r}")
        if self.candidates is not None and self.answer not in self.candidates:
            raise ValueError(f"candidates: do not hold the answer, {self.answer!r}")
        return self


class Items(NamedTuple):
    """A set of items."""

    name: str
    """What it is called in titles: that of the file without its ending."""
    sha256: str
    """Digest of what they were read or made from, in hex."""
    items: tuple[Item, ...]
    """In order, each with an id."""

    def choices(self) -> list[tuple[str, ...]]:
        """For each item the words that are chosen from, each once."""
        free = [i.answer for i in self.items if i.wrong is None and i.candidates is None]
        common = tuple(dict.fromkeys(free))
        found = []
        for item in self.items:
            pair = None if item.wrong is None else (item.answer, item.wrong)
            found.append(pair or tuple(dict.fromkeys(item.candidates or common)))
        return found


def read_items(path: Path) -> Items:
    """Read a file of items.

    Raises:
        InputError: it cannot be read, holds no item or two of the same id, or a line is malformed;
            names the line and the field.
    """
    name = path.name.removesuffix(".gz")
    if not name.endswith(".jsonl"):
        raise InputError(
            f"{path}: items are read of JSON lines: give a file that ends in .jsonl or .jsonl.gz, "
            "or agreement, for sentences that are made here"
        )
    text, digest = read_text(path)
    items = []
    for line in text_lines(text):
        try:
            item = Item.model_validate_json(line.text, strict=True)
        except ValidationError as error:
            raise InputError(f"{path}, line {line.number}: {what_is_wrong(error)}") from error
        items.append(item.model_copy(update={"id": item.id or f"line {line.number}"}))
    ident, times = Counter(item.id for item in items).most_common(1)[0]
    if times > 1:
        raise InputError(f"{path}: the id {ident!r} is that of {times} items: each has its own")
    return Items(name.removesuffix(".jsonl"), digest, tuple(items))
