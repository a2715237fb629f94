"""Rows of a source → sentences with labels, each row checked, an error naming its line."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskData

MAX_CHARACTERS = 500_000
"""The longest sentence taken, in characters."""

_Row = TypeVar("_Row")


class _HasNumber(Protocol):
    @property
    def number(self) -> int: ...


_Numbered = TypeVar("_Numbered", bound=_HasNumber)


class RawSentence(NamedTuple):
    """A row as it was written, before its label is looked up."""

    id: str
    text: str
    pair: str | None
    label: str | None
    extra: Any = None
    """Further fields that a task reads of the row (see `SentenceRows.extras`)."""


class SentenceRows:
    """Collects the sentences of one split of one source, and what was skipped.

    Args:
        source: what messages begin with, such as the path of the file.
        skip_bad: leave malformed rows out and list them, instead of refusing the source.
        empty: whether a text may be empty.
    """

    def __init__(self, source: str, *, skip_bad: bool, empty: bool = False) -> None:
        self.source = source
        self.skip_bad = skip_bad
        self.empty = empty
        self.skipped: list[str] = []
        self._rows: list[tuple[str, RawSentence]] = []
        self._first: dict[str, str] = {}  # id → place

    def add(
        self, rows: Iterable[tuple[str, _Row]], parse: Callable[[_Row], RawSentence | None]
    ) -> SentenceRows:
        """Parse rows and check their texts and ids.

        Args:
            rows: (place, such as ``line 3``; row).
            parse: makes a sentence of a row, or None of a row that is of another split; raises
                `InputError` where it cannot.

        Raises:
            InputError: a row is malformed, and is not to be skipped; or no row is left.
        """
        for place, row in rows:
            with self._row(place):
                raw = parse(row)
                if raw is None:
                    continue
                if first := self._first.get(raw.id):
                    raise InputError(f"the id {raw.id!r} is already that of {first}")
                checked = raw._replace(
                    text=self._text(raw.text, "text"),
                    pair=None if raw.pair is None else self._text(raw.pair, "second text"),
                    label=raw.label and raw.label.strip(),
                )
                self._first[raw.id] = place
                self._rows.append((place, checked))
        self._require(self._rows)
        return self

    def add_lines(
        self, lines: Iterable[_Numbered], parse: Callable[[_Numbered], RawSentence | None]
    ) -> SentenceRows:
        """As `add`, of the lines of a file, or of what begins on them.

        Args:
            lines: with ``number``.
            parse: as in `add`.

        Raises:
            InputError: as in `add`.
        """
        return self.add(((f"line {line.number}", line) for line in lines), parse)

    @property
    def labels(self) -> set[str]:
        """The distinct labels, as they are written."""
        return {raw.label for _, raw in self._rows if raw.label}

    @cached_property
    def extras(self) -> dict[str, Any]:
        """Further fields of the rows that were taken, by id."""
        return {raw.id: raw.extra for _, raw in self._rows}

    def classified(
        self, classes: Sequence[str], digest: str | None, also: Mapping[str, int] | None = None
    ) -> TaskData:
        """The sentences, labelled by the index of their class.

        Args:
            classes: names, in the order of their indices.
            digest: of the source's bytes; None takes that of the rows.
            also: other ways in which a source may write a class → its index.

        Raises:
            InputError: a label is missing or no class, and is not to be skipped; or no row is left.
        """
        known = {**(also or {}), **{name: i for i, name in enumerate(classes)}}

        def index(label: str) -> int:
            if label not in known:
                named = ", ".join(classes[:10]) + (", …" if len(classes) > 10 else "")
                raise InputError(
                    f"the label {label!r} is none of the {len(classes)} classes: {named}"
                )
            return known[label]

        return self._labelled(index, digest, tuple(classes))

    def scored(self, digest: str | None) -> TaskData:
        """The sentences, labelled by a score.

        Args:
            digest: of the source's bytes; None takes that of the rows.

        Raises:
            InputError: a score is missing or no finite number, and is not to be skipped; or no row
                is left.
        """
        return self._labelled(_number, digest, ())

    def _labelled(
        self, value: Callable[[str], int | float], digest: str | None, classes: tuple[str, ...]
    ) -> TaskData:
        items = []
        for place, raw in self._rows:
            with self._row(place):
                if not raw.label:
                    raise InputError("has no label")
                items.append(Sentence(raw.id, raw.text, raw.pair, value(raw.label)))
        self._require(items)
        return TaskData(items, digest or _digest(items), self.skipped, classes)

    @contextmanager
    def _row(self, place: str) -> Iterator[None]:
        """Put source and place in front of an error, or skip the row."""
        try:
            yield
        except InputError as error:
            message = f"{self.source}, {place}: {error}"
            if not self.skip_bad:
                raise InputError(f"{message}. --skip-bad leaves such rows out") from error.__cause__
            self.skipped.append(message)

    def _require(self, rows: Sequence[object]) -> None:
        if not rows:
            why = f" after skipping {len(self.skipped)}: {self.skipped[0]}" if self.skipped else ""
            raise InputError(f"{self.source}: holds no rows{why}")

    def _text(self, text: str, what: str) -> str:
        """A text without spaces around it, which some tokenizers would take for tokens."""
        text = text.strip()
        if not text and not self.empty:
            raise InputError(f"the {what} is empty")
        if len(text) > MAX_CHARACTERS:
            raise InputError(
                f"the {what} has {len(text):,} characters, but at most {MAX_CHARACTERS:,} are taken"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the {what} has the lone surrogate {text[error.start]!r} at character "
                f"{error.start}, which is no Unicode text"
            ) from error
        return text


def require_fields(found: list[str], names: Sequence[str]) -> list[str]:
    """Return the fields of a row if there is one for each name.

    Raises:
        InputError: there are more or fewer.
    """
    if len(found) != len(names):
        raise InputError(f"has {len(found)} fields, expected are {len(names)}: {', '.join(names)}")
    return found


def sorted_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: as numbers where all of them are integers, else by their characters."""
    distinct = set(labels)
    try:
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(distinct))


def _number(label: str) -> float:
    try:
        score = float(label)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise InputError(f"the score {label!r} is no finite number")
    return score


def _digest(items: Sequence[Sentence]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item, separators=(",", ":")).encode())
    return digest.hexdigest()
