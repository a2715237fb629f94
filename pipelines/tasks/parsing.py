"""Dependency parsing as the selection of heads: ``--task parsing --data FOLDER``, from CoNLL-U.

Every word chooses its head among the other words and the root, and its relation to it, by the
biaffine layer of Dozat & Manning (2017, arXiv:1611.01734) without its LSTMs, on the first token of
each word, as Kondratyuk & Straka (2019, arXiv:1904.02099) put it on BERT. The parse is the spanning
tree of the largest sum of scores with one root (Chu & Liu 1965; Edmonds 1967; McDonald et al. 2005,
HLT-EMNLP). UAS and LAS count the words that are attached right.

A parse is written as a text, a word each: ``2:5 0:31 2:12``, the number of the head (0 of the root)
and that of the relation among the task's classes; ``_`` of a word that the encoder did not see.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.models.outputs import without_autocast
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.own_output import OutputLayer, OwnOutput
from bertvision.pipelines.tasks.scores import Scores
from bertvision.pipelines.tasks.tables import Column
from bertvision.pipelines.tasks.task import Task, class_labels
from bertvision.pipelines.tasks.treebank import (
    NO_WORD,
    ParsedSentence,
    TreebankTask,
    words_of_tokens,
)
from bertvision.pipelines.tasks.windows import Batch, Windows

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


def best_tree(scores: npt.NDArray[np.floating]) -> Int64Array:
    """The head of each word in the tree with one root whose arcs have the largest sum.

    Softmax over each word's heads, which is a constant for the word, would not change the tree.

    Args:
        scores: (words, words + 1), of each word with each head; column 0 is the root. The score of
            a word with itself, column word + 1, is not read.

    Returns:
        (words,) int64: 0 of the root, else the number of the head, from 1.

    Raises:
        InputError: the scores are of another shape, or not finite.
    """
    words = len(scores)
    if scores.shape != (words, words + 1):
        raise InputError(
            f"scores of shape {scores.shape} are of no tree: give (words, words + 1), one for each "
            "word with the root and with each word"
        )
    if not np.isfinite(np.delete(scores.reshape(-1), np.arange(words) * (words + 2) + 1)).all():
        raise InputError("the scores hold NaN or infinity: the model that made them diverged")
    if not words:
        return np.zeros(0, np.int64)
    arcs = np.full((words + 1, words + 1), -np.inf)
    arcs[1:] = scores
    np.fill_diagonal(arcs, -np.inf)
    # a second root costs more than any choice of other arcs can bring
    finite = arcs[np.isfinite(arcs)]
    arcs[1:, 0] -= 1.0 + 2.0 * words * (finite.max() - finite.min())
    heads: Int64Array = _arborescence(arcs)[1:]
    return heads


def _arborescence(arcs: Float64Array) -> Int64Array:
    """The best head of each node, (nodes,); node 0 is the root, whose entry says nothing.

    Args:
        arcs: (nodes, nodes) score of each node's arc from each head, −inf where there is none.
    """
    heads: Int64Array = arcs.argmax(axis=1)
    heads[0] = 0
    cycle = _cycle(heads)
    if cycle is None:
        return heads
    # the cycle becomes one node, the last: what enters it breaks it at the node that is entered
    inside = np.zeros(len(arcs), bool)
    inside[cycle] = True
    outside = np.flatnonzero(~inside)
    weights_of_cycle = arcs[cycle, heads[cycle]]
    entering = arcs[np.ix_(cycle, outside)] - weights_of_cycle[:, None]
    leaving = arcs[np.ix_(outside, cycle)]
    smaller = np.full((len(outside) + 1, len(outside) + 1), -np.inf)
    smaller[:-1, :-1] = arcs[np.ix_(outside, outside)]
    smaller[-1, :-1] = entering.max(axis=0)
    smaller[:-1, -1] = leaving.max(axis=1)
    heads_of_smaller = _arborescence(smaller)
    whole: Int64Array = heads.copy()
    enters = heads_of_smaller[-1]  # position in outside of the head of the cycle
    whole[cycle[entering[:, enters].argmax()]] = outside[enters]
    for node, head in enumerate(heads_of_smaller[:-1]):
        at_cycle = head == len(outside)
        whole[outside[node]] = cycle[leaving[node].argmax()] if at_cycle else outside[head]
    whole[0] = 0
    return whole


def _cycle(heads: Int64Array) -> Int64Array | None:
    """The nodes of a circle of heads; None where all lead to node 0."""
    reached = np.zeros(len(heads), np.int64)  # number of the walk that came by; 0: none
    reached[0] = -1
    for start in range(1, len(heads)):
        at = start
        while not reached[at]:
            reached[at] = start
            at = int(heads[at])
        if reached[at] == start:
            circle = [at]
            while (at := int(heads[at])) != circle[0]:
                circle.append(at)
            return np.array(circle, np.int64)
    return None


ARC, RELATION, DROPOUT = 500, 100, 0.33
"""Widths of what is compared for heads and for relations, and the dropout there, as theirs."""


class ParseOutput(NamedTuple):
    """Output of the layer for a batch."""

    logits: Tensor
    """(batch, seq, seq) scores: of the token in the second dimension, the first token of a word,
    for having its head at the token in the third; 0 where that cannot be (see `allowed_arcs`)."""
    dependents: Tensor
    """(batch, seq, RELATION) of each token as a dependent, for its relation."""
    heads: Tensor
    """(batch, seq, RELATION) of each token as a head."""
    relations: RelationScorer
    """Scores the relations of pairs of them."""
    hidden_states: tuple[Tensor, ...] | None = None
    """The hidden states of the encoder, where they were asked for."""
    attentions: tuple[Tensor, ...] | None = None
    """Likewise."""


class RelationScorer(nn.Module):
    """The paper's fixed-class biaffine classifier: a product of dependent and head, and their sum.

    Args:
        relations: Their number.
    """

    def __init__(self, relations: int) -> None:
        super().__init__()
        self.product = nn.Linear(RELATION, relations * RELATION, bias=False)
        self.sum = nn.Linear(2 * RELATION, relations)

    def forward(self, dependents: Tensor, heads: Tensor) -> Tensor:
        """Logits (words, relations), float32.

        Args:
            dependents: (words, RELATION) of some words.
            heads: (words, RELATION) of the head of each.
        """
        left = self.product(dependents).unflatten(-1, (-1, RELATION))  # (words, relations, width)
        with without_autocast(left):
            product = (left.float() * heads.float()[:, None]).sum(-1)
        alone: Tensor = self.sum(torch.cat([dependents, heads], dim=-1)).float()
        logits: Tensor = product + alone
        return logits


class Biaffine(OutputLayer):
    """The paper's deep biaffine attention for heads, `RelationScorer` for relations.

    Each stands on layers of its own.

    Args:
        config: Configuration of the encoder; ``num_labels`` is the number of relations.
    """

    reads = ("words",)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()

        def part(width: int) -> nn.Module:
            layers = nn.Linear(config.hidden_size, width), nn.ReLU(), nn.Dropout(DROPOUT)
            return nn.Sequential(*layers)

        self.arc_dependent, self.arc_head = part(ARC), part(ARC)
        self.relation_dependent, self.relation_head = part(RELATION), part(RELATION)
        self.arc = nn.Linear(ARC, ARC)  # its bias is what a head has by itself
        self.relations = RelationScorer(config.num_labels or 0)

    def forward(self, states: Tensor, words: Tensor) -> ParseOutput:
        """Score all pairs of words.

        Args:
            states: (batch, seq, hidden) the last hidden state.
            words: (batch, seq) number of the word that begins at a token, −1 elsewhere.
        """
        dependents, heads = self.arc(self.arc_dependent(states)), self.arc_head(states)
        with without_autocast(states):
            arcs = dependents.float() @ heads.float().transpose(1, 2)
        return ParseOutput(
            arcs.masked_fill(~allowed_arcs(words), 0.0),
            self.relation_dependent(states),
            self.relation_head(states),
            self.relations,
        )


def allowed_arcs(words: Tensor) -> Tensor:
    """Say which tokens may be the head of which, (batch, seq, seq): rows are dependents.

    A word may hang on every other word, and on the root, for which the first token stands.

    Args:
        words: (batch, seq) number of the word that begins at a token, −1 elsewhere.
    """
    begins = words >= 0
    may_head = begins.clone()
    may_head[:, 0] = True
    itself = torch.eye(words.shape[1], dtype=torch.bool, device=words.device)
    return begins[:, :, None] & may_head[:, None, :] & ~itself


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
    """Words with the right head."""
    labelled: int
    """Words with the right head and relation."""
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
        parse: Parse as `written` gives it.
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
        parse: Parse as `written` gives it.
        classes: names of the relations.
    """
    words = (word.partition(":") for word in parse.split(" "))
    return " ".join(
        head if not colon else f"{head}:{classes[int(label)] if int(label) >= 0 else '?'}"
        for head, colon, label in words
    )


def _without_tree(sentence: ParsedSentence) -> Tree:
    return Tree(sentence, (-1,) * len(sentence.words))


def _parses(logits: Logits) -> Iterator[tuple[Tree, list[int | None], list[int]]]:
    """Each sentence with the head of each word and the class of its relation.

    Args:
        logits: As of `ParsingTask.window_logits`, of all windows.

    Raises:
        InputError: the logits are not finite.
    """
    windows = logits.windows
    marks = windows.marks["words"]
    ends = np.cumsum(windows.n_tokens, dtype=np.int64)
    arc, word = 0, 0
    for index, begin, end in zip(windows.item_index, ends - windows.n_tokens, ends, strict=True):
        item = windows.items[index]
        seen = marks[begin:end][marks[begin:end] >= 0]
        n = len(seen)
        tree = best_tree(logits.arrays["arcs"][arc : arc + n * (n + 1)].reshape(n, n + 1))
        classes = logits.arrays["relations"][word : word + n].argmax(axis=1)
        arc, word = arc + n * (n + 1), word + n
        numbers = np.append(0, seen + 1)  # of the words that were seen, behind the root
        heads: list[int | None] = [None] * len(item.labels)
        labels = [-1] * len(item.labels)
        for at, head, label in zip(seen, tree, classes, strict=True):
            heads[at], labels[at] = int(numbers[head]), int(label)
        yield item, heads, labels


log = logging.getLogger(__name__)


class ParsingTask(Task):
    """Sentences whose words learn their heads and relations, read as `TreebankTask` reads them."""

    kind = "tree"
    headline = "las"
    max_length = 128
    model_class = OwnOutput(Biaffine)
    ratios = ("las", "uas")
    words = ("sentences", "sentences")
    forms = (".conllu",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._treebank = TreebankTask(name)

    def model_options(self, config: TaskConfig) -> Mapping[str, Any]:
        """A logit for each relation, by its name."""
        return class_labels(config.classes)

    def outputs(self, config: TaskConfig) -> int:
        """How many relations there are."""
        return len(config.classes)

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits of a folder, of train, dev and test; the split of a file by its name."""
        return self._treebank.splits(source)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the trees of a split, whose relations are classes: those of the training data."""
        data = self._treebank.read(source, split, config)
        names = config.classes or tuple(sorted({r for s in data.items for r in s.relations}))
        number = {name: i for i, name in enumerate(names)}
        items = [Tree(s, tuple(number.get(r, -1) for r in s.relations)) for s in data.items]
        unknown = Counter(r for s in data.items for r in s.relations if r not in number)
        if unknown:
            log.warning(
                "%s of %s in %s are not in the training data (%s): they count as wrong in LAS",
                *(counted(len(unknown), "relation"), counted(unknown.total(), "word"), split),
                ", ".join(sorted(unknown)),
            )
        return TaskData(items, data.sha256, data.skipped, names)

    def check_data(self, items: Sequence[Tree], source: str) -> None:
        """Refuse data in which no word has another word to hang on.

        Raises:
            InputError: all sentences are of one word.
        """
        if all(len(item.labels) < 2 for item in items):
            raise InputError(
                f"{source}: no sentence has two words, so that no head can be learned from it: "
                "give a treebank with longer sentences"
            )

    def windows(self, items: Sequence[Tree], tokenizer: Any, config: TaskConfig) -> Windows:
        """One window for each sentence, with the first token of each word marked.

        A word without a token in its window, because it is cut off or the tokenizer drops all its
        characters, has no mark: its relation is not learned, nor those of words that hang on it,
        and it counts as wrong. Their number is reported.
        """
        windows = self._treebank.windows([x.sentence for x in items], tokenizer, config)
        words, heads, relations = (np.full(len(windows.input_ids), -1, np.int32) for _ in range(3))
        unseen = 0
        for item, begin, count in zip(items, windows.first_token, windows.n_tokens, strict=True):
            tokens = slice(begin, begin + count)
            of_tokens = words_of_tokens(item.sentence.words, windows.offset_mapping[tokens])
            seen, first = np.unique(of_tokens, return_index=True)
            first, seen = first[seen != NO_WORD], seen[seen != NO_WORD]
            place = np.full(len(item.labels) + 1, -1)  # of each word's first token; of the root 0
            place[0], place[seen + 1] = 0, first
            words[begin + first] = seen
            heads[begin + first] = place[np.array(item.sentence.heads)[seen]]
            relations[begin + first] = np.array(item.labels)[seen]
            unseen += len(item.labels) - len(seen)
        if unseen:
            log.warning(
                "%d of %s have no token in their window (%d tokens, --max-length): they are not "
                "learned, and count as wrong where parses are scored",
                *(unseen, counted(sum(len(item.labels) for item in items), "word")),
                config.max_length,
            )
        relations[heads < 0] = -1
        gold = {"heads": heads, "relations": relations}
        return replace(windows, marks={"words": words}, token_labels=gold)

    def table(self, items: Sequence[Tree]) -> pa.Table:
        """The table of `TreebankTask`, and the relations as classes."""
        labels = pa.array([item.labels for item in items], pa.list_(pa.int32()))
        table = self._treebank.table([item.sentence for item in items])
        return table.append_column("labels", labels)

    def items_of(self, table: pa.Table) -> list[Tree]:
        """The inverse of `table`."""
        sentences = self._treebank.items_of(table.drop_columns(["labels"]))
        labels = table.column("labels").to_pylist()
        return [
            Tree(s, tuple(labels_of_words))
            for s, labels_of_words in zip(sentences, labels, strict=True)
        ]

    def loss(self, output: ParseOutput, batch: Batch) -> Tensor:
        """Cross entropies of the head and of its relation, the mean over a window's words, summed.

        The relation is that to the gold head, as Dozat & Manning (2017) train it. Unlike a mean
        over the words of a batch, a window has the same part whatever its length: a word of a short
        sentence has a larger one.
        """
        heads, relations = batch.labels["heads"], batch.labels["relations"]
        lowest = torch.finfo(torch.float32).min
        arcs = output.logits.float().masked_fill(~allowed_arcs(batch.marks["words"]), lowest)
        losses = functional.cross_entropy(
            arcs.transpose(1, 2), heads, ignore_index=-1, reduction="none"
        )  # (batch, seq)
        window, token = (relations >= 0).nonzero(as_tuple=True)
        logits = output.relations(
            output.dependents[window, token], output.heads[window, heads[window, token]]
        )
        relation_losses = functional.cross_entropy(
            logits, relations[window, token], reduction="none"
        )
        losses = losses.index_put((window, token), relation_losses, accumulate=True)
        return (losses.sum(1) / (heads >= 0).sum(1).clamp_min(1)).sum()

    def logits(self, output: ParseOutput) -> dict[str, Tensor]:
        """Scores of all pairs of tokens, (batch, seq, seq)."""
        return {"logits": output.logits}

    def window_logits(self, output: ParseOutput, batch: Batch) -> dict[str, list[Tensor]]:
        """Keep of each window ``arcs`` (words · (words + 1),) and ``relations`` (words, relations).

        Arcs are scores of each word with the root and with each word, its own being 0; relations
        are those to the heads of the best tree. Words are those with a token in the window.
        """
        logits: dict[str, list[Tensor]] = {"arcs": [], "relations": []}
        for i, words in enumerate(batch.marks["words"]):
            tokens = (words >= 0).nonzero().squeeze(1).to(output.logits.device)
            nodes = torch.cat([tokens.new_zeros(1), tokens])
            arcs = output.logits[i][tokens][:, nodes].float()
            heads = nodes[torch.from_numpy(best_tree(arcs.cpu().numpy())).to(nodes.device)]
            relations = output.relations(output.dependents[i, tokens], output.heads[i, heads])
            logits["arcs"].append(arcs.flatten())
            logits["relations"].append(relations)
        return logits

    def head_loss(self, output: Any, labels: Mapping[str, Tensor]) -> NoReturn:
        """No head learns trees."""
        raise InputError(
            f"no head can be trained on {self.name}, which learns a tree over words: its encoder's "
            "scores are those of `bertvision finetune`"
        )

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """A text, whose words are what stands between spaces."""
        return {"text": Column(("text", "sentence"))}

    def unlabelled(self, texts: Mapping[str, Any], name: str) -> Tree:
        """A sentence whose tree is not known."""
        words = tuple(texts["text"].split())
        n = len(words)
        return _without_tree(ParsedSentence(name, words, ("X",) * n, (0,) * n, ("_",) * n))

    def read_unlabelled(self, path: Path, config: TaskConfig) -> list[Tree]:
        """The words of the sentences in CoNLL-U, whose trees are not looked at."""
        return [_without_tree(one) for one in self._treebank.read_unlabelled(path, config)]

    def answers(
        self, logits: Logits, config: TaskConfig, threshold: float | None
    ) -> list[Mapping[str, Any]]:
        """Words of each sentence with ``heads`` and ``relations``, both as one text in ``answer``.

        Heads are numbers of words, from 1, and 0 of the root; a word without a token in its window
        has None, and no relation.
        """
        return [
            {
                "answer": named(written(heads, labels), config.classes),
                "words": list(item.sentence.words),
                "heads": heads,
                "relations": [config.classes[x] if x >= 0 else None for x in labels],
            }
            for item, heads, labels in _parses(logits)
        ]

    def score(self, dev: Logits, tune: Logits | None) -> Scores:
        """UAS and LAS in per cent of all words, and the parses (see `attachment`).

        Raises:
            InputError: the logits are not finite.
        """
        predictions, counts, unseen = {}, [], 0
        for item, heads, labels in _parses(dev):
            predictions[item.id] = written(heads, labels)
            counts.append(attached(predictions[item.id], item))
            unseen += heads.count(None)
        total = sum(count.words for count in counts)
        metrics: dict[str, int | float] = {
            "uas": 100 * sum(count.heads for count in counts) / total,
            "las": 100 * sum(count.labelled for count in counts) / total,
            "majority": commonest_arc(dev.windows.items),
            "total": len(counts),
            "words": total,
            "unseen": unseen,
        }
        return Scores({"argmax": {"threshold": None, "metrics": metrics}}, predictions, {})

    def parts(self, item: Tree, answer: Any) -> dict[str, tuple[float, float]]:
        """Count the words of a sentence that are right, and all of them, by metric."""
        counts = attached(str(answer), item)
        return {"las": (counts.labelled, counts.words), "uas": (counts.heads, counts.words)}

    def answer_text(self, answer: Any, classes: Sequence[str]) -> str:
        """A parse with the names of relations."""
        return named(str(answer), classes)
