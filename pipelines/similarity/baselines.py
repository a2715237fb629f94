"""What needs no encoder: the words that sentences share, and the most frequent judgement."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from bertvision.pipelines.similarity.data import Floats, Ints, Pairs


def word_overlap(texts: Sequence[str], pairs: Pairs) -> Floats:
    """Words that both sentences of a pair have, as a part of those that either has: (pairs,).

    A word is a run of letters, digits or underscores, in lower case (Jaccard's coefficient of the
    sets of words); of two sentences without any it is 0.
    """
    words = [frozenset(re.findall(r"\w+", text.lower())) for text in texts]
    found = [
        len(words[i] & words[j]) / max(1, len(words[i] | words[j]))
        for i, j in zip(pairs.first, pairs.second, strict=True)
    ]
    return np.array(found, np.float64)


def majority(train: Ints, scored: Ints) -> float:
    """Accuracy, in per cent, of always naming the class that is most frequent in training.

    Args:
        train: (training pairs,) classes.
        scored: (scored pairs,) classes.
    """
    return 100 * float((scored == np.bincount(train).argmax()).mean())
