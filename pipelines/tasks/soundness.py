"""Contradicting texts, texts on both sides of a split, and groups of items that stay together."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from bertvision.pipelines.records import Count, Record

log = logging.getLogger(__name__)

_SERIOUS: Final = 0.05
_SHOWN, _LONGEST = 3, 60  # texts in a message, and characters of each
_ORDER: Final = ("train", "tune", "dev", "test")

Example = tuple[Hashable, Hashable | None]
"""A text or a pair of them, and its label; None without a label."""


class SplitSoundness(Record):
    """Examples of a split that no classifier can learn, or may have learned by heart."""

    rows: Count
    """Items of the split."""
    contradicting: Count
    """Items whose text stands under another label too, in the same split."""
    ceiling: float | None
    """Highest accuracy, in per cent of the labelled items, that a classifier of the texts can have;
    None where labels are scores or missing."""
    shared: dict[str, Count]
    """Items whose text is in another split too, by that split: those before it in `_ORDER`."""

    @property
    def is_doubtful(self) -> bool:
        """Whether more than a twentieth of the items contradict others or are in another split."""
        return max([self.contradicting, *self.shared.values()]) > _SERIOUS * self.rows


def report_skipped(split: str, skipped: Sequence[str]) -> None:
    """Say how many malformed parts of a split were left out, and the first of them.

    Args:
        split: its name.
        skipped: Faults of the rows that were left out.
    """
    if skipped:
        log.warning(
            "skipped %d malformed parts of %s, the first: %s", len(skipped), split, skipped[0]
        )


def soundness(splits: Mapping[str, Iterable[Example]]) -> dict[str, SplitSoundness]:
    """Count the contradictions of each split, and the texts that it shares with those before it.

    Splits of other names than `_ORDER` are parts of no whole, and are not compared.

    Args:
        splits: Examples of each split, by name.
    """
    soundness_of, before = {}, dict[str, set[Hashable]]()
    for name in sorted(splits, key=lambda x: _ORDER.index(x) if x in _ORDER else len(_ORDER)):
        labels: defaultdict[Hashable, Counter[Hashable]] = defaultdict(Counter)
        rows = list(splits[name])
        for text, label in rows:
            labels[text][label] += 1
        known = [+Counter({k: n for k, n in c.items() if k is not None}) for c in labels.values()]
        total = sum(c.total() for c in known)
        classified = total > 0 and not any(isinstance(k, float) for c in known for k in c)
        best = sum(max(c.values(), default=0) for c in known)
        compared = before if name in _ORDER else {}
        soundness_of[name] = SplitSoundness(
            rows=len(rows),
            contradicting=sum(c.total() for c in known if len(c) > 1),
            ceiling=100 * best / total if classified else None,
            shared={
                other: sum(text in texts for text, _ in rows) for other, texts in compared.items()
            },
        )
        if name in _ORDER:
            before[name] = set(labels)
    return soundness_of


def doubts(splits: Mapping[str, SplitSoundness]) -> str:
    """Doubts about data, in numbers; empty where there are none."""
    parts = []
    for name, split in splits.items():
        rows_text = f"of {split.rows:,} rows of {name}"
        if split.contradicting:
            most = ""
            if split.ceiling is not None:
                most = f" (no classifier can be right on more than {split.ceiling:.1f} % of it)"
            parts.append(f"{split.contradicting:,} {rows_text} have a text under two labels{most}")
        parts += [
            f"{count:,} {rows_text} have a text that is in {other} too"
            for other, count in split.shared.items()
            if count
        ]
    return "; ".join(parts)


def is_doubtful(splits: Mapping[str, SplitSoundness]) -> bool:
    """Whether scores of the data say little: a split is doubtful, see `SplitSoundness`."""
    return any(split.is_doubtful for split in splits.values())


def sharing(
    texts: Callable[[Any], tuple[str, ...]], items: Sequence[Any], others: Sequence[Any]
) -> list[str | None]:
    """A text that each item has in common with others, whatever its case and its spaces.

    Args:
        texts: The texts of an item, as `Task.texts`.
        items: Items of a split.
        others: Items of another split.

    Returns:
        Of each item the text, or None.
    """
    plain = cache(_plain)  # contexts of SQuAD are those of many questions
    there = {plain(text) for item in others for text in texts(item)}
    return [next((text for text in texts(item) if plain(text) in there), None) for item in items]


def report_shared(
    texts: Callable[[Any], tuple[str, ...]],
    train: Sequence[Any],
    dev: Sequence[Any],
    advice: str = "",
) -> None:
    """Warn of texts that are in train and in dev, with their number and examples.

    Args:
        texts: The texts of an item, as `Task.texts`.
        train: Items of train.
        dev: Items of dev.
        advice: End of the message.
    """
    shared_texts = [text for text in sharing(texts, dev, train) if text is not None]
    if not shared_texts:
        return
    shown = ", ".join(repr(_cut(text)) for text in list(dict.fromkeys(shared_texts))[:_SHOWN])
    log.warning(
        "%s of %s rows of dev have a text that is in train too (such as %s), so that scores are "
        "higher than of new texts%s",
        *(f"{len(shared_texts):,}", f"{len(dev):,}", shown, advice),
    )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def report_doubts(
    name: str, splits: Mapping[str, Sequence[Example]], *, together: bool = True
) -> None:
    """Say once, of new data, what is wrong with them: a warning where it is doubtful, else a note.

    Args:
        name: Name of the data set.
        splits: As in `soundness`.
        together: Whether splits are compared; else each is looked at by itself.
    """
    checked = soundness(splits)
    if not together:
        checked = {split: soundness({split: splits[split]})[split] for split in checked}
    if text := doubts(checked):
        level = logging.WARNING if is_doubtful(checked) else logging.INFO
        log.log(level, "the data of %s contradict themselves or overlap: %s", name, text)


def linked(items: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """The groups of items that share a text, with one another or through others.

    Args:
        items: the texts of each.

    Returns:
        By text, the first text of its group in the order of characters: the same whatever the
        order of the items.
    """
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        while parent.setdefault(text, text) != text:
            parent[text] = text = parent[parent[text]]
        return text

    for first, *others in items:
        for other in (first, *others):
            one, two = sorted((root(first), root(other)))
            parent[two] = one
    return {text: root(text) for text in parent}


def containing(texts: Iterable[str]) -> dict[str, str]:
    """The sentence that each phrase is a part of, whole words in a row, among the texts.

    A phrase that several sentences contain, such as a single word, belongs to the longest: if it
    joined them, all sentences would be one.

    Returns:
        By text, the text that contains it and is itself part of no other; of equally long ones the
        first in the order of characters.
    """
    words = {text: text.split() for text in texts}
    often = Counter(word for words_of_text in words.values() for word in set(words_of_text))
    sentences = defaultdict[str, list[tuple[str, str]]](list)  # by word: (with spaces around, text)
    owner = {}
    for text in sorted(words, key=lambda text: (-len(words[text]), text)):
        spaced = f" {' '.join(words[text])} "
        rarest = min(words[text], key=lambda word: (often[word], word), default="")
        owner[text] = next(
            (other for words_there, other in sentences[rarest] if spaced in words_there), text
        )
        if owner[text] == text:
            for word in set(words[text]):
                sentences[word].append((spaced, text))
    return owner
