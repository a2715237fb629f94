"""Small treebanks that the tests share, in the words of the tiny BERT: hand-written, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertvision.pipelines.tasks.trees.conllu import ParsedSentence

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
