"""Similarity of sentences, as data for extraction.

A sentence is encoded by itself, so that there is one split, ``texts``: every distinct text of a
scored pair once. The pairs are those of `read_similarity`; `bertvision.pipelines.readouts` scores
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.similarity_data import read_similarity
from bertvision.pipelines.tasks.sentences.task import SentenceTask

SPLIT = "texts"


class SimilarityTask(SentenceTask):
    """Sentences, unlabelled: the score is that of a pair."""

    def splits(self, source: str) -> tuple[str, ...]:
        """All texts, of whichever parts and sub-sets there are."""
        return (SPLIT,)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """The distinct texts of a folder, in the order first seen.

        Raises:
            InputError: the folder is malformed, or has no such split.
        """
        if split != SPLIT:
            raise InputError(f"{self.name} has no split {split!r}: {SPLIT} alone")
        data = read_similarity(self.name, source)
        return TaskData(data.texts, data.sha256, [])

    def check_data(self, items: Sequence[Sentence], source: str) -> NoReturn:
        """Refuse to be trained on.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"no encoder can be fine-tuned on {self.name}, whose scores are of pairs of texts that "
            f"are encoded by themselves: use `bertvision similarity {self.name} --data {source}`"
        )
