"""What a task reads: its items, and what is known of their source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Sentence(NamedTuple):
    """A sentence or a pair of sentences, perhaps with its label."""

    id: str
    """Unique inside its split."""
    text: str
    pair: str | None = None
    """The second sentence, of a pair."""
    label: int | float | None = None
    """Index of its class, or a score; None in data without labels."""


@dataclass(frozen=True)
class TaskData:
    """All items of a split of a source, before any selection."""

    items: list[Any]
    """Questions of SQuAD, or `Sentence`."""
    sha256: str
    """Digest of the source's bytes."""
    skipped: list[str]
    """Malformed parts that were left out, a line each."""
    classes: tuple[str, ...] = ()
    """Names of the classes; empty where there are none: spans, scores."""
    misfits: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    """Ids of items that were left out because no window holds them."""
