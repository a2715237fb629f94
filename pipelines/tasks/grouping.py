"""Groups of items that stay together when a part of the data is held out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable


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
    often = Counter(word for found in words.values() for word in set(found))
    sentences = defaultdict[str, list[tuple[str, str]]](list)  # by word: (with spaces around, text)
    owner = {}
    for text in sorted(words, key=lambda text: (-len(words[text]), text)):
        spaced = f" {' '.join(words[text])} "
        rarest = min(words[text], key=lambda word: (often[word], word), default="")
        owner[text] = next((other for held, other in sentences[rarest] if spaced in held), text)
        if owner[text] == text:
            for word in set(words[text]):
                sentences[word].append((spaced, text))
    return owner
