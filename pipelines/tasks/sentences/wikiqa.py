"""Answer ranking in the manner of WikiQA, as data for extraction and for fine-tuning.

To extract, a question and its candidate passages are encoded by themselves, so the splits are
``queries`` and ``passages``: every distinct text of train, dev and test once. Which passage stands
beside which question, and whether it answers, is in the pairs of `read_ranking`;
`bertvision.pipelines.readouts.rank` ranks by them. To fine-tune, a question and a passage are one
window and the label is the pair's, with the splits of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.ranking_data import PARTS, RankingData, read_ranking
from bertvision.pipelines.tasks.sentences.task import SentenceTask

SPLITS = ("queries", "passages")
ANSWERS = ("no answer", "answer")
"""Classes of a pair."""


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
            f"are encoded by themselves: fine-tune it on wikiqa_pairs, or use `bertvision rank "
            f"{self.name} --data {source}`"
        )


class WikiqaPairsTask(SentenceTask):
    """Questions with a candidate passage each, in one window: whether the passage answers."""

    positive = 1

    def splits(self, source: str) -> tuple[str, ...]:
        """Those of train, dev and test that there are."""
        there = {pair.part for pair in read_ranking(source).pairs}
        return tuple(part for part in PARTS if part in there)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """The pairs of a part of a folder, in their order.

        Raises:
            InputError: the folder is malformed, or has no such part.
        """
        data = read_ranking(source)
        items = pairs_of(data, split)
        if not items:
            raise InputError(f"{source}: has no part {split}: add {split}/ or {split}.tsv")
        return TaskData(items, data.sha256, data.skipped, ANSWERS)


def pairs_of(data: RankingData, part: str) -> list[Sentence]:
    """The pairs of train, dev or test, each question beside a passage, in their order."""
    return [
        Sentence(
            f"{pair.question} {data.passages[pair.passage].id}",
            data.queries[pair.query].text,
            data.passages[pair.passage].text,
            pair.label,
        )
        for pair in data.pairs
        if pair.part == part
    ]
