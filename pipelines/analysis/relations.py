"""Attention heads that follow dependency relations, as they are read.

Attention heads that follow a dependency relation, beside the best fixed offset.

Clark et al. (2019, arXiv:1906.04341, section 4.2): a head follows a relation where the word that a
word looks at most is its head, or where the head looks most at it. Attention to a word is the sum
over its pieces, and that of a word the mean over its pieces; special tokens and the word itself
are left out. For each relation the best head is chosen on one half of the sentences and
scored on the other; so is the offset (such as: the next word) that stands beside it.

Run it on the splits of a workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attention import (
    WindowMaps,
    attention_maps,
    load_eager,
    sampled_windows,
)
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Labels, Variable
from bertvision.pipelines.declare import Kept, PrecisionOption, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, points
from bertvision.pipelines.reading import StrPath, Tag, parse_tag, text_of
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.uncertainty import percentiles, resampled_means
from bertvision.pipelines.workspace.checks import check_snapshots
from bertvision.pipelines.workspace.data import check_data, open_data

if TYPE_CHECKING:
    from bertvision.pipelines.tasks.treebank import ParsedSentence

DIRECTIONS = ("dependent to head", "head to dependent")
"""Who looks at whom."""
OfRelations = Annotated[Array, Axes.of("relations")]


@dataclass(frozen=True, eq=False, repr=False)
class RelationsResult(AnalysisResult):
    """The best attention head of each dependency relation, beside the best offset.

    Attributes:
        relations: names, the most frequent first.
        examples: (relations,) how often each stands in the scored sentences.
        layers: (relations,) layer of the best head, from 1.
        heads: (relations,) its number, from 1.
        directions: (relations,) who looks at whom, of `DIRECTIONS`.
        accuracy: (relations,) how often it looks most at the right word.
        offsets: (relations,) the best offset from a word to its head.
        by_offset: (relations,) how often the head stands there.
        low: (relations,) lower end of the 95 % interval, over sentences, of their difference.
        high: (relations,) upper end.
        few: relations that have too few examples.
        few_examples: (few,) how many they have.
        name: Name of the measured snapshot, for titles.
        n_chosen: sentences on which heads and offsets were chosen.
        n_scored: other sentences, on which they were scored.
        n_cut: sentences that were left out because they are longer than a window.
        seed: Seed of the choice of sentences and of the bootstrap.
    """

    kind = "relations"
    heading = "Attention heads that follow a dependency relation"
    titled = (
        "Dependency relations, {name}, chosen on {n_chosen:,} sentences, scored on {n_scored:,} "
        "others"
    )
    caption = "By relation: the best attention head, and the best fixed offset"
    reading = (
        "Accuracy: how often the word that a word looks at most is its head, or it the head's; the "
        "head and the offset were chosen on other sentences. Ahead: by how much the attention head "
        "is better than the offset, with its 95 % interval over sentences; it does not cover that "
        "the best of many heads was taken."
    )
    seen = "For each relation: how often the best attention head is right, and the best offset."

    named = ("name",)
    variables = {
        "examples": Variable("relation", "examples", kind="count"),
        "layer": Variable("relation", field="layers"),
        "head": Variable("relation", field="heads"),
        "direction": Variable("relation", "looks", kind="text", field="directions"),
        "accuracy": Variable("relation", "accuracy (%)", 1),
        "offset": Variable("relation", "offset", kind="text", field="offsets"),
        "by_offset": Variable("relation", "by offset (%)", 1),
        "ahead": Variable("relation", "ahead (95 %)", 1, interval=True),
        "ahead_low": Variable("relation", field="low"),
        "ahead_high": Variable("relation", field="high"),
    }

    relations: Labels
    examples: Annotated[tuple[Count, ...], Axes.of("relations")]
    layers: Annotated[tuple[Count, ...], Axes.of("relations")]
    heads: Annotated[tuple[Count, ...], Axes.of("relations")]
    directions: Annotated[tuple[str, ...], Axes.of("relations")]
    accuracy: OfRelations
    offsets: Annotated[tuple[int, ...], Axes.of("relations")]
    by_offset: OfRelations
    low: OfRelations
    high: OfRelations
    few: tuple[str, ...]
    few_examples: Annotated[tuple[Count, ...], Axes.of("few")]
    name: str
    n_chosen: Count
    n_scored: Count
    n_cut: Count
    seed: int

    @property
    def ahead(self) -> Array:
        """(relations,) by how much the attention head is better than the offset."""
        return self.accuracy - self.by_offset

    def columns(self) -> list[Column]:
        """Columns for a relation; the attention head as ``layer.head``."""
        columns = super().columns()
        return [*columns[:2], Column("attention_head", "layer.head", "text"), *columns[2:]]

    def shown(self) -> list[dict[str, Any]]:
        """The rows in per cent, a head as ``layer.head``."""
        return [
            row
            | {
                "attention_head": f"{row['layer']}.{row['head']}",
                "offset": f"{row['offset']:+d}".replace("-", "−"),
                **{
                    key: 100 * row[key]
                    for key in ("accuracy", "by_offset", "ahead", "ahead_low", "ahead_high")
                },
            }
            for row in self.rows()
        ]

    def remarks(self) -> list[str]:
        """Remarks on the items that were left out."""
        remarks = []
        if self.few:
            named = ", ".join(
                f"{r} ({n})" for r, n in zip(self.few, self.few_examples, strict=True)
            )
            remarks.append(f"Left out, with too few examples: {named}.")
        if self.n_cut:
            remarks.append(f"Left out, longer than a window: {self.n_cut:,} sentences.")
        return remarks

    def charts(self) -> dict[str, Chart]:
        """Accuracy of the best head and offset by relation; and their difference, with interval."""
        rows, title = self.shown(), "dependency relation"
        both = {"best attention head": "accuracy", "best offset": "by_offset"}
        ahead, equal = {"difference": "ahead"}, {"no difference": 0.0}
        return {
            "accuracy": points(rows, both, "accuracy (%)", name="relation", of_places=title),
            "ahead": points(
                rows,
                ahead,
                "attention head less offset (points)",
                name="relation",
                of_places=title,
                levels=equal,
            ),
        }


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
        maps: Attention maps of its window.
    """
    from bertvision.pipelines.tasks.treebank import words_of_tokens

    return Looked(sentence, words_of_tokens(sentence.words, offsets), maps)


def between_words(seen: Looked) -> Array:
    """Attention of words to other words, (layers, heads, words, words); a word to itself is −1."""
    count = len(seen.sentence.words)
    pieces = np.zeros((len(seen.words), count))
    inside = seen.words >= 0
    pieces[inside, seen.words[inside]] = 1
    weights = seen.maps.weights.double().cpu().numpy()
    weights_of_words: Array = (pieces / pieces.sum(axis=0).clip(1)).T @ (weights @ pieces)
    weights_of_words[..., np.arange(count), np.arange(count)] = -1
    return weights_of_words


def relations_of_maps(
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
        name: Name of its subject, for titles.
        n_cut: sentences that were left out because their window does not hold them, for the record.
        seed: Seed of the bootstrap.

    Raises:
        InputError: no relation has enough examples.
    """
    hits: dict[str, Array] = {}
    at_offset: dict[str, npt.NDArray[np.int64]] = {}
    seen: Counter[str] = Counter()
    n_chosen = 0
    for counts in chosen_on:
        n_chosen += 1
        attention = between_words(counts)
        most = attention.argmax(axis=-1)  # (layers, heads, words)
        for word, head, relation in _arcs(counts):
            hits_of_word = np.stack([most[..., word] == head, most[..., head] == word])
            hits[relation] = hits.get(relation, 0) + hits_of_word
            seen[relation] += 1
            right = np.array([word + o == head for o in OFFSETS], np.int64)
            at_offset[relation] = at_offset.get(relation, 0) + right
    best = {
        r: tuple(int(k) for k in np.unravel_index(counts.argmax(), counts.shape))
        for r, counts in hits.items()
    }
    offset = {r: OFFSETS[int(counts.argmax())] for r, counts in at_offset.items()}
    scored: dict[str, list[tuple[int, bool, bool]]] = {}
    sentences = 0
    for counts in scored_on:
        most = between_words(counts).argmax(axis=-1)
        for word, head, relation in _arcs(counts):
            if relation in best:
                direction, layer, at = best[relation]
                looks, target = (word, head) if direction == 0 else (head, word)
                followed = bool(most[layer, at, looks] == target)
                by_offset = word + offset[relation] == head
                scored.setdefault(relation, []).append((sentences, followed, by_offset))
        sentences += 1
    enough = sorted(
        (r for r, counts in scored.items() if min(len(counts), seen[r]) >= FEWEST),
        key=lambda r: -len(scored[r]),
    )
    few = {r: seen[r] + len(scored.get(r, ())) for r in seen if r not in enough}
    if not enough:
        raise InputError(
            f"no relation of {name} has {FEWEST} examples in each half of the sentences: give more "
            "sentences"
        )
    random = np.random.default_rng(seed)
    rows = np.array([_scored(scored[r], sentences, random) for r in enough])
    return RelationsResult(
        relations=tuple(enough),
        examples=tuple(len(scored[r]) for r in enough),
        layers=tuple(best[r][1] + 1 for r in enough),
        heads=tuple(best[r][2] + 1 for r in enough),
        directions=tuple(DIRECTIONS[best[r][0]] for r in enough),
        accuracy=rows[:, 0],
        offsets=tuple(offset[r] for r in enough),
        by_offset=rows[:, 1],
        low=rows[:, 2],
        high=rows[:, 3],
        few=tuple(few),
        few_examples=tuple(few.values()),
        name=name,
        n_chosen=n_chosen,
        n_scored=sentences,
        n_cut=n_cut,
        seed=seed,
    )


def _arcs(seen: Looked) -> Sequence[tuple[int, int, str]]:
    """Word, head and relation of every arc between two words, without sub-types (``nmod:poss``).

    A word that the tokenizer makes no token of looks at nothing: its arcs are left out.
    """
    there = set(seen.words.tolist())
    arcs = enumerate(zip(seen.sentence.heads, seen.sentence.relations, strict=True))
    return [
        (word, head - 1, relation.partition(":")[0])
        for word, (head, relation) in arcs
        if {word, head - 1} <= there and relation.partition(":")[0] not in LEFT_OUT
    ]


def _scored(
    hits: Sequence[tuple[int, bool, bool]], sentences: int, random: np.random.Generator
) -> tuple[float, float, float, float]:
    """Accuracy of the head and of the offset, and the interval of their difference."""
    which, followed, by_offset = (np.array(column) for column in zip(*hits, strict=True))
    total = np.bincount(which, minlength=sentences)
    ahead = np.bincount(which, followed.astype(float) - by_offset, minlength=sentences)
    low, high = percentiles(resampled_means(ahead, total, _RESAMPLES, random))
    return float(followed.mean()), float(by_offset.mean()), float(low), float(high)


@job
def relations(
    checkpoint: Tag,
    *,
    data: Annotated[StrPath | None, Option(decides=False)] = None,
    split: str = "dev",
    sentences: Annotated[int, Option(ge=0)] = 1_000,
    precision: PrecisionOption = "auto",
    seed: Seed = 0,
    **where: Unpack[Kept],
) -> RelationsResult:
    """Find attention heads that follow dependency relations.

    For each relation the best head is chosen on half of the sentences and scored on the others,
    beside the best fixed offset. It runs the encoder; ``data`` is needed the first time.

    Args:
        checkpoint: Snapshot to analyse.
        data: A treebank in CoNLL-U, file or folder, to be named once.
        split: Split of the treebank.
        sentences: Largest seeded sample of sentences; 0 takes all.
        seed: Seed of the sample and of intervals.

    Raises:
        UnknownNameError: there is no such snapshot, treebank or split.
        InputError: the treebank is malformed, or no relation has enough examples.
    """
    request, tag = Request(relations, locals()), parse_tag(checkpoint)
    root, source = request.workspace.root, text_of(data)
    check_snapshots(request.workspace, [tag])
    check_data(root, None, "treebank", source)
    open_data(root, None, "treebank", source)
    folder, arithmetic = request.snapshot(tag, precision)
    treebank = request.workspace.dataset("treebank")
    treebank.check([split])
    request.names = [split]

    def measure() -> RelationsResult:
        from bertvision.pipelines.tasks.treebank import is_cut
        from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer

        tokenizer = load_snapshot_tokenizer(folder)
        items, windows = treebank.items(split), treebank.windows(split, tokenizer)
        ends = windows.first_token + windows.n_tokens
        offsets = [
            windows.offset_mapping[begin:end]
            for begin, end in zip(windows.first_token, ends, strict=True)
        ]
        whole = np.array(
            [
                i
                for i, item in enumerate(items)
                if not is_cut(item.text, offsets[i], treebank.config.max_length)
            ]
        )
        chosen = whole[sampled_windows(len(whole), sentences or None, seed)]
        order = np.random.default_rng(seed).permutation(chosen)
        model = load_eager(folder)
        halves = (
            (
                looked(items[maps.row], offsets[maps.row], maps)
                for maps in attention_maps(model, windows, rows, precision=arithmetic)
            )
            for rows in (order[: len(order) // 2], order[len(order) // 2 :])
        )
        name, n_cut = f"{tag}/treebank-{split}", len(items) - len(whole)
        return relations_of_maps(*halves, name=name, n_cut=n_cut, seed=seed)

    return request.answer(RelationsResult, measure)
