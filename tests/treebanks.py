"""Small treebanks that the tests share, in the words of the tiny BERT: hand-written, and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from stores import Made

from bertvision.pipelines.readouts.trees import TreeStates, depths
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.treebank import ParsedSentence

ANNA = """\
# sent_id = anna
# text = Anna doesn't live in the city.
1	Anna	Anna	PROPN	NNP	_	4	nsubj	4:nsubj	_
2-3	doesn't	_	_	_	_	_	_	_	_
2	does	do	AUX	VBZ	_	4	aux	4:aux	_
3	n't	not	PART	RB	_	4	advmod	4:advmod	_
4	live	live	VERB	VB	_	0	root	0:root	_
5	in	in	ADP	IN	_	7	case	7:case	_
6	the	the	DET	DT	_	7	det	7:det	_
7	city	city	NOUN	NN	_	4	obl	4:obl:in	SpaceAfter=No
8	.	.	PUNCT	.	_	4	punct	4:punct	_
"""
BORIS = """\
# newpar
# text = Boris wrote and Clara a book
1	Boris	Boris	PROPN	NNP	_	2	nsubj	2:nsubj	_
2	wrote	write	VERB	VBD	_	0	root	0:root	_
3	and	and	CCONJ	CC	_	4	cc	4.1:cc	_
4	Clara	Clara	PROPN	NNP	_	2	conj	4.1:nsubj	_
4.1	wrote	write	VERB	VBD	_	_	_	2:conj	CopyOf=2
5	a	a	DET	DT	_	6	det	6:det	_
6	book	book	NOUN	NN	_	4	orphan	4.1:obj	_
"""

_KINDS = {
    "VERB": ["founded", "wrote", "born", "lives", "works"],
    "PROPN": ["anna", "boris", "clara", "david", "london", "paris", "rome"],
    "NOUN": ["river", "city", "firm", "book", "king", "queen"],
    "DET": ["the", "a"],
    "ADP": ["of", "in"],
}


def drawn_sentence(
    random: np.random.Generator, name: str, phrases: int | None = None
) -> ParsedSentence:
    """``anna wrote the book in the city of london .``, with one to five phrases behind the verb."""
    words: list[tuple[str, str, int, str]] = []  # form, upos, head, relation

    def add(upos: str, head: int, relation: str) -> int:
        words.append((str(random.choice(_KINDS[upos])), upos, head, relation))
        return len(words)

    add("PROPN", 2, "nsubj")
    verb = above = add("VERB", 0, "root")
    for k in range(phrases or int(random.integers(1, 6))):
        noun = len(words) + (2 if k == 0 else 3)
        relation = "obj" if k == 0 else "obl" if above == verb else "nmod"
        if k:
            add("ADP", noun, "case")
        add("DET", noun, "det")
        add("NOUN", above, relation)
        above = noun if random.random() < 0.5 else verb
    words.append((".", "PUNCT", verb, "punct"))
    form, upos, heads, relations = zip(*words, strict=True)
    return ParsedSentence(name, form, upos, heads, relations)


def as_conllu(sentences: Sequence[ParsedSentence]) -> str:
    """The text of a file."""
    lines = []
    for sentence in sentences:
        lines.append(f"# sent_id = {sentence.id}")
        for i, (word, upos, head, relation) in enumerate(zip(*sentence[1:], strict=True), 1):
            lines.append(f"{i}\t{word}\t_\t{upos}\t_\t_\t{head}\t{relation}\t_\t_")
        lines.append("")
    return "\n".join(lines) + "\n"


def write_treebank(folder: Path, **sizes: int) -> Path:
    """A folder with so many drawn sentences in each split."""
    folder.mkdir(parents=True)
    for k, (split, size) in enumerate(sizes.items()):
        random = np.random.default_rng(k)
        sentences = [drawn_sentence(random, f"{split}-{i}") for i in range(size)]
        (folder / f"xx_drawn-ud-{split}.conllu").write_text(as_conllu(sentences))
    return folder


def embedded(sentence: ParsedSentence, hidden: int) -> np.ndarray:
    """(words, hidden) vectors whose squared distances are those of the tree, and norms its depths.

    Every edge is a direction of its own, and a word the sum of the edges between it and the root.
    """
    vectors = np.zeros((len(sentence.words), hidden))
    for word in np.argsort(depths(sentence.heads), kind="stable").tolist():
        if sentence.heads[word]:
            vectors[word] = vectors[sentence.heads[word] - 1]
            vectors[word, word] += 1
    return vectors


def store_trees(
    folder: Path,
    split: str,
    sentences: Sequence[ParsedSentence],
    states: Sequence[np.ndarray],
    *,
    max_length: int = 128,
    tag: str = "0e",
    without: Mapping[str, int] | None = None,
) -> TreeStates:
    """A stored treebank with the hidden states that words are to have.

    Every second word has two tokens, whose mean is its vector; first and last is a special token.

    Args:
        folder: of the store.
        split: its name.
        sentences: with their trees.
        states: of each sentence (words, layers, hidden).
        max_length: that the split is said to have.
        tag: of the snapshot.
        without: by name of a sentence the index of a word of it that has no token.
    """
    random, task = np.random.default_rng(0), load_task("treebank")
    hidden_states, offsets = [], []
    for sentence, words in zip(sentences, states, strict=True):
        tokens, places, begin = [np.zeros_like(words[0])], [(-1, -1)], 0
        for i, word in enumerate(sentence.words):
            if (without or {}).get(sentence.id) == i:
                begin += len(word) + 1
                continue
            apart = random.standard_normal(words[i].shape) * (i % 2)
            middle = begin + (len(word) if i % 2 == 0 else 1)
            tokens.append(words[i] + apart)
            places.append((begin, middle))
            if i % 2 and len(word) > 1:
                tokens.append(words[i] - apart)
                places.append((middle, begin + len(word)))
            elif i % 2:
                tokens[-1] = words[i]
            begin += len(word) + 1
        hidden_states.append(np.stack([*tokens, np.zeros_like(words[0])]))
        offsets.append([*places, (-1, -1)])
    layers, hidden = states[0].shape[1:]
    made = Made([len(x) for x in offsets], layers=layers, hidden=hidden, tag=tag, split=split)
    made.hidden_states = [torch.from_numpy(x.astype(np.float32)) for x in hidden_states]
    table = task.table(sentences)
    per_token = {"offset_mapping": np.concatenate(offsets).astype(np.int32)}
    made.contents = replace(made.contents, per_token=per_token, per_example={}, examples=table)
    made.spec = replace(made.spec, provenance={"max_length": max_length})
    return TreeStates(made.write(folder))
