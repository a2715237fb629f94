"""Control tasks: labels that can only be memorised (Hewitt & Liang 2019, EMNLP).

The selectivity of a probe is its accuracy less that on its control task. For tasks of words, a
control task gives every word type a random label; here, for sentences, every distinct sentence (or
pair) gets one, drawn from the distribution of the real labels. Almost every sentence of a test
split is a new type, about whose label the training says nothing: what a probe can memorise shows in
its accuracy on the training examples, which is therefore kept as well, with the share of new types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Control(NamedTuple):
    """How a probe does on the control task, all in per cent."""

    accuracy: float
    """On the test examples."""
    selectivity: float
    """Accuracy of the probe on the real labels, less that."""
    memorised: float
    """Accuracy on the examples that it was trained on."""
    unseen: float
    """Share of test examples whose sentence is not among those trained on."""


def control_labels(
    texts: Sequence[str], labels: npt.NDArray[np.int64], seed: int
) -> npt.NDArray[np.int64]:
    """A random label for every distinct text, the same in all splits.

    The label is a function of text, seed and distribution alone, not of the order of the examples.

    Args:
        texts: (examples,) what is a type.
        labels: (examples,) real labels, whose distribution is that of the random ones; −1 where
            there is none.
        seed: of the labels.
    """
    counts = np.bincount(labels[labels >= 0])
    ends = np.cumsum(counts) / counts.sum()
    drawn = np.array([_uniform(text, seed) for text in texts])
    return np.searchsorted(ends, drawn, side="right").astype(np.int64)


def unseen_share(
    texts: Sequence[str], train: npt.NDArray[np.int64], test: npt.NDArray[np.int64]
) -> float:
    """Per cent of the test examples whose text none of the training examples has.

    Args:
        texts: (examples,)
        train: numbers of the training examples.
        test: numbers of the test examples.
    """
    seen = {texts[i] for i in train}
    return 100 * sum(texts[i] not in seen for i in test) / len(test)


def _uniform(text: str, seed: int) -> float:
    """A number in [0, 1) that looks random and belongs to the text."""
    digest = hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
