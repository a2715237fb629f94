"""Items of a task, and the configuration of their source.

The settings of a task, as ``bertvision.yaml`` and the records of data sets keep them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date as Date
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from bertvision.errors import InputError
from bertvision.pipelines.records import Settings
from bertvision.pipelines.tasks.registry import check_task


def as_date(text: str) -> Date:
    """A date, as YYYY-MM-DD.

    Raises:
        InputError: The text is none.
    """
    try:
        return Date.fromisoformat(text)
    except (TypeError, ValueError):
        raise InputError("write year, month and day as 2024-07-26") from None


def _check_date(text: str) -> str:
    return as_date(text).isoformat()


class TaskConfig(Settings):
    """The task, and how its items become windows."""

    name: Annotated[str, AfterValidator(check_task)] = "squad_v2"
    """``squad_v1`` never abstains; ``squad_v2`` may answer with nothing; the others: `TASKS`."""
    max_length: int = Field(386, ge=16)
    """Longest window in tokens, special tokens included."""
    max_question_length: int = Field(64, ge=1)
    overlap: int = Field(128, ge=0)
    """Context tokens that neighbouring windows of one question share."""
    answerable_only: bool = False
    """Keep only the answerable questions of every split."""
    skip_bad: bool = False
    """Leave malformed questions out instead of refusing the file."""
    skip_shared: bool = False
    """Leave out items of ``train`` that share a text with ``dev``."""
    tune_fraction: float = Field(0.05, ge=0, lt=1)
    """Part of the training items held out, for no-answer thresholds and the best epoch."""
    dev_fraction: float = Field(0.0, ge=0, lt=1)
    """Part of the training items that is ``dev``, of data that have none."""
    linked: bool = False
    """Whether items that share any text, also through others, are held out together, and the part
    is one of the items, not of the texts; false in workspaces from before this was a setting."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of their logits; none of spans and scores."""
    text: str | None = None
    """Column of a labelled file that holds the text."""
    pair: str | None = None
    """Column of its second text."""
    label: str | None = None
    """Column of its label."""
    windows: Literal["cut", "split", "pack"] = "cut"
    """Treatment of documents: a window each, cut off at its length; as many consecutive ones as
    they fill; or windows that hold several."""
    date: Annotated[str, AfterValidator(_check_date)] | None = None
    """Date that a chat template is told where it reads the clock; None is the day of reading."""


class Sentence(NamedTuple):
    """A sentence or a pair of sentences, perhaps with its label."""

    id: str
    """Unique inside its split."""
    text: str
    pair: str | None = None
    """The second sentence, of a pair."""
    label: int | float | None = None
    """Index of its class, or a score; None in data without labels."""


class Target(NamedTuple):
    """Words of a sentence, with the label that probes learn of them."""

    spans: tuple[tuple[int, int], ...]
    """One span or two, each from its first word to below the second number."""
    label: str


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
