"""Groups of items that an error analysis sets side by side: by answer or class, length, wording.

Lengths are counted in words, what stands between white space, so that they do not depend on a
tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.squad.read import Question

_Item = TypeVar("_Item")

_ASKS = re.compile(r"\b(what|whom|whose|who|when|where|which|why|how(?: (?:many|much))?)\b", re.I)
_ALIKE = {"whom": "who", "whose": "who", "how many": "how many/much", "how much": "how many/much"}
_WORDS = ["what", "who", "when", "where", "which", "why", "how", "how many/much", "other"]


MOST_CLASSES = 20
"""Groups by class that can be looked at side by side."""


def question_word(question: str) -> str:
    """What a question asks with: the first question word in it, or ``other``.

    ``In what year`` is ``what``; ``whom`` and ``whose`` count as ``who``.
    """
    found = _ASKS.search(" ".join(question.split()))
    word = found[0].lower() if found else "other"
    return _ALIKE.get(word, word)


def length_range(words: int, starts: Sequence[int]) -> str:
    """The range of lengths that ``words`` lies in, as text: ``3-4``, ``9 or more``.

    Args:
        words: at least the first of ``starts``.
        starts: first length of each range, ascending.
    """
    first = max(start for start in starts if start <= words)
    after = [start for start in starts if start > words]
    if not after:
        return f"{first} or more"
    return str(first) if after[0] == first + 1 else f"{first}-{after[0] - 1}"


def groups_of(questions: Sequence[Question]) -> dict[str, dict[str, list[int]]]:
    """Rows of the questions in each group, by grouping; groups in reading order, none empty.

    Groupings: ``answer`` (HasAns, NoAns), ``answer length`` (words of the first gold answer, where
    there is one), ``context length`` (words) and ``question word``.
    """
    answers, contexts = (1, 2, 3, 5, 9), (0, 100, 150, 200, 300)
    ranges = [length_range(n, answers) for n in answers]
    return {
        "answer": _group(questions, lambda q: "HasAns" if q.answers else "NoAns", ["HasAns"]),
        "answer length (words)": _group(
            [q if q.answers else None for q in questions],
            lambda q: length_range(max(1, len(q.answers[0].text.split())), answers),
            ranges,
        ),
        "context length (words)": _group(
            questions,
            lambda q: length_range(len(q.context.split()), contexts),
            [length_range(n, contexts) for n in contexts],
        ),
        "question word": _group(questions, lambda q: question_word(q.question), _WORDS),
    }


def groups_of_sentences(
    sentences: Sequence[Sentence], classes: Sequence[str]
) -> dict[str, dict[str, list[int]]]:
    """Rows of the sentences in each group, by grouping; groups in reading order, none empty.

    Groupings: ``class`` (the gold one, where there are at most `MOST_CLASSES`) and ``length``
    (words, of a pair those of both).
    """
    lengths = (0, 6, 11, 21, 41)
    found = {
        "length (words)": _group(
            sentences,
            lambda s: length_range(len(f"{s.text} {s.pair or ''}".split()), lengths),
            [length_range(n, lengths) for n in lengths],
        )
    }
    if len(classes) > MOST_CLASSES:
        return found
    return {"class": _group(sentences, lambda s: classes[int(s.label or 0)], classes), **found}


def _group(
    items: Sequence[_Item | None], name: Callable[[_Item], str], order: Sequence[str]
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {group: [] for group in order}
    for row, item in enumerate(items):
        if item is not None:
            found.setdefault(name(item), []).append(row)
    return {group: rows for group, rows in found.items() if rows}


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test: do two systems err equally often?

    Of the questions that only one of them gets right, each is as likely to be the first's as the
    second's if they are equally good (McNemar 1947, Psychometrika 12; exact binomial form).

    Args:
        only_first: questions that the first alone gets right.
        only_second: questions that the second alone gets right.
    """
    n, few = only_first + only_second, min(only_first, only_second)
    ways, tail = 1, 1
    for k in range(1, few + 1):
        ways = ways * (n - k + 1) // k  # n over k, exactly
        tail += ways
    return float(min(1.0, 2 * tail / (1 << n)))
