"""Paragraphs as lists of sentences: a text of one's own, or the contexts of SQuAD's questions.

A text, ``train.txt``, has a sentence in each line and a blank line between paragraphs. Contexts,
``train.json`` as SQuAD ships it, are parted behind ``.``, ``!`` and ``?`` where a capital follows.

The output layer of sentence ordering, a score for each sentence, and its listwise loss.

Zhu et al. (2021, arXiv:2103.13584), *BERT4SO: Neural Sentence Ordering by Fine-tuning BERT*: all
sentences in one window with a special token in front of each, a listwise loss over what is read
there. Theirs is ListMLE with a margin; here it is ListMLE itself.

Sentence ordering: ``--task ordering``, paragraphs whose sentences are shown out of order.

Barzilay & Lapata (2008, Computational Linguistics 34) made it a test of coherence; the model is
that of `listwise`. Lapata (2006, Computational Linguistics 32) measures it by Kendall's τ.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.own_output import OutputLayer, OwnOutput
from bertvision.pipelines.tasks.scores import Scores
from bertvision.pipelines.tasks.source import find_file, read_text, splits_in
from bertvision.pipelines.tasks.squad.read import read_squad
from bertvision.pipelines.tasks.tables import Column
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Batch, Template, Windows, tokenise

log = logging.getLogger(__name__)
MOST_SENTENCES = 30
"""Sentences of the longest paragraph that is taken."""
_END = re.compile(r"(?<=[.!?])\s+(?=[\"“‘'(\[]?[A-Z])")


class Paragraph(NamedTuple):
    """A paragraph whose order is to be found."""

    id: str
    sentences: tuple[str, ...]
    """In their right order."""

    @property
    def text(self) -> str:
        """The whole, in the right order."""
        return " ".join(self.sentences)

    @property
    def label(self) -> str:
        """The right answer, as predictions are written: ``0 1 2``."""
        return " ".join(map(str, range(len(self.sentences))))

    @property
    def shown(self) -> tuple[int, ...]:
        """The right position of each sentence, in the order in which an encoder sees them.

        It follows from the text alone, so that every system is given the same.
        """
        seed = hashlib.sha256(self.text.encode()).digest()[:8]
        random = np.random.default_rng(int.from_bytes(seed, "big"))
        return tuple(random.permutation(len(self.sentences)).tolist())


def read_paragraphs(path: Path, *, skip_bad: bool = False) -> TaskData:
    """Read a file.

    Paragraphs of one sentence, of more than `MOST_SENTENCES`, or with a sentence twice have no one
    order that could be found: they are left out, and their number is reported.

    Args:
        path: ``….txt`` or ``….json``, perhaps with ``.gz``.
        skip_bad: Leave malformed questions of SQuAD out.

    Raises:
        InputError: the file is malformed, or no paragraph is left.
    """
    if Path(path.name.removesuffix(".gz")).suffix == ".json":
        data = read_squad(path, skip_bad=skip_bad)
        contexts = dict.fromkeys(question.context for question in data.questions)
        paragraphs, digest = [_END.split(" ".join(x.split())) for x in contexts], data.sha256
    else:
        text, digest = read_text(path)
        paragraphs = [*_blocks(text)]
    items = [
        Paragraph(f"paragraph {i}", tuple(sentences))
        for i, sentences in enumerate(paragraphs, 1)
        if 2 <= len(sentences) <= MOST_SENTENCES and len(set(sentences)) == len(sentences)
    ]
    why = (
        f"{len(paragraphs) - len(items)} of {counted(len(paragraphs), 'paragraph')} in {path} have "
        f"one sentence, more than {MOST_SENTENCES}, or the same one twice, and no order to be found"
    )
    if not items:
        raise InputError(
            f"{why}: none is left; a text has a sentence in each line, and a blank "
            "line between paragraphs"
        )
    if len(items) < len(paragraphs):
        log.warning("%s: they are left out", why)
    return TaskData(items, digest, [])


def _blocks(text: str) -> Iterator[list[str]]:
    """The paragraphs of a text, a sentence in each line."""
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        if sentences := [line.strip() for line in block.split("\n") if line.strip()]:
            yield sentences


class OrderOutput(NamedTuple):
    """Output of the layer for a batch."""

    logits: Tensor
    """(batch, seq) score of the sentence that begins at a token, the larger the earlier; 0 where
    none begins."""
    hidden_states: tuple[Tensor, ...] | None = None
    """The hidden states of the encoder, where they were asked for."""
    attentions: tuple[Tensor, ...] | None = None
    """Likewise."""


class SentenceScores(OutputLayer):
    """A linear layer on the special token in front of each sentence.

    Args:
        config: Configuration of the encoder.
    """

    reads = ("sentences",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)  # that of Devlin et al. (2019) on what classes are told from
        self.score = nn.Linear(config.hidden_size, 1)

    def forward(self, states: Tensor, sentences: Tensor) -> OrderOutput:
        """Score the sentences.

        Args:
            states: (batch, seq, hidden) the last hidden state.
            sentences: (batch, seq) number of the sentence that begins at a token, −1 elsewhere.
        """
        scores = self.score(self.dropout(states)).squeeze(-1).float()
        return OrderOutput(scores.masked_fill(sentences < 0, 0.0))


def list_mle(scores: Tensor, positions: Tensor) -> Tensor:
    """−log of the probability of the right order, for each list of a batch, (batch,) float32.

    The order is drawn as Plackett (1975) and Luce (1959) have it: the first with a probability of
    softmax over all, the next over those that are left. Xia et al. (2008, ICML), *Listwise
    Approach to Learning to Rank*, equation 9.

    Args:
        scores: (batch, seq)
        positions: (batch, seq) int64 right position of each, from 0; −1 of what is in no list.
    """
    there = positions >= 0
    last = torch.where(there, positions, positions.shape[1])  # what is in no list stands behind
    order = last.argsort(dim=1, stable=True)
    lowest = torch.finfo(torch.float32).min
    ranked = scores.float().masked_fill(~there, lowest).gather(1, order)
    listed = there.gather(1, order)
    left = ranked.flip(1).logcumsumexp(1).flip(1)  # log of the sum over those that are left
    return (left - ranked).masked_fill(~listed, 0.0).sum(1)


FILES = {split: [f"{split}.txt", f"{split}.json"] for split in ("train", "dev", "test")}


class OrderingTask(Task):
    """Paragraphs whose sentences learn which comes first."""

    kind = "order"
    headline = "tau"
    max_length = 386
    model_class = OwnOutput(SentenceScores)
    ratios = ("tau", "perfect")
    words = ("paragraphs", "paragraphs")
    forms = (".txt", ".json")
    item: ClassVar[Any] = Paragraph
    schema: ClassVar[Mapping[str, Any]] = {"id": pa.string(), "sentences": pa.list_(pa.string())}

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits of a folder, of train, dev and test; the split of a file by its name."""
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
            tokens = list(tokenise([item.sentences[at] for at in item.shown], tokenizer))
            starts = np.cumsum([0, *(len(sentence) + 1 for sentence in item.sentences)])
            begin, room = len(ids), _room(item, config.max_length)
            longest = _longest([len(one.ids) for one in tokens], room)
            cut += any(len(one.ids) > longest for one in tokens)
            for k, (one, at) in enumerate(zip(tokens, item.shown, strict=True)):
                some = min(len(one.ids), longest)
                ids += [first, *one.ids[:longest].tolist()]
                types += [template.types[k % 2]] * (some + 1)
                offsets += [(-1, -1), *(starts[at] + one.offsets[:longest]).tolist()]
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
        return {"scores": [values[some.to(values.device)] for values, some in pairs]}

    def head_loss(self, output: Any, labels: Mapping[str, Tensor]) -> NoReturn:
        """Refuse heads, none of which learns an order.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"no head can be trained on {self.name}, which learns an order of sentences: its "
            "encoder's scores are those of `bertvision finetune`"
        )

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """A text of several sentences, in any order."""
        return {"text": Column(("text",))}

    def unlabelled(self, texts: Mapping[str, Any], name: str) -> Paragraph:
        """A paragraph whose order is not known; sentences are parted as those of contexts are.

        Raises:
            InputError: it has one sentence, more than `MOST_SENTENCES`, or the same one twice.
        """
        sentences = tuple(_END.split(" ".join(texts["text"].split())))
        if not 2 <= len(sentences) <= MOST_SENTENCES or len(set(sentences)) < len(sentences):
            raise InputError(
                f"{texts['text']!r:.80} has {counted(len(sentences), 'sentence')}: give 2 to "
                f"{MOST_SENTENCES}, none twice; each begins with a capital behind . ! or ?"
            )
        return Paragraph(name, sentences)

    def read_unlabelled(self, path: Path, config: TaskConfig) -> list[Paragraph]:
        """The paragraphs of a file, whose order is taken for none (see `read_paragraphs`)."""
        return list(read_paragraphs(path, skip_bad=config.skip_bad).items)

    def answers(
        self, logits: Logits, config: TaskConfig, threshold: float | None
    ) -> list[Mapping[str, Any]]:
        """The ``sentences`` of each paragraph in the order that was found, and ``order``.

        The order is that of their positions in the paragraph as it was given, from 0, and stands as
        a text in ``answer``.
        """
        return [
            {
                "answer": " ".join(map(str, order)),
                "order": order,
                "sentences": [item.sentences[at] for at in order],
            }
            for item, order in _orders(logits)
        ]

    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """Kendall's τ × 100 and the share of perfect orders in per cent, means over paragraphs.

        Predictions are right positions in the order that was found: ``0 2 1``.

        Raises:
            InputError: the scores are not finite.
        """
        predictions, parts = {}, []
        for item, order in _orders(dev):
            predictions[item.id] = " ".join(map(str, order))
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


def _orders(logits: Logits) -> Iterator[tuple[Paragraph, list[int]]]:
    """Each paragraph with the right positions of its sentences in the order that was found.

    Raises:
        InputError: the scores are not finite.
    """
    scores = logits.arrays["scores"]
    if not np.isfinite(scores).all():
        raise InputError("the scores hold NaN or infinity: the model that made them diverged")
    begin = 0
    for index in logits.windows.item_index:
        item = logits.windows.items[index]
        scores_of_item = scores[begin : begin + len(item.sentences)]
        begin += len(scores_of_item)
        yield item, [item.shown[k] for k in np.argsort(-scores_of_item, kind="stable")]


def kendall_tau(order: Sequence[int]) -> float:
    """Kendall's τ between an order and the right one: 1 − 2 · inversions / pairs (Lapata 2006).

    Args:
        order: right positions as they were put, at least two and none twice.
    """
    n = len(order)
    inversions = sum(order[i] > order[j] for i in range(n) for j in range(i + 1, n))
    return 1 - 4 * inversions / (n * (n - 1))


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
