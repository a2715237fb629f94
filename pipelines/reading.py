"""Arguments of jobs, read: texts with commas as on the command line, or sequences.

The names that splits are stored under are read into their parts: data set, split, sites, pooling.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from bertvision.errors import InputError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.poolings import (
    TokenPooling,
    check_pooling,
    file_part,
    from_file_part,
)

StrPath = str | os.PathLike[str]
Names = str | Iterable[str]
"""``"train,dev"`` or ``["train", "dev"]``."""
Tag = str | float
"""``"0.3e"``, ``"0.3"`` or 0.3."""
Tags = Tag | Iterable[Tag]
Numbers = str | float | Iterable[float]

Indices = str | int | Iterable[int]
"""``"3,17"``, 3 or ``[3, 17]``."""
Layers = Indices
"""Indices, or ``"all"``."""


def parse_names(value: Names) -> list[str]:
    """``train,dev``, or several of such → names."""
    names = [value] if isinstance(value, str) else value
    return [part.strip() for text in names for part in str(text).split(",")]


def parse_tags(value: Tags) -> tuple[str, ...]:
    """``0.1,0.3e,1,0.3+1`` → tags.

    Raises:
        InputError: a part is neither a fraction of an epoch nor a word such as ``step1000``.
    """
    texts = [value] if isinstance(value, float | int) else _texts(value)
    return tuple(
        SnapshotTag("+".join(_fraction(part) for part in str(text).strip().split("+")))
        for text in texts
    )


def _fraction(text: str) -> str:
    """``0.3`` → ``0.3e``; what has its form stays."""
    if text.endswith("e") or SnapshotTag.is_valid(text):
        return text
    try:
        return SnapshotTag.of(float(text))
    except ValueError:
        raise InputError(f"{text!r} is not a fraction of an epoch: such as 0.3") from None


def parse_tag(value: Tag) -> str:
    """One tag.

    Raises:
        InputError: there are several, or it is not a fraction of an epoch.
    """
    if len(tags := parse_tags(value)) != 1:
        raise InputError(f"{value!r}: name one snapshot, such as 0.3e")
    return tags[0]


def parse_layers(value: Layers | None) -> tuple[int, ...] | None:
    """``0,6,12`` → indices of hidden states; ``all`` and None → None.

    Raises:
        InputError: a part is not a number.
    """
    if value is None or value == "all":
        return None
    return parse_indices(value, "--layers", "indices such as 0,6,12, or all")


def parse_indices(value: Indices, option: str, such_as: str) -> tuple[int, ...]:
    """``3,17`` → whole numbers.

    Args:
        value: Value that was given.
        option: Option that the message names.
        such_as: Example of what is allowed, for the message.

    Raises:
        InputError: a part is not a whole number.
    """
    try:
        return tuple(
            _whole(part) for part in ([value] if isinstance(value, int) else _texts(value))
        )
    except (TypeError, ValueError):
        raise InputError(f"{option} {value!r}: give {such_as}") from None


def parse_poolings(value: Names) -> tuple[TokenPooling, ...]:
    """``cls,mean`` → poolings, each once.

    Raises:
        InputError: one is not known.
    """
    return tuple(map(check_pooling, dict.fromkeys(parse_names(value))))


def parse_tokens(value: Names) -> tuple[TokenPooling, ...]:
    """``none`` → all tokens; else poolings.

    Raises:
        InputError: one is not known.
    """
    names = parse_names(value)
    return ("all",) if names in (["none"], ["all"]) else parse_poolings(names)


def parse_numbers(value: Numbers, option: str, such_as: str) -> tuple[float, ...]:
    """``0,0.1,1`` → numbers.

    Args:
        value: Value that was given.
        option: Option that the message names.
        such_as: Example of what is allowed, for the message.

    Raises:
        InputError: a part is not a number.
    """
    try:
        numbers = [value] if isinstance(value, float | int) else _texts(value)
        return tuple(float(part) for part in numbers)
    except (TypeError, ValueError):
        raise InputError(f"{option} {value!r}: give {such_as}") from None


def parse_fractions(value: Numbers) -> tuple[float, ...]:
    """``0,0.1,1`` → parts of the training examples.

    Raises:
        InputError: a part is not a number.
    """
    return parse_numbers(value, "--fractions", "numbers from 0 to 1, such as 0.1,1")


def parse_learning_rates(value: Numbers) -> tuple[float, ...]:
    """``1e-4,1e-3`` → numbers, in increasing order.

    Raises:
        InputError: a part is not a number above 0.
    """
    option, such_as = "--lr", "numbers above 0, such as 1e-3 or 1e-4,3e-4,1e-3"
    rates = tuple(sorted(set(parse_numbers(value, option, such_as))))
    if not rates or not 0 < rates[0] <= rates[-1] < float("inf"):
        raise InputError(f"{option} {value}: give {such_as}")
    return rates


def parse_weight_decays(value: Numbers) -> tuple[float, ...]:
    """``1e-5,1e-4`` → numbers, in increasing order.

    Raises:
        InputError: a part is not a number.
    """
    option, such_as = "--weight-decays", "numbers from 0, such as 1e-5,1e-4"
    return tuple(sorted(set(parse_numbers(value, option, such_as))))


def parse_choice(value: Any, allowed: tuple[Any, ...], option: str) -> Any:
    """The value of an option that takes one of a few.

    Raises:
        InputError: it is none of them.
    """
    if value not in allowed:
        raise InputError(f"{option} {value!r}: choose one of {', '.join(allowed)}")
    return value


def path_of(value: StrPath | None) -> Path | None:
    """A path, where one is given."""
    return None if value is None else Path(value)


def text_of(value: StrPath | None) -> str | None:
    """A path or URL as text, where one is given."""
    return None if value is None else os.fspath(value)


def _texts(value: Any) -> list[Any]:
    return value.split(",") if isinstance(value, str) else list(value)


def _whole(part: Any) -> int:
    if isinstance(part, float) and not part.is_integer():
        raise ValueError(part)
    return int(part)


READ: dict[Any, Callable[[Any], Any]] = {
    tuple[int, ...] | None: parse_layers,
    tuple[str, ...] | None: parse_names,
    tuple[TokenPooling, ...] | None: parse_tokens,
    tuple[float, ...]: parse_weight_decays,
}
"""The reader of an option, by the type of its field."""


_SITES: Final = "sites"
_SITES_PART: Final = re.compile(rf"{_SITES}[0-9]*")
_SOME = "kept"


class StoredName(NamedTuple):
    """The parts of the name that a split is stored under, none of which has a hyphen in it."""

    split: str
    """Split of the workspace or of the data set."""
    tokens: TokenPooling = "all"
    """All tokens of each window, or a pooling of them."""
    dataset: str | None = None
    """A data set beside the workspace's own, or None."""
    sites: str | None = None
    """The part that says that it holds other sites of the encoder than its hidden states
    (`sites_part`), or None."""
    some: bool = False
    """Whether it holds some tokens of each window, by a rule (`Keep`)."""

    @classmethod
    def parse(cls, name: str) -> StoredName:
        """The parts of a name.

        Raises:
            InputError: it has too many parts.
        """
        parts = name.split("-")
        pooling = from_file_part(parts[-1]) if len(parts) > 1 else None
        parts = parts[:-1] if pooling else parts
        some = len(parts) > 1 and parts[-1] == _SOME
        parts = parts[:-1] if some else parts
        sites = parts[-1] if len(parts) > 1 and _SITES_PART.fullmatch(parts[-1]) else None
        parts = parts[:-1] if sites else parts
        if len(parts) > 2:
            raise InputError(
                f"{name!r} is no stored split: write [DATA SET-]SPLIT[-{_SITES}][-{_SOME} or "
                "-POOLING], such as dev, dev-cls or bigram_shift-test-mean"
            )
        dataset = parts[0] if len(parts) > 1 else None
        return cls(parts[-1], pooling or "all", dataset, sites, some)

    @property
    def name(self) -> str:
        """As it is written: ``train``, ``dev-cls``, ``bigram_shift-test-mean``, ``dev-kept``."""
        pooling = None if self.tokens == "all" else file_part(self.tokens)
        parts = [self.dataset, self.split, self.sites]
        parts += [_SOME if self.some else None, pooling]
        return "-".join(part for part in parts if part is not None)


def sites_part(width: int, hidden_size: int) -> str:
    """The part of a split's name that says it holds sites, and their width where it is another.

    Args:
        width: Channels of the sites.
        hidden_size: Channels of the encoder's hidden states.
    """
    return _SITES if width == hidden_size else f"{_SITES}{width}"


def check_hidden_states(split: str) -> None:
    """Refuse a stored split of other sites, where hidden states are meant.

    Args:
        split: its name in the store.

    Raises:
        InputError: it is one.
    """
    first, *rest = split.split("-")
    if any(map(_SITES_PART.fullmatch, rest)):
        states = "-".join([first, *(part for part in rest if not _SITES_PART.fullmatch(part))])
        raise InputError(
            f"{split} holds sites of the encoder, and hidden states are needed: name {states}; "
            "sites are read by name, with split.read, split.dask and split.tokens (docs/sites.md)"
        )
