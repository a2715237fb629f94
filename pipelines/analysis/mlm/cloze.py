"""Cloze tests: does the right word come first where it is masked?

Facts as in Petroni et al. (2019), *Language models as knowledge bases?* (LAMA): candidates are a
fixed set of words, and P@k says how often the right one is among the first k of them. Number
agreement as in Goldberg (2019), *Assessing BERT's syntactic abilities*: two candidates, the verb in
either number. Negation as in Kassner & Schütze (2020), *Negated and misprimed probes*.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.mlm.cloze_result import ClozeResult
from bertvision.pipelines.analysis.mlm.items import MASK, Item, Items
from bertvision.pipelines.analysis.mlm.prompts import Prompts, Vocabulary, prompts
from bertvision.pipelines.analysis.mlm.sums import Decoder, Floats
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.uncertainty import paired_bootstrap

States = Callable[[Prompts], Floats]
"""Prompts → (windows, hidden) last state of each masked token."""
_ALL = "all"


class _Asked(NamedTuple):
    """An item whose answer is one token."""

    item: Item
    words: tuple[str, ...]
    """Its candidates, each another token."""
    tokens: tuple[int, ...]
    """The token of each candidate."""

    @property
    def answer(self) -> int:
        """Where the answer stands among them."""
        return self.words.index(self.item.answer)


class _Answered(NamedTuple):
    """What came first, (items,) each; NaN and -1 where nothing was asked."""

    rank: Array
    """Rank of the answer, from 1; candidates with the same logit stand before it."""
    first: NDArray[np.int64]
    """Index of the candidate with the largest logit."""


def cloze(
    items: Items,
    states: States,
    decoder: Decoder,
    tokenizer: Any,
    *,
    longest: int,
    k: int = 10,
    resamples: int = 10_000,
    seed: int = 0,
    model: str = "model",
    note: str = "",
) -> ClozeResult:
    """Ask for the masked word of every item.

    Args:
        items: what is asked.
        states: an encoder.
        decoder: reads its last states over the vocabulary.
        tokenizer: of the encoder, a fast one.
        longest: most tokens that it takes.
        k: of P@k.
        resamples: of the bootstrap over items, for the interval of P@1.
        seed: of the bootstrap, and of the order of shuffled words.
        model: what answers, for titles.
        note: what is to be known of it.

    Raises:
        InputError: no item can be asked, ``k`` is below 2, or the tokenizer has no mask.
    """
    if k < 2 or resamples < 1:
        raise InputError(f"k is {k} and resamples {resamples}: give 2 or more, and 1 or more")
    vocabulary = Vocabulary(tokenizer)
    asked, left_out = _askable(items, vocabulary)

    def answered(texts: Sequence[str | None]) -> _Answered:
        given = [i for i, text in enumerate(texts) if text is not None]
        found = _Answered(np.full(len(texts), np.nan), np.full(len(texts), -1))
        if given:
            made = prompts([texts[i] for i in given], tokenizer, longest)  # type: ignore[misc]
            if rows := [given[i] for i in made.windows.item_index]:
                features = decoder.features(0, states(made))
                _rank([asked[i] for i in rows], rows, features, decoder, found)
        return found

    plain = answered([found.item.text for found in asked])
    fits = np.isfinite(plain.rank)
    left_out += [
        f"{found.item.id}: its text is longer than {longest} tokens, or has two masks"
        for found, fitting in zip(asked, fits, strict=True)
        if not fitting
    ]
    if not fits.any():
        raise InputError(
            f"no item of {items.name} can be asked ({left_out[0]}): take answers that are one "
            "token of the encoder's tokenizer"
        )
    asked = [asked[i] for i in np.flatnonzero(fits)]
    plain = _Answered(plain.rank[fits], plain.first[fits])
    random = np.random.default_rng(seed)
    shuffled = answered([_shuffled(found.item.text, random) for found in asked])
    negated = answered([_negated(found, vocabulary) for found in asked])
    left_out += [
        f"{found.item.id}: its negated text, where a candidate is not the same token, or too long"
        for found, rank in zip(asked, negated.rank, strict=True)
        if found.item.negated is not None and np.isnan(rank)
    ]
    same = np.where(np.isnan(negated.rank), np.nan, negated.first == plain.first)
    scores = {
        "p1": _first(plain.rank),
        "pk": np.where([len(f.words) > k for f in asked], plain.rank <= k, np.nan),
        "mrr": 1 / plain.rank,
        "chance": np.array([1 / len(found.words) for found in asked]),
        "majority": _majority(asked),
        "shuffled": _first(shuffled.rank),
        "negated": _first(negated.rank),
        "negated_same": same,
        "n_candidates": np.array([float(len(found.words)) for found in asked]),
    }
    members = _members(asked)
    means = {
        name: np.array([_mean(of[rows]) for rows in members.values()])
        for name, of in scores.items()
    }
    ends = [
        paired_bootstrap(p1, np.zeros_like(p1), resamples=resamples, seed=seed)
        for p1 in (scores["p1"][rows] for rows in members.values())
    ]
    return ClozeResult(
        **means,
        p1_low=np.array([end.low for end in ends]),
        p1_high=np.array([end.high for end in ends]),
        groups=tuple(members),
        n_items=tuple(map(len, members.values())),
        n_negated=tuple(int(np.isfinite(negated.rank[rows]).sum()) for rows in members.values()),
        name=items.name,
        model=model,
        note=note,
        k=k,
        left_out=tuple(left_out),
        resamples=resamples,
        seed=seed,
    )


def _askable(items: Items, vocabulary: Vocabulary) -> tuple[list[_Asked], list[str]]:
    """The items whose answer and another candidate are one token; what is left out, and why."""
    asked, unanswered = [], []
    dropped: Counter[str] = Counter()
    for item, words in zip(items.items, items.choices(), strict=True):
        tokens = vocabulary.tokens(item.text, words)
        if tokens[item.answer] is None:
            unanswered.append(f"{item.id}: its answer {item.answer!r} is not one token")
            continue
        by_token = {tokens[item.answer]: item.answer}
        chosen: dict[str, int] = {}
        for word in words:
            if (token := tokens[word]) is None:
                dropped[f"candidate {word!r}, not one token"] += 1
            elif (same := by_token.setdefault(token, word)) != word:
                dropped[f"candidate {word!r}, the same token as {same!r}"] += 1
            else:
                chosen[word] = token
        if len(chosen) < 2:
            unanswered.append(f"{item.id}: no candidate beside its answer is one token")
            continue
        asked.append(_Asked(item, tuple(chosen), tuple(chosen.values())))
    told = [f"{what} (of {times:,} items)" for what, times in sorted(dropped.items())]
    return asked, unanswered + told


def _rank(
    asked: Sequence[_Asked],
    rows: Sequence[int],
    features: Floats,
    decoder: Decoder,
    found: _Answered,
) -> None:
    """Fill in ranks, of all items with the same candidates at a time."""
    alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, of in enumerate(asked):
        alike[of.tokens].append(i)
    for tokens, members in alike.items():
        index = np.array(tokens)
        logits = features[members] @ decoder.weight[index].T + decoder.bias(0)[index]
        own = np.array([asked[i].answer for i in members])
        as_large = logits >= np.take_along_axis(logits, own[:, None], axis=1)
        places = [rows[i] for i in members]
        found.rank[places] = as_large.sum(axis=1)
        found.first[places] = logits.argmax(axis=1)


def _shuffled(text: str, random: np.random.Generator) -> str | None:
    """The text with the words beside the mask in another order; None where there is none."""
    words = text.split()
    others = [i for i, word in enumerate(words) if MASK not in word]
    if len({words[i] for i in others}) < 2:
        return None
    mixed = list(words)
    while mixed == words:
        for i, j in zip(others, random.permutation(others), strict=True):
            mixed[i] = words[j]
    return " ".join(mixed)


def _negated(found: _Asked, vocabulary: Vocabulary) -> str | None:
    """The negated text, where the candidates are the same tokens in it."""
    text = found.item.negated
    if text is None or tuple(vocabulary.tokens(text, found.words).values()) != found.tokens:
        return None
    return text


def _majority(asked: Sequence[_Asked]) -> Array:
    """(items,) the chance that the commonest answer of the same candidates is the right one."""
    answers: defaultdict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for found in asked:
        answers[frozenset(found.words)][found.item.answer] += 1
    scores = []
    for found in asked:
        counts = answers[frozenset(found.words)]
        most = max(counts.values())
        tied = sum(times == most for times in counts.values())
        scores.append((counts[found.item.answer] == most) / tied)
    return np.array(scores)


def _members(asked: Sequence[_Asked]) -> dict[str, list[int]]:
    """By group its items, and all of them where there are several groups."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for i, found in enumerate(asked):
        groups[found.item.group].append(i)
    if len(groups) > 1:
        groups[_ALL if _ALL not in groups else "all groups"] = list(range(len(asked)))
    return dict(groups)


def _first(rank: Array) -> Array:
    """1 where the answer came first, 0 where not, NaN where nothing was asked."""
    return np.where(np.isnan(rank), np.nan, rank == 1)


def _mean(values: Array) -> float:
    """Mean of what is a number; NaN where nothing is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan
