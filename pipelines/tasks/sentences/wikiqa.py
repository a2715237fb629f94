"""Answer ranking in the manner of WikiQA, as data for extraction.

A question and its candidate passages are encoded by themselves, so the splits are ``queries`` and
``passages``: every distinct text of train, dev and test once. Which passage stands beside which
question, and whether it answers, is in the pairs of `read_ranking`; `bertvision.pipelines.ranking`
ranks by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from bertvision.errors import InputError
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.data import Sentence, TaskData
from bertvision.pipelines.tasks.sentences.ranking_data import read_ranking
from bertvision.pipelines.tasks.sentences.task import SentenceTask

SPLITS = ("queries", "passages")


class WikiqaTask(SentenceTask):
    """Queries and passages, unlabelled: the label is that of a pair."""

    def splits(self, source: str) -> tuple[str, ...]:
        """Queries and passages, whichever of train, dev and test there are."""
        return SPLITS

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """The distinct queries or passages of a folder, in the order first seen.

        Raises:
            InputError: the folder is malformed, or has no such split.
        """
        if split not in SPLITS:
            raise InputError(f"{self.name} has no split {split!r}: {' and '.join(SPLITS)}")
        data = read_ranking(source)
        items = data.queries if split == "queries" else data.passages
        return TaskData(items, data.sha256, data.skipped)

    def check_data(self, items: Sequence[Sentence], source: str) -> NoReturn:
        """Refuse to be trained on.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"no encoder can be fine-tuned on {self.name}, whose labels are of pairs of texts that "
            f"are encoded by themselves: use `bertvision rank {self.name} --data {source}`"
        )
