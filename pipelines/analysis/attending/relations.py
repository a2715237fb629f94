"""Attention heads that follow a dependency relation, beside the best fixed offset.

Clark et al. (2019, arXiv:1906.04341, section 4.2): a head follows a relation where the word that a
word looks at most is its head, or where the head looks most at it. Attention to a word is the sum
over its pieces, and that of a word the mean over its pieces; special tokens and the word itself
are left out. For each relation the best head is chosen on one half of the sentences and
scored on the other; so is the offset (such as: the next word) that stands beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.maps import WindowMaps
from bertvision.pipelines.analysis.attending.relations_result import DIRECTIONS, RelationsResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.tasks.trees.conllu import ParsedSentence
from bertvision.pipelines.tasks.trees.treebank import words_of_tokens
from bertvision.pipelines.uncertainty import percentiles, resampled_means

FEWEST = 10
"""Examples that a relation needs in each half."""
OFFSETS = tuple(o for o in range(-8, 9) if o)
LEFT_OUT = ("punct", "root")
"""Relations that are none between two words of the sentence's structure."""
_RESAMPLES = 1000


class Looked(NamedTuple):
    """A sentence, and the attention on its window."""

    sentence: ParsedSentence
    words: npt.NDArray[np.int64]
    """(tokens,) the word that each token is of; −1 of special tokens."""
    maps: WindowMaps


def looked(sentence: ParsedSentence, offsets: npt.NDArray[np.int32], maps: WindowMaps) -> Looked:
    """A sentence with its attention.

    Args:
        sentence: whole inside of its window.
        offsets: (tokens, 2) characters of its tokens.
        maps: of its window.
    """
    return Looked(sentence, words_of_tokens(sentence.words, offsets), maps)


def between_words(of: Looked) -> Array:
    """Attention of words to other words, (layers, heads, words, words); a word to itself is −1."""
    count = len(of.sentence.words)
    pieces = np.zeros((len(of.words), count))
    inside = of.words >= 0
    pieces[inside, of.words[inside]] = 1
    weights = of.maps.weights.double().cpu().numpy()
    found: Array = (pieces / pieces.sum(axis=0).clip(1)).T @ (weights @ pieces)
    found[..., np.arange(count), np.arange(count)] = -1
    return found


def relations(
    chosen_on: Iterable[Looked],
    scored_on: Iterable[Looked],
    *,
    name: str = "x",
    n_cut: int = 0,
    seed: int = 0,
) -> RelationsResult:
    """The best attention head of each relation, and the best offset.

    Args:
        chosen_on: sentences on which both are chosen; one is held at a time.
        scored_on: others, on which they are scored.
        name: what it is of, for titles.
        n_cut: sentences that were left out because their window does not hold them, for the record.
        seed: of the bootstrap.

    Raises:
        InputError: no relation has enough examples.
    """
    hits: dict[str, Array] = {}
    at_offset: dict[str, npt.NDArray[np.int64]] = {}
    seen: Counter[str] = Counter()
    n_chosen = 0
    for of in chosen_on:
        n_chosen += 1
        attention = between_words(of)
        most = attention.argmax(axis=-1)  # (layers, heads, words)
        for word, head, relation in _arcs(of):
            found = np.stack([most[..., word] == head, most[..., head] == word])
            hits[relation] = hits.get(relation, 0) + found
            seen[relation] += 1
            right = np.array([word + o == head for o in OFFSETS], np.int64)
            at_offset[relation] = at_offset.get(relation, 0) + right
    best = {
        r: tuple(int(k) for k in np.unravel_index(of.argmax(), of.shape)) for r, of in hits.items()
    }
    offset = {r: OFFSETS[int(of.argmax())] for r, of in at_offset.items()}
    scored: dict[str, list[tuple[int, bool, bool]]] = {}
    sentences = 0
    for of in scored_on:
        most = between_words(of).argmax(axis=-1)
        for word, head, relation in _arcs(of):
            if relation in best:
                direction, layer, at = best[relation]
                looks, target = (word, head) if direction == 0 else (head, word)
                followed = bool(most[layer, at, looks] == target)
                by_offset = word + offset[relation] == head
                scored.setdefault(relation, []).append((sentences, followed, by_offset))
        sentences += 1
    enough = sorted(
        (r for r, of in scored.items() if min(len(of), seen[r]) >= FEWEST),
        key=lambda r: -len(scored[r]),
    )
    few = {r: seen[r] + len(scored.get(r, ())) for r in seen if r not in enough}
    if not enough:
        raise InputError(
            f"no relation of {name} has {FEWEST} examples in each half of the sentences: give more "
            "sentences"
        )
    random = np.random.default_rng(seed)
    rows = [_scored(scored[r], sentences, random) for r in enough]
    return RelationsResult(
        relations=tuple(enough),
        examples=tuple(len(scored[r]) for r in enough),
        layers=tuple(best[r][1] + 1 for r in enough),
        heads=tuple(best[r][2] + 1 for r in enough),
        directions=tuple(DIRECTIONS[best[r][0]] for r in enough),
        accuracy=np.array([row[0] for row in rows]),
        offsets=tuple(offset[r] for r in enough),
        by_offset=np.array([row[1] for row in rows]),
        low=np.array([row[2] for row in rows]),
        high=np.array([row[3] for row in rows]),
        few=tuple(few),
        few_examples=tuple(few.values()),
        name=name,
        n_chosen=n_chosen,
        n_scored=sentences,
        n_cut=n_cut,
        seed=seed,
    )


def _arcs(of: Looked) -> Sequence[tuple[int, int, str]]:
    """Word, head and relation of every arc between two words, without sub-types (``nmod:poss``).

    A word that the tokenizer makes no token of looks at nothing: its arcs are left out.
    """
    there = set(of.words.tolist())
    arcs = enumerate(zip(of.sentence.heads, of.sentence.relations, strict=True))
    return [
        (word, head - 1, relation.partition(":")[0])
        for word, (head, relation) in arcs
        if {word, head - 1} <= there and relation.partition(":")[0] not in LEFT_OUT
    ]


def _scored(
    found: Sequence[tuple[int, bool, bool]], sentences: int, random: np.random.Generator
) -> tuple[float, float, float, float]:
    """Accuracy of the head and of the offset, and the interval of their difference."""
    which, followed, by_offset = (np.array(column) for column in zip(*found, strict=True))
    total = np.bincount(which, minlength=sentences)
    ahead = np.bincount(which, followed.astype(float) - by_offset, minlength=sentences)
    low, high = percentiles(resampled_means(ahead, total, _RESAMPLES, random))
    return float(followed.mean()), float(by_offset.mean()), float(low), float(high)
