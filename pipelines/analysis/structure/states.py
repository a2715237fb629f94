"""The words of a stored treebank: their hidden states in every layer, and their trees, in batches.

States are read out of the store batch by batch, so that memory is that of a few batches whatever
the size of the treebank; those of the tokens of a word are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.analysis.structure.gold import Ints
from bertvision.pipelines.analysis.structure.scores import Gold, gold_of
from bertvision.pipelines.precision import device
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.trees.conllu import ParsedSentence
from bertvision.pipelines.tasks.trees.treebank import NO_WORD, TREEBANK, is_cut, words_of_tokens


class Batch(NamedTuple):
    """Some sentences, their words one after another."""

    states: Tensor
    """(layers, words, hidden) float32."""
    numbers: list[int]
    """(sentences,) their places in `TreeStates.sentences`."""
    sentences: list[ParsedSentence]
    """(sentences,)"""
    golds: list[Gold]
    """(sentences,)"""

    @property
    def lengths(self) -> list[int]:
        """(sentences,) words of each."""
        return [len(sentence.words) for sentence in self.sentences]


class TreeStates:
    """The sentences of a stored split whose words all have hidden states.

    Attributes:
        split: that is stored.
        sentences: that are whole; a batch names them by their place in here.
        cut: how many were left out since they are longer than their window.
        wordless: how many others were left out since a word of theirs has no token, such as a
            control character alone.
    """

    def __init__(self, split: ActivationSplit) -> None:
        """Find the tokens of every word.

        Args:
            split: complete, of all tokens of a treebank.

        Raises:
            InputError: it is none of a treebank, or no sentence of it is whole.
            CorruptStoreError: its table or an array is damaged.
        """
        self.split = split.require_complete()
        table, task = split.table(), load_task(TREEBANK)
        if not {"words", "heads"} <= set(table.column_names):
            raise InputError(
                f"{split.name} holds no trees: store those of a treebank with `bertvision extract "
                f"--checkpoint {split.tag} --task {TREEBANK} --data FOLDER`"
            )
        items, plan = task.items_of(table), split.plan
        offsets = split.array("offset_mapping")
        longest = int(str(split.record.provenance.get("max_length", 0))) or int(plan.n_tokens.max())
        self.sentences: list[ParsedSentence] = []
        self.cut = self.wordless = 0
        self._number: dict[int, int] = {}  # of a stored example, among the sentences
        self._words: list[Ints] = []  # of each sentence, those of its tokens
        for example in np.argsort(plan.example_id, kind="stable").tolist():
            item: ParsedSentence = items[int(plan.example_id[example])]
            begin = int(plan.first_token[example])
            own = offsets[begin : begin + int(plan.n_tokens[example])]
            words = words_of_tokens(item.words, own)
            if is_cut(item.text, own, longest):
                self.cut += 1
            elif len(set(words.tolist()) - {NO_WORD}) < len(item.words):
                self.wordless += 1
            else:
                self._number[example] = len(self.sentences)
                self.sentences.append(item)
                self._words.append(words)
        if not self.sentences:
            raise InputError(
                f"of {len(items)} sentences of {split.name} none is whole ({self.cut} are longer "
                f"than {longest} tokens): give longer windows, --max-length, into another workspace"
            )

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are stored (0 = embedding output)."""
        return self.split.record.layers

    @cached_property
    def golds(self) -> list[Gold]:
        """(sentences,) what each is scored against."""
        return [gold_of(sentence) for sentence in self.sentences]

    def shuffled(self, size: int, seed: int) -> ActivationLoader:
        """What `batches` goes through in another order each time, which depends on the seed alone.

        Args:
            size: sentences of a batch.
            seed: of the order.
        """
        return ActivationLoader(self.split, batch_size=size, seed=seed)

    def in_order(self, size: int) -> ActivationLoader:
        """What `batches` goes through as it is stored.

        Args:
            size: sentences of a batch.
        """
        return ActivationLoader(self.split, batch_size=size, shuffle=False)

    def batches(self, loader: ActivationLoader) -> Iterator[Batch]:
        """One pass over the sentences.

        Args:
            loader: of `shuffled` or `in_order`.

        Raises:
            CorruptStoreError: what is stored is damaged.
        """
        for read in loader:
            states = read.to(device()).decode()  # (tokens, layers, hidden)
            numbers, places, words = [], [], 0
            for example, tokens in zip(read.examples.tolist(), read.lengths.tolist(), strict=True):
                number = self._number.get(example)
                if number is None:
                    places.append(np.full(tokens, NO_WORD))
                    continue
                of = self._words[number]
                places.append(np.where(of == NO_WORD, NO_WORD, of + words))
                words += len(self.sentences[number].words)
                numbers.append(number)
            if numbers:
                place = torch.from_numpy(np.concatenate(places)).to(states.device)
                averaged = _averaged(states, place, words)
                sentences = [self.sentences[i] for i in numbers]
                yield Batch(averaged, numbers, sentences, [self.golds[i] for i in numbers])


def _averaged(states: Tensor, word: Tensor, words: int) -> Tensor:
    """The mean of the tokens of each word.

    Args:
        states: (tokens, layers, hidden)
        word: (tokens,) number of the word; `NO_WORD` of those of none.
        words: how many there are.

    Returns:
        (layers, words, hidden)
    """
    kept = word != NO_WORD
    word, states = word[kept], states[kept]
    sums = states.new_zeros(words, *states.shape[1:]).index_add_(0, word, states)
    counts = torch.bincount(word, minlength=words).to(states.dtype)
    return (sums / counts[:, None, None]).transpose(0, 1).contiguous()
