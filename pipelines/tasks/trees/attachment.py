"""The words of a sentence that are attached right: what UAS and LAS are counted from.

A parse is written as a text, a word each: ``2:5 0:31 2:12``, the number of the head (0 of the root)
and that of the relation among the task's classes; ``_`` of a word that the encoder did not see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from bertvision.errors import WorkspaceError
from bertvision.pipelines.tasks.trees.conllu import ParsedSentence

UNSEEN = "_"


class Tree(NamedTuple):
    """A sentence with its tree, the relations as classes."""

    sentence: ParsedSentence
    labels: tuple[int, ...]
    """Class of each word's relation; −1 where the training data have none like it."""

    @property
    def id(self) -> str:
        """Name of the sentence."""
        return self.sentence.id

    @property
    def text(self) -> str:
        """The words with a space between them."""
        return self.sentence.text

    @property
    def label(self) -> str:
        """The gold parse, written as predictions are."""
        return written(self.sentence.heads, self.labels)


class Attached(NamedTuple):
    """Words of a sentence."""

    heads: int
    """Those with the right head."""
    labelled: int
    """Those with the right head and relation."""
    words: int
    """All of them, punctuation and unseen words too."""


def written(heads: Sequence[int | None], labels: Sequence[int]) -> str:
    """A parse as a text.

    Args:
        heads: number of each word's head, from 1; 0 of the root, None of an unseen word.
        labels: class of each word's relation.
    """
    pairs = zip(heads, labels, strict=True)
    return " ".join(UNSEEN if head is None else f"{head}:{label}" for head, label in pairs)


def attached(parse: str, tree: Tree) -> Attached:
    """Count the words that a parse attaches right.

    The relation must be the whole one, subtypes such as ``nmod:poss`` included, and every word
    counts, punctuation too.

    Args:
        parse: as `written` gives it.
        tree: the gold one.

    Raises:
        WorkspaceError: the parse is of another number of words.
    """
    said, gold = parse.split(" "), tree.label.split(" ")
    if len(said) != len(gold):
        raise WorkspaceError(
            f"the parse of sentence {tree.id!r} is of {len(said)} words, and it has {len(gold)}: "
            "the data or the predictions changed; make the predictions again"
        )
    heads = sum(a.split(":")[0] == b.split(":")[0] for a, b in zip(said, gold, strict=True))
    return Attached(heads, sum(a == b for a, b in zip(said, gold, strict=True)), len(gold))


def commonest_arc(trees: Sequence[Tree]) -> float:
    """Score a parser that hangs every word on the word at one distance, by one relation.

    Args:
        trees: gold ones, one word at least.

    Returns:
        LAS of the distance and relation that are right most often, in per cent; the root is a
        distance of its own.
    """
    counts, words = Counter[tuple[int | None, int]](), 0
    for tree in trees:
        words += len(tree.labels)
        for number, (head, label) in enumerate(
            zip(tree.sentence.heads, tree.labels, strict=True), 1
        ):
            if label >= 0:  # what training has not is never right
                counts[head - number if head else None, label] += 1
    return 100 * max(counts.values(), default=0) / words


def named(parse: str, classes: Sequence[str]) -> str:
    """A parse with the names of relations: ``2:nsubj 0:root 2:obj``.

    Args:
        parse: as `written` gives it.
        classes: names of the relations.
    """
    words = (word.partition(":") for word in parse.split(" "))
    return " ".join(
        head if not colon else f"{head}:{classes[int(label)] if int(label) >= 0 else '?'}"
        for head, colon, label in words
    )
