"""Sentence ordering: ``--task ordering``, paragraphs whose sentences are shown out of order.

Barzilay & Lapata (2008, Computational Linguistics 34) made it a test of coherence; the model is
that of `listwise`. Lapata (2006, Computational Linguistics 32) measures it by Kendall's τ.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from torch import Tensor

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.pipelines.tasks.batch import Batch
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.ordering.listwise import OrderOutput, SentenceScores, list_mle
from bertvision.pipelines.tasks.ordering.paragraphs import Paragraph, read_paragraphs
from bertvision.pipelines.tasks.own_output import OwnOutput
from bertvision.pipelines.tasks.scores import Scores
from bertvision.pipelines.tasks.source import find_file, splits_in
from bertvision.pipelines.tasks.special_tokens import Template
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Windows

log = logging.getLogger(__name__)
FILES = {split: [f"{split}.txt", f"{split}.json"] for split in ("train", "dev", "test")}


class OrderingTask(Task):
    """Paragraphs whose sentences learn which comes first."""

    kind = "order"
    headline = "tau"
    max_length = 386
    model_class = OwnOutput(SentenceScores)
    ratios = ("tau", "perfect")
    words = ("paragraphs", "paragraphs")

    def splits(self, source: str) -> tuple[str, ...]:
        """Those of train, dev and test that a folder holds; that of a file by its name."""
        return splits_in(source, FILES, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a file, or that of a split in a folder (see `read_paragraphs`)."""
        path = find_file(Path(source), FILES.get(split, []), self.name)
        return read_paragraphs(path, skip_bad=config.skip_bad)

    def windows(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> Windows:
        """One window for each paragraph: the first special token in front of every sentence.

        Token types alternate from sentence to sentence between those of a pair of texts: the
        interval embeddings of BERT4SO. Families of a single type have none.

        Where all of them have no room, the longest sentences are cut off, and how many paragraphs
        have such is said.

        Raises:
            InputError: a window has not room for a token of every sentence, or the tokenizer has
                no special tokens.
        """
        template = Template.of(tokenizer)
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        if first is None or last is None:
            raise InputError(
                "the tokenizer has no special tokens to put in front of sentences and behind the "
                "last: take an encoder such as bert-base-uncased"
            )
        ids: list[int] = []
        types: list[int] = []
        offsets: list[tuple[int, int]] = []
        marks: list[int] = []
        positions: list[int] = []
        lengths, cut = [], 0
        for item in items:
            tokens, places = _tokens(item, tokenizer)
            begin, room = len(ids), _room(item, config.max_length)
            longest = _longest([len(of) for of in tokens], room)
            cut += any(len(of) > longest for of in tokens)
            for k, (of, at) in enumerate(zip(tokens, places, strict=True)):
                some = min(len(of), longest)
                ids += [first, *of[:longest]]
                types += [template.types[k % 2]] * (some + 1)
                offsets += [(-1, -1), *at[:longest]]
                marks += [k, *[-1] * some]
                positions += [item.shown[k], *[-1] * some]
            ids.append(last)
            types.append(types[-1])
            offsets.append((-1, -1))
            marks.append(-1)
            positions.append(-1)
            lengths.append(len(ids) - begin)
        if cut:
            log.warning(
                "%d of %s have more than %d tokens: their longest sentences are cut off; "
                "--max-length makes room",
                *(cut, counted(len(items), "paragraph"), config.max_length),
            )
        return Windows(
            input_ids=np.array(ids, np.int32),
            token_type_ids=np.array(types, np.uint8),
            offset_mapping=np.array(offsets, np.int32).reshape(-1, 2),
            n_tokens=np.array(lengths, np.int32),
            item_index=np.arange(len(items), dtype=np.int32),
            labels={},
            marks={"sentences": np.array(marks, np.int32)},
            token_labels={"positions": np.array(positions, np.int32)},
        )

    def misfits(self, items: Sequence[Any], tokenizer: Any, config: TaskConfig) -> dict[str, str]:
        """Paragraphs of more sentences than a window has room for."""
        return {item.id: why for item in items if (why := _without_room(item, config.max_length))}

    def table(self, items: Sequence[Any]) -> pa.Table:
        """Paragraphs as the store's text side, a row each, sentences in their right order."""
        texts = pa.list_(pa.string())
        return pa.table(
            {
                "id": pa.array([item.id for item in items], pa.string()),
                "sentences": pa.array([item.sentences for item in items], texts),
            }
        )

    def items_of(self, table: pa.Table) -> list[Any]:
        """The inverse of `table`."""
        return [Paragraph(row["id"], tuple(row["sentences"])) for row in table.to_pylist()]

    def loss(self, output: OrderOutput, batch: Batch) -> Tensor:
        """ListMLE, summed over the windows."""
        return list_mle(output.logits, batch.labels["positions"]).sum()

    def logits(self, output: OrderOutput) -> dict[str, Tensor]:
        """Scores of all tokens, (batch, seq)."""
        return {"logits": output.logits}

    def window_logits(self, output: OrderOutput, batch: Batch) -> dict[str, list[Tensor]]:
        """Keep of each window ``scores``, one for each sentence as it is shown."""
        begins = batch.marks["sentences"] >= 0
        pairs = zip(output.logits, begins, strict=True)
        return {"scores": [of[some.to(of.device)] for of, some in pairs]}

    def head_loss(self, output: Any, labels: Mapping[str, Tensor]) -> NoReturn:
        """Refuse heads, none of which learns an order.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"no head can be trained on {self.name}, which learns an order of sentences: its "
            "encoder's scores are those of `bertvision finetune`"
        )

    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """Kendall's τ × 100 and the share of perfect orders in per cent, means over paragraphs.

        Predictions are right positions in the order that was found: ``0 2 1``.

        Raises:
            InputError: the scores are not finite.
        """
        scores = dev.arrays["scores"]
        if not np.isfinite(scores).all():
            raise InputError("the scores hold NaN or infinity: the model that made them diverged")
        begin, predictions, parts = 0, {}, []
        for index in dev.windows.item_index:
            item = dev.windows.items[index]
            of = scores[begin : begin + len(item.sentences)]
            begin += len(of)
            order = np.argsort(-of, kind="stable")
            predictions[item.id] = " ".join(str(item.shown[k]) for k in order)
            parts.append(self.parts(item, predictions[item.id]))
        metrics: dict[str, int | float] = {
            name: 100 * sum(part[name][0] for part in parts) / len(parts) for name in self.ratios
        }
        metrics["total"] = len(parts)
        return Scores({"argmax": {"threshold": None, "metrics": metrics}}, predictions, {})

    def parts(self, item: Any, answer: Any) -> dict[str, tuple[float, float]]:
        """Kendall's τ of a paragraph, and whether its order is perfect, each of 1.

        Raises:
            WorkspaceError: the answer is no order of its sentences.
        """
        order = [int(x) for x in str(answer).split() if x.isdecimal()]
        if sorted(order) != [*range(len(item.sentences))]:
            raise WorkspaceError(
                f"the order {answer!r} is none of the {len(item.sentences)} sentences of "
                f"{item.id!r}: the data or the predictions changed; make the predictions again"
            )
        return {"tau": (kendall_tau(order), 1.0), "perfect": (float(order == sorted(order)), 1.0)}


def kendall_tau(order: Sequence[int]) -> float:
    """Kendall's τ between an order and the right one: 1 − 2 · inversions / pairs (Lapata 2006).

    Args:
        order: right positions as they were put, at least two and none twice.
    """
    n = len(order)
    inversions = sum(order[i] > order[j] for i in range(n) for j in range(i + 1, n))
    return 1 - 4 * inversions / (n * (n - 1))


def _tokens(item: Paragraph, tokenizer: Any) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Tokens of each sentence as it is shown, and their characters in the right text."""
    encoded = tokenizer(
        [item.sentences[position] for position in item.shown],
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    lengths = [len(sentence) + 1 for sentence in item.sentences]
    starts = [sum(lengths[:position]) for position in item.shown]
    places = [
        [(start + a, start + b) for a, b in of]
        for start, of in zip(starts, encoded["offset_mapping"], strict=True)
    ]
    return encoded["input_ids"], places


def _room(item: Paragraph, max_length: int) -> int:
    """Tokens of its sentences for which a window has room beside the special ones.

    Raises:
        InputError: they are fewer than its sentences.
    """
    if why := _without_room(item, max_length):
        raise InputError(f"{why}: give a larger --max-length")
    return max_length - 1 - len(item.sentences)


def _without_room(item: Paragraph, max_length: int) -> str:
    """Why a window cannot have a token of each sentence; empty where it can."""
    count = len(item.sentences)
    if max_length - 1 - count >= count:
        return ""
    return (
        f"{item.id!r} has {count} sentences, and a window of {max_length} tokens no room for them"
    )


def _longest(lengths: Sequence[int], room: int) -> int:
    """Most tokens of a sentence with which all of them have room together."""
    longest = max(lengths)
    while sum(min(n, longest) for n in lengths) > room:
        longest -= 1
    return longest
