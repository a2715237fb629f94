"""Names: those that become paths (snapshots, splits, heads), and those of what can be chosen.

Nothing heavy is imported here: the command line lists them.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from bertvision.errors import InputError

CompressionName = Literal["none", "zstd", "pcodec"]
NonFinite = Literal["error", "record"]
"""Treatment of NaN and infinity: refuse them, or replace and count them (see `encode`)."""

_TAG = re.compile(r"(?:0|[1-9]\d{0,5})(?:\.\d{1,6})?e", re.ASCII)
_UNTRAINED = "untrained"
_PRETRAINED = "0e"
_WORD = re.compile(r"[a-z][a-z0-9_]{0,62}", re.ASCII)  # no hyphen: it parts names that tags begin
_NO_TAG = re.compile(r"store|report", re.ASCII)  # what else `push` sends
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.ASCII)
_DEVICE = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9]", re.ASCII)  # no folders, on Windows


class SnapshotTag(str):
    """The encoder at a point of fine-tuning: ``0e`` is pretrained, then ``0.3e``, ``1e``.

    Tags are ordered as numbers. One fraction has one tag: ``1.0e`` and ``0.30e`` are refused in
    favour of ``1e`` and ``0.3e``, so that two folders never mean the same snapshot. ``untrained``
    is the encoder's twin with random weights; it comes before ``0e``. ``2e+3e`` is the mean of the
    weights of two or more snapshots, and comes behind the last of them. A word, such as ``main`` or
    ``step1000``, names another checkpoint of the same model, not fine-tuned; words come between
    ``untrained`` and ``0e``, ``step512`` before ``step1000``.

    Raises:
        InputError: the text is not a tag in canonical form.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> SnapshotTag:  # noqa: D102
        other = _DEVICE.fullmatch(text) or _NO_TAG.fullmatch(text)
        if text == _UNTRAINED or (_WORD.fullmatch(text) and not other):
            return str.__new__(cls, text)
        fractions = text.split("+")
        if not all(map(_TAG.fullmatch, fractions)):
            raise InputError(
                f"{text!r} is not a snapshot tag: write the fraction of an epoch and 'e', "
                "such as 0e, 0.3e, 1e or 2e, or 2e+3e for their mean, or untrained; another "
                "checkpoint has a word, a letter and then a-z, 0-9 and '_', such as step1000"
            )
        canonical = "+".join(
            _canonical(fraction)
            for fraction in sorted({float(fraction[:-1]) for fraction in fractions})
        )
        if canonical != text:
            raise InputError(f"{text!r} is not in canonical form: write {canonical}")
        return str.__new__(cls, text)

    @classmethod
    def is_valid(cls, text: str) -> bool:
        """Whether the text is a tag in canonical form."""
        try:
            cls(text)
        except InputError:
            return False
        return True

    @classmethod
    def of(cls, fraction: float) -> SnapshotTag:
        """The tag of a fraction of an epoch (``0.3`` → ``0.3e``, ``1`` → ``1e``), to 1e-6."""
        return cls(_canonical(fraction))

    @property
    def is_untrained(self) -> bool:
        """Whether it is the twin with random weights."""
        return str.__eq__(self, _UNTRAINED)

    @property
    def is_pretrained(self) -> bool:
        """Whether it is the encoder that fine-tuning begins with, ``0e``."""
        return str.__eq__(self, _PRETRAINED)

    @property
    def is_named(self) -> bool:
        """Whether it is another checkpoint of the model, by a word such as ``step1000``."""
        return self[0].isalpha() and not self.is_untrained

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean of other snapshots."""
        return "+" in self

    @property
    def parts(self) -> tuple[SnapshotTag, ...]:
        """The snapshots that it is the mean of; of any other it alone."""
        return tuple(map(SnapshotTag, self.split("+"))) if self.is_mean else (self,)

    @property
    def fraction(self) -> float:
        """The fraction of an epoch, as a number, of a mean its last part's.

        It is 0 where nothing was fine-tuned, and −1 of ``untrained``.
        """
        if self.is_named:
            return 0.0
        return -1.0 if self.is_untrained else float(self.split("+")[-1][:-1])

    def step(self, steps_per_epoch: int) -> int:
        """The optimiser step at which the snapshot is taken: round(fraction × steps per epoch)."""
        return round(self.fraction * steps_per_epoch)

    @property
    def place(self) -> tuple[Any, ...]:
        """Key by which tags are ordered; ``()`` lies before all."""
        if self.is_named:  # words, and the numbers in them as numbers
            words = re.split(r"(\d+)", self)
            parts = tuple(int(word) if word.isdigit() else word for word in words)
            return -0.5, parts, str(self)  # at last the text: 01 is 1
        return self.fraction, *(part.fraction for part in self.parts if self.is_mean)

    def __lt__(self, other: str) -> bool:
        return self.place < SnapshotTag(other).place

    def __le__(self, other: str) -> bool:
        return self.place <= SnapshotTag(other).place

    def __gt__(self, other: str) -> bool:
        return self.place > SnapshotTag(other).place

    def __ge__(self, other: str) -> bool:
        return self.place >= SnapshotTag(other).place


def _canonical(fraction: float) -> str:
    return f"{fraction:.6f}".rstrip("0").rstrip(".") + "e"


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it is safe as a folder name of a split, head or task.

    Raises:
        InputError: it is not 1 to 63 of a-z, 0-9, ``_``, ``-``, or begins with ``_`` or ``-``, or
            is the name of a device such as ``nul``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _DEVICE.fullmatch(name):
        raise InputError(
            f"{name!r} is not a {what} name: use 1 to 63 of a-z, 0-9, '_' and '-', "
            "beginning with a letter or digit, and no name of a device such as con or nul"
        )
    return name
